"""Keys and values of finished requests, found again by what they hold.

The next turn, or a sibling, computes only what differs.

Invariants: bounded by bytes, least recently used goes first; an entry that another one extends is
dropped. An entry is only ever reused for the ids that made it, under the weights that made it:
whoever changes weights calls `clear`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Float32, Int32

_MAX_ENTRIES = 512


class Match(NamedTuple):
    """The entry that shares the longest prefix."""

    common: int
    saved: Float32


class PrefixStore:
    """Entries by slot; a matrix of their ids makes one vectorised comparison of all of them."""

    def __init__(self, budget_bytes: int, length: int) -> None:
        self._budget_bytes = budget_bytes
        self._ids: Int32 = np.full((_MAX_ENTRIES, length), -1, dtype=np.int32)
        self._lengths = np.zeros(_MAX_ENTRIES, dtype=np.intp)
        self._entries: OrderedDict[int, Float32] = OrderedDict()
        self._free = list(range(_MAX_ENTRIES))
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Int32) -> Match | None:
        """The entry with the longest common prefix, or None when not even one token is shared."""
        if not self._entries:
            return None
        slots = np.fromiter(self._entries, dtype=np.intp, count=len(self._entries))
        common = common_prefix(self._ids[slots, : len(ids)], ids)
        best = int(common.argmax())
        if common[best] == 0:
            return None
        slot = int(slots[best])
        self._entries.move_to_end(slot)
        return Match(int(common[best]), self._entries[slot])

    def add(self, ids: Int32, saved: Float32) -> None:
        """Keep `saved`, the keys and values of exactly these ids.

        What does not fit in the budget at all is not kept.
        """
        self._drop_prefixes_of(ids)
        if len(ids) == 0 or saved.nbytes > self._budget_bytes:
            return
        while not self._free or self.used_bytes + saved.nbytes > self._budget_bytes:
            self._drop(next(iter(self._entries)))
        slot = self._free.pop()
        self._ids[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)
        self._entries[slot] = saved
        self.used_bytes += saved.nbytes

    def clear(self) -> None:
        for slot in list(self._entries):
            self._drop(slot)

    def _drop_prefixes_of(self, ids: Int32) -> None:
        if self._entries:
            slots = np.fromiter(self._entries, dtype=np.intp, count=len(self._entries))
            common = common_prefix(self._ids[slots, : len(ids)], ids)
            for slot in slots[common == self._lengths[slots]].tolist():
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        saved = self._entries.pop(slot)
        self._ids[slot] = -1
        self._free.append(slot)
        self.used_bytes -= saved.nbytes


def common_prefix(rows: Int32, ids: Int32) -> NDArray[np.intp]:
    """How many leading ids each row shares with `ids`.

    >>> common_prefix(np.array([[1, 2, 3], [1, 9, 3]]), np.array([1, 2, 3])).tolist()
    [3, 1]
    """
    same = rows == ids
    return np.where(same.all(axis=1), len(ids), same.argmin(axis=1))
