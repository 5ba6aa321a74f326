"""The groups of a run that are accepted and not started: ids in order, which are neighbours.

The groups themselves stay in the log until they are opened, so that a million that wait cost
memory for the requests that brought them and not for what they hold. One that has ended while it
waited has its turn, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

JOIN_S = 60.0
"""Ids that came within so long of each other share a time: that of the last."""


@dataclass(slots=True)
class _Came:
    end: int
    """Behind the last id."""
    began: float
    since: float


class GroupPool:
    """The groups of a run that wait to be opened, first in, first out.

    >>> pool = GroupPool()
    >>> pool.extend(3, 6, now=1.0)
    >>> pool.extend(6, 7, now=90.0)
    >>> len(pool), pool.popleft(), list(pool), pool.first_since()
    (4, 3, [4, 5, 6], 1.0)
    """

    def __init__(self) -> None:
        self.first = self._end = 0
        self._came: deque[_Came] = deque()

    def __len__(self) -> int:
        return self._end - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self._end))

    def extend(self, first: int, end: int, now: float) -> None:
        """All ids from `first` to before `end` have come, behind those that wait."""
        assert not self or first == self._end
        self.first, self._end = self.first if self else first, end
        if self._came and now - self._came[-1].began < JOIN_S:
            self._came[-1].end, self._came[-1].since = end, now
        else:
            self._came.append(_Came(end, now, now))

    def popleft(self) -> int:
        """The one that has waited longest. Raises IndexError when there is none."""
        came = self._came[0]
        self.first += 1
        if self.first == came.end:
            self._came.popleft()
        return self.first - 1

    def first_since(self) -> float:
        """Returns when the first id came, or later. Raises IndexError when there is none."""
        return self._came[0].since
