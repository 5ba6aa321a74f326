"""A training of `prorl bench learning`, and what it has to reach."""

from __future__ import annotations

from typing import NamedTuple

START, GOAL, CONTROL_RISE = 0.5, 0.85, 0.1
"""Held-out shares: below before, above after; the control rises by no more."""


class Study(NamedTuple):
    """One demo: the checkpoint that it begins with, its seed, whether it is the control."""

    checkpoint: int
    """Seed that the starting checkpoint was made with; 0 is the one that ships."""
    seed: int
    control: bool = False

    @property
    def name(self) -> str:
        """Name of the demo's run."""
        return f"toy{self.checkpoint}-seed{self.seed}" + ("-control" if self.control else "")
