"""Task sets that are made, not downloaded: seeded, with any number of tasks.

Training and held-out tasks are kept apart.

    generate("arith", split="train", seed=1, n=100)      also as --tasks "arith:train?n=100&seed=1"

Invariants: the same arguments give the same tasks on every machine; held-out operands and wordings
never occur in training.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl

from prorl.errors import TaskError
from prorl.tasks.generated import arith, shop
from prorl.tasks.generated.split import Split, check_split
from prorl.types import Task

SETS: Mapping[str, Callable[[Split, int, int], list[Task]]] = {
    "arith": arith.generate,
    "shop": shop.generate,
}


def generate(name: str, *, split: str = "train", seed: int = 0, n: int) -> list[Task]:
    """n different tasks of a set.

    Raises TaskError for an unknown set or split, or when the set has not that many.

    >>> [task.prompt for task in generate("arith", split="heldout", seed=0, n=2)]
    ['What is 8 plus 60 plus 6?', 'Find 7 less than 7 times 33.']
    """
    if name not in SETS:
        close = difflib.get_close_matches(name, SETS, n=1)
        raise TaskError(
            f"task set {name!r}",
            f"one of {', '.join(SETS)}",
            f"did you mean `{close[0]}`?" if close else "",
        )
    return SETS[name](check_split(split), seed, n)


def is_generated(spec: str) -> bool:
    """Whether this names a generated set rather than a file.

    >>> is_generated("shop:heldout?n=8"), is_generated("tasks/shop.jsonl")
    (True, False)
    """
    return spec.partition(":")[0] in SETS and ":" in spec


def from_spec(spec: str) -> list[Task]:
    """Tasks of `NAME:SPLIT?n=COUNT&seed=SEED`; n is 100 and the seed 0 where they are not given.

    Raises TaskError.
    """
    name, _, rest = spec.partition(":")
    split, _, query = rest.partition("?")
    values = dict(parse_qsl(query, keep_blank_values=True))
    usage = f"{name}:train?n=100&seed=0"
    if unknown := sorted(values.keys() - {"n", "seed"}):
        raise TaskError(f"tasks {spec!r}: unknown {', '.join(unknown)}", usage)
    numbers = {key: int(value) for key, value in values.items() if value.isdecimal()}
    if numbers.keys() != values.keys() or numbers.get("n", 1) < 1:
        raise TaskError(f"tasks {spec!r}", usage, "n is a positive integer, seed an integer >= 0")
    return generate(
        name, split=split or "train", seed=numbers.get("seed", 0), n=numbers.get("n", 100)
    )
