"""Inference inside prorl, for machines without vLLM: Qwen3-shaped checkpoints in numpy, no torch.

Read in this order: `weights.py` (files -> arrays), `model.py` (one step of the network), `sampling.py` (logits -> tokens),
`prefix.py` (what is not computed twice), `engine.py` (who is in the batch), `backend.py` (asyncio), `__main__.py` (the process).
"""

from prorl.backends.embedded.backend import EmbeddedBackend, Settings

__all__ = ["EmbeddedBackend", "Settings"]
