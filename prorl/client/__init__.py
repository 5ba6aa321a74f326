"""What trainers, notebooks and the CLI use to reach a service.

Imports no torch; open `client.py` first, then `packed.py`.
"""

from prorl.client.client import Client, connect
from prorl.client.packed import PackedBatch, TorchBatch

__all__ = ["Client", "PackedBatch", "TorchBatch", "connect"]
