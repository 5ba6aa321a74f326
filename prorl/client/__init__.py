"""The client library that trainers, notebooks and the CLI use to reach a service.

Imports no torch; open `client.py` first, then `packed.py`. Each name loads its module when it is
first used, so that `http.py` alone needs no Arrow: the process of `prorl serve` stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl.client.client import Client, connect
    from prorl.client.packed import PackedBatch, TorchBatch

_HOMES = {"Client": "client", "PackedBatch": "packed", "TorchBatch": "packed", "connect": "client"}

__all__ = ["Client", "PackedBatch", "TorchBatch", "connect"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'prorl.client' has no attribute {name!r}")
    return getattr(import_module(f"prorl.client.{_HOMES[name]}"), name)
