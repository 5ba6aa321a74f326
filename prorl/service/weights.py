"""What a publication of weights is about, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from prorl.backends.labels import label_of


class ServedWeights(NamedTuple):
    """What a backend should serve."""

    run_id: str
    tag: str
    version: int
    path: str
    pause: str = "abort"

    def is_named(self, label: str) -> bool:
        """Whether a server's label is of these."""
        return label.startswith(label_of(self.tag, self.version, ""))


class Record(NamedTuple):
    """A row of the run's table `versions`."""

    run_id: str
    version: int
    path: str
    pause: str
    adapter: bool
    took: tuple[str, ...]
    failed: Mapping[str, str]
    load_s: float


class Published(NamedTuple):
    """The outcome of a publication."""

    version: int
    fresh: bool = False
    """False when it was published before."""
    failed: Mapping[str, str] = MappingProxyType({})
    """Backends that did not take it yet, with the reason."""
    pending: bool = False
    """Still being given to backends: say it again."""
