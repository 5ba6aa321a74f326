"""Measures whether the cost of reading a text grows with the square of its length.

Seconds depend on the machine and on what else it does; how they grow does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

LEAST_S = 0.01
"""Growth by less than that is the clock's: it ticks in four milliseconds on some machines."""
GROWTH = 3.0
"""Twice the text costs a linear reader twice as much, and a quadratic one four times as much."""
MOST_S = 10.0
"""What costs as much is not read at twice its length: a linear reader takes a hundredth of it."""
TRIES = 3
"""Other work of the machine makes one try costly, and hardly each of them."""


class Repeated(NamedTuple):
    """A text of any length: what is before a unit that repeats itself, the unit, what follows."""

    before: str
    unit: str
    after: str = ""

    def of(self, num_chars: int) -> str:
        return f"{self.before}{self.unit * (num_chars // len(self.unit))}{self.after}"


def is_quadratic(read: Callable[[str], object], text: Callable[[int], str], num_chars: int) -> bool:
    """Returns whether twice the text cost GROWTH times as much in each try."""
    return all(grows(read, text, num_chars) for _ in range(TRIES))


def grows(read: Callable[[str], object], text: Callable[[int], str], num_chars: int) -> bool:
    """Returns whether twice the text cost GROWTH times as much in a single try."""
    once_s = read_s(read, text(num_chars))
    if once_s < LEAST_S / 4:  # four times as much is still less than LEAST_S + GROWTH * once_s
        return False
    return once_s >= MOST_S or read_s(read, text(2 * num_chars)) >= LEAST_S + GROWTH * once_s


def read_s(read: Callable[[str], object], text: str) -> float:
    """Returns the CPU seconds of one call."""
    began = time.process_time()
    read(text)
    return time.process_time() - began
