"""What keeps held-out tasks apart from training tasks.

Operands are told apart by a hash, wordings by a rule over (opening, phrase).

Invariants: a tuple of operands belongs to one split, in every form of a set; an (opening, phrase)
pair belongs to one split. Every opening and every phrase occurs in training, so that a held-out
wording is a combination never seen of words that were. It does not promise that a single operand is
unseen: only whole tuples are.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from prorl.errors import TaskError
from prorl.types import Task

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

T = TypeVar("T")

_SHARE = 5  # one operand tuple in five is held out
_WORDINGS = 3  # and one wording in three
_TRIES = 10_000
MAX_TASKS = 200_000


def split_of(operands: Sequence[object]) -> Split:
    """Which split a tuple of operands belongs to, whatever the form and the seed.

    >>> split_of((3, 4)), split_of((3, 7))
    ('train', 'heldout')
    """
    digest = zlib.crc32(",".join(str(operand) for operand in operands).encode())
    return "heldout" if digest % _SHARE == 0 else "train"


def wordings(openings: Sequence[T], phrases: Sequence[T], split: Split) -> list[tuple[T, T]]:
    """The (opening, phrase) pairs of a split.

    With at least three openings each of them and each phrase is in training.

    >>> wordings("abc", "xy", "heldout")
    [('a', 'x'), ('c', 'y')]
    """
    heldout = split == "heldout"
    pairs = (
        (index + place, opening, phrase)
        for index, opening in enumerate(openings)
        for place, phrase in enumerate(phrases)
    )
    return [
        (opening, phrase)
        for position, opening, phrase in pairs
        if (position % _WORDINGS == 0) == heldout
    ]


def check_split(split: str) -> Split:
    """Raises TaskError for anything but `train` and `heldout`."""
    for known in SPLITS:
        if split == known:
            return known
    raise TaskError(f"split {split!r}", f"one of {', '.join(SPLITS)}")


def distinct(
    n: int, rng: random.Random, draw: Callable[[random.Random, int], Task | None]
) -> list[Task]:
    """n tasks with n different prompts; `draw(rng, index)` gives a task or None (try again).

    Raises TaskError.
    """
    if n > MAX_TASKS:
        raise TaskError(f"{n} tasks of a generated set", f"at most {MAX_TASKS}")
    tasks: dict[str, Task] = {}
    tries = 0
    while len(tasks) < n:
        task = draw(rng, len(tasks))
        tries += 1
        if task is not None and task.prompt not in tasks:
            tasks[task.prompt] = task
            tries = 0
        if tries > _TRIES:
            found = f"{n} tasks asked for, {len(tasks)} different ones found"
            raise TaskError(found, "fewer tasks", "lower n")
    return list(tasks.values())
