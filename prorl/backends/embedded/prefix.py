"""Keys and values of finished requests: the next turn, or a sibling, computes only what differs.

Invariants: bounded by bytes and MAX_ENTRIES, least recently used goes first; an entry that another
one extends is dropped. An entry is only ever reused under the weights that made it: whoever changes
weights calls `clear`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.completion import num_shared

if TYPE_CHECKING:
    from prorl.types import Float32, Int32

MAX_ENTRIES = 128


class Match(NamedTuple):
    """The entry that shares the longest prefix."""

    common: int
    saved: Float32


class PrefixStore:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[bytes, Float32] = OrderedDict()
        """The entries by their ids."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Int32) -> Match | None:
        """The entry with the longest common prefix, or None when not even one token is shared."""
        best, key = 0, b""
        for other in self._entries:
            common = num_shared(np.frombuffer(other, np.int32), ids)
            if common > best:
                best, key = common, other
        if not best:
            return None
        self._entries.move_to_end(key)
        return Match(best, self._entries[key])

    def add(self, ids: Int32, saved: Float32) -> None:
        """Keep `saved`, the keys and values of exactly these ids, if it fits in the budget."""
        key = ids.tobytes()
        for other in [other for other in self._entries if key.startswith(other)]:
            self._drop(other)
        if len(ids) == 0 or saved.nbytes > self._budget_bytes:
            return
        while len(self) >= MAX_ENTRIES or self.used_bytes + saved.nbytes > self._budget_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = saved
        self.used_bytes += saved.nbytes

    def clear(self) -> None:
        self._entries.clear()
        self.used_bytes = 0

    def _drop(self, key: bytes) -> None:
        self.used_bytes -= self._entries.pop(key).nbytes
