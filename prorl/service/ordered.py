"""A set whose members come in the order in which they were added."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Ordered(dict[T, None]):
    """A set in the order in which its members came.

    What is decided over it follows from events alone; a set of records goes by where they lie in
    memory, and the same events would not lead to the same state twice.

    >>> names = Ordered[str]()
    >>> for name in ("b", "a", "c", "b"):
    ...     names.add(name)
    >>> names.discard("a")
    >>> list(names), "a" in names
    (['b', 'c'], False)
    """

    def add(self, member: T) -> None:
        """Last, unless it is there."""
        self[member] = None

    def discard(self, member: T) -> None:
        """Take it out, if it is there."""
        self.pop(member, None)
