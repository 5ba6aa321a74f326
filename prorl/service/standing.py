"""Attempts that give their slots to other runs, as the gateway knows them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Stand(Enum):
    """Where an attempt is on its way to standing still and back (`preemption.py`)."""

    ASKED = "asked"
    """It was told to, and ends its turn."""
    STILL = "still"
    WAKING = "waking"
    """It may go on, and waits for a slot."""


class Suspension(NamedTuple):
    """An attempt that gives its slot to other runs."""

    stand: Stand
    since: float
    """On the loop's clock."""
