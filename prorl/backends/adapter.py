"""How a LoRA adapter is told from a whole checkpoint."""

from __future__ import annotations

import os

ADAPTER_FILE = "adapter_config.json"


def is_adapter(path: str) -> bool:
    """Whether a directory holds a LoRA adapter as PEFT writes it, not a whole checkpoint."""
    return bool(path) and os.path.exists(os.path.join(path, ADAPTER_FILE))
