"""The groups of a run that are accepted and not started: ids in order, as ranges.

The groups themselves stay in the log until they are opened, so that a million that wait cost
memory for the requests that brought them and not for what they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

JOIN_S = 60.0
"""Ids that came within so long of each other share a range, and the time of the last."""


@dataclass(slots=True)
class _Range:
    first: int
    end: int
    began: float
    since: float
    """When its last id came."""


class GroupPool:
    """The groups of a run that wait to be opened, first in, first out.

    >>> pool = GroupPool()
    >>> for group_id in (3, 4, 5, 9):
    ...     pool.append(group_id, now=1.0)
    >>> len(pool), list(pool), pool.popleft(), 4 in pool, 3 in pool
    (4, [3, 4, 5, 9], 3, True, False)
    """

    def __init__(self) -> None:
        self._ranges: deque[_Range] = deque()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return (group_id for ids in self._ranges for group_id in range(ids.first, ids.end))

    def __contains__(self, group_id: int) -> bool:
        return any(ids.first <= group_id < ids.end for ids in self._ranges)

    def append(self, group_id: int, now: float) -> None:
        """It has come; ids only grow."""
        self.extend(group_id, group_id + 1, now)

    def extend(self, first: int, end: int, now: float) -> None:
        """All ids from `first` to before `end` have come; ids only grow."""
        last = self._ranges[-1] if self._ranges else None
        if last is not None and last.end == first and now - last.began < JOIN_S:
            last.end, last.since = end, now
        else:
            self._ranges.append(_Range(first, end, now, now))
        self._len += end - first

    def popleft(self) -> int:
        """The one that has waited longest. Raises IndexError when there is none."""
        ids = self._ranges[0]
        ids.first += 1
        if ids.first == ids.end:
            self._ranges.popleft()
        self._len -= 1
        return ids.first - 1

    @property
    def first(self) -> int:
        """The one that has waited longest. Raises IndexError when there is none."""
        return self._ranges[0].first

    def first_since(self) -> float:
        """No later than this did the first id come. Raises IndexError when there is none."""
        return self._ranges[0].since
