"""The set `shop`: questions about prices that only a tool knows.

A policy needs one or two `price` look-ups, then `python`. `data` of a task: `prices` (item ->
price, for the `price` tool), `items` (asked for, in order), `quantities`, `money` (0 where none is
named), `expression` (with the right prices), `answer` (its value as text), `form`. Invariants:
prices are drawn per task, so that they cannot be known without a look-up; answers are integers >=
0; the same (split, seed, n) gives the same tasks on every machine.
"""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

from prorl.tasks.generated.split import Split, distinct, split_of, wordings
from prorl.types import Json, Task

ITEMS = (
    "apples",
    "pears",
    "plums",
    "figs",
    "eggs",
    "pies",
    "rolls",
    "cups",
    "pens",
    "hats",
    "mugs",
    "bags",
)
COST = (
    "How much do {} cost?",
    "What do {} cost?",
    "Tell me the price of {}.",
    "Find the cost of {}.",
)
MORE = (
    "How much more do {} cost?",
    "Tell me how much more {} cost.",
    "Find out how much more {} cost.",
)
CHANGE = (
    "What is my change {}?",
    "How much is left {}?",
    "Tell me my change {}.",
    "Find the change {}.",
)


class Form(NamedTuple):
    """A kind of question: `q`, `r` quantities, `x`, `y` items, `p`, `s` prices, `m` money."""

    name: str
    expression: str
    openings: tuple[str, ...]
    phrases: tuple[str, ...]
    num_items: int


FORMS = (
    Form("cost", "{q}*{p}", COST, ("{q} {x}", "{q} of the {x}"), 1),
    Form("cost_two", "{q}*{p}+{r}*{s}", COST, ("{q} {x} and {r} {y}", "{q} {x} with {r} {y}"), 2),
    Form(
        "change", "{m}-{q}*{p}", CHANGE, ("from {m} after {q} {x}", "if I pay {m} for {q} {x}"), 1
    ),
    Form(
        "more", "{q}*{p}-{r}*{s}", MORE, ("{q} {x} compared to {r} {y}", "{q} {x} than {r} {y}"), 2
    ),
)


def generate(split: Split, seed: int, n: int) -> list[Task]:
    """n different tasks. Raises TaskError when the set has not that many."""
    rng = random.Random(f"shop:{split}:{seed}")
    return distinct(n, rng, partial(_draw, split, seed))


def _draw(split: Split, seed: int, rng: random.Random, index: int) -> Task | None:
    """A task, or None for a question of the other split or one that is not fair."""
    form = rng.choice(FORMS)
    items = rng.sample(ITEMS, form.num_items)
    prices = {item: rng.randint(2, 99) for item in items}
    quantities = [rng.randint(2, 20) for _ in items]
    money = rng.randint(10, 999) if "{m}" in form.expression else 0
    letters: dict[str, Json] = {"m": money}
    for names, values in (("xy", items), ("qr", quantities), ("ps", prices.values())):
        letters.update(zip(names, values, strict=False))
    expression = form.expression.format(**letters)
    answer = eval(expression)
    if split_of((*items, *quantities, money)) != split or answer < 0:
        return None
    opening, phrase = rng.choice(wordings(form.openings, form.phrases, split))
    data = {
        "prices": prices,
        "items": items,
        "quantities": quantities,
        "money": money,
        "expression": expression,
        "answer": str(answer),
        "form": form.name,
    }
    prompt, task_id = opening.format(phrase.format(**letters)), f"shop:{split}:{seed}:{index}"
    return Task(task_id=task_id, env="shop", prompt=prompt, data=data, data_source="shop")
