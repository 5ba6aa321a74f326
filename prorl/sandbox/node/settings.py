"""What sandboxd can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    max_sandboxes: int = 512
    """Alive at once, warm and reserved ones included; more wait."""
    warm: int = 1
    """Kept ready for each of the last few specs that were asked for."""
    snapshot_bytes: int = 2 << 30
    """Prepared workspaces kept on disk for siblings of a task."""
    cgroups: bool = True
    """Use control groups where they can be used."""
    images: str = ""
    """Folder of this node's image registry; empty = the user's cache folder."""
    mirrors: Mapping[str, str] | None = None
    """By host of the container registries that images are pulled from on demand; None = nothing is
    pulled.
    """
    build: Mapping[str, Any] = field(default_factory=dict)
    """Settings of builds from Dockerfiles (`images/dockerfile.py`)."""
    max_memory_bytes: int = 0
    """The most that a sandbox gets of what its spec asks for; 0 = no bound."""
    max_overlay_bytes: int = 0
    max_cpus: float = 0.0
    image: str = ""
    """Image of specs that name none; empty = the host's /usr, read-only."""
