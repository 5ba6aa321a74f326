"""Task sets that are made, not downloaded: seeded, with any number of tasks.

    generate("arith", split="train", seed=1, n=100)      also as --tasks "arith:train?n=100&seed=1"

`arith` is twelve forms of integer arithmetic in words, to be worked out with a `python` tool;
`data` of a task: `operands`, `expression` (the right Python expression), `answer` (its value as
text), `form`. `shop` asks about prices, drawn per task, that only a tool knows: one or two `price`
look-ups, then `python`; `data`: `prices` (item -> price), `items` (asked for, in order),
`quantities`, `money` (0 where none is named), `expression`, `answer`, `form`. `repair` has a module
of three one-line functions, of which one is wrong and a test says so; `data`, besides what the env
wants (`prorl.envs.repair`): `form` (the function's name), `broken` and `mended` (its line as it is
and as it should be), `bug` (what is told apart: name, wrong expression, letters).

Invariants: the same arguments give the same tasks on every machine; answers are integers >= 0.
Training and held-out tasks are kept apart: a tuple of operands (of `repair` a bug: a function, what
is wrong with it, its letters) belongs to one split by a hash, in every form, an (opening, phrase)
pair by a rule. Every opening and every phrase occurs in training,
so that a held-out wording is a combination never seen of words that were. It does not promise that
a single operand is unseen: only whole tuples are.
"""

from __future__ import annotations

import difflib
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from prorl.errors import TaskError
from prorl.types import Json, Task

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

T = TypeVar("T")

_SHARE = 5  # one operand tuple in five is held out
_WORDINGS = 3  # and one wording in three
_TRIES = 10_000
MAX_TASKS = 200_000


def split_of(operands: Sequence[object]) -> Split:
    """Returns which split a tuple of operands belongs to, whatever the form and the seed.

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
    for name in SPLITS:
        if split == name:
            return name
    raise TaskError(f"split {split!r}", f"one of {', '.join(SPLITS)}")


def distinct(
    n: int, rng: random.Random, draw: Callable[[random.Random, int], Task | None]
) -> list[Task]:
    """Returns n tasks with n different prompts; `draw(rng, index)` gives one, or None to retry.

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
            problem = f"{n} tasks asked for, {len(tasks)} different ones found"
            raise TaskError(problem, "fewer tasks", "lower n")
    return list(tasks.values())


# ---- arith

OPENINGS = (
    "What is {}?",
    "Compute {}.",
    "Find {}.",
    "Work out {}.",
    "Calculate {}.",
    "Tell me {}.",
)


class Sum(NamedTuple):
    """One kind of question, with its numbers and its answer.

    Letters in `expression` and `phrases` are operands with `digits` digits at most, in order.
    """

    name: str
    expression: str
    phrases: tuple[str, ...]
    digits: tuple[int, ...]


SUMS = (
    Sum(
        "multiply_add",
        "{a}*{b}+{c}",
        ("{a} times {b} plus {c}", "{c} more than {a} times {b}"),
        (2, 2, 3),
    ),
    Sum(
        "multiply_subtract",
        "{a}*{b}-{c}",
        ("{a} times {b} minus {c}", "{c} less than {a} times {b}"),
        (2, 2, 2),
    ),
    Sum(
        "add_multiply",
        "({a}+{b})*{c}",
        ("the sum of {a} and {b}, times {c}", "{c} times the sum of {a} and {b}"),
        (3, 3, 1),
    ),
    Sum(
        "subtract_multiply",
        "({a}-{b})*{c}",
        ("{a} minus {b}, all times {c}", "{c} times the difference of {a} and {b}"),
        (3, 3, 1),
    ),
    Sum("add", "{a}+{b}", ("{a} plus {b}", "the sum of {a} and {b}"), (3, 3)),
    Sum("less_than", "{b}-{a}", ("{a} less than {b}", "{b} minus {a}"), (3, 3)),
    Sum("multiply", "{a}*{b}", ("{a} times {b}", "the product of {a} and {b}"), (3, 2)),
    Sum("remainder", "{a}%{b}", ("the remainder of {a} divided by {b}", "{a} modulo {b}"), (3, 2)),
    Sum(
        "quotient",
        "{a}//{b}",
        ("the whole part of {a} divided by {b}", "{a} divided by {b}, rounded down"),
        (3, 1),
    ),
    Sum(
        "average",
        "({a}+{b})//2",
        ("the average of {a} and {b}", "half the sum of {a} and {b}"),
        (3, 3),
    ),
    Sum(
        "add_three",
        "{a}+{b}+{c}",
        ("{a} plus {b} plus {c}", "the sum of {a}, {b} and {c}"),
        (2, 3, 2),
    ),
    Sum(
        "square_add",
        "{a}*{a}+{b}",
        ("the square of {a} plus {b}", "{b} more than the square of {a}"),
        (2, 3),
    ),
)


def arith(split: Split, seed: int, n: int) -> list[Task]:
    """n different tasks. Raises TaskError when the set has not that many."""
    rng = random.Random(f"arith:{split}:{seed}")
    return distinct(n, rng, partial(_draw_sum, split, seed))


def _draw_sum(split: Split, seed: int, rng: random.Random, index: int) -> Task | None:
    """A task, or None for a question of the other split or one that is not fair."""
    form = rng.choice(SUMS)
    operands = tuple(_operand(rng, digits) for digits in form.digits)
    letters = dict(zip("abc", operands, strict=False))
    expression = form.expression.format(**letters)
    answer = eval(expression)
    first, second = operands[:2]
    is_fair = {
        "remainder": first >= second,
        "quotient": first >= second,
        "average": (first + second) % 2 == 0,
    }.get(form.name, answer >= 0)
    if not is_fair or split_of(operands) != split:
        return None
    opening, phrase = rng.choice(wordings(OPENINGS, form.phrases, split))
    data = {
        "operands": list(operands),
        "expression": expression,
        "answer": str(answer),
        "form": form.name,
    }
    prompt, task_id = opening.format(phrase.format(**letters)), f"arith:{split}:{seed}:{index}"
    return Task(task_id=task_id, env="arith", prompt=prompt, data=data, data_source="arith")


def _operand(rng: random.Random, digits: int) -> int:
    """Draws a number of 2 to `digits` digits, each length as likely."""
    length = rng.randint(1, digits)
    return rng.randint(max(2, 10 ** (length - 1)), 10**length - 1)


# ---- shop

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


class Purchase(NamedTuple):
    """A kind of question: `q`, `r` quantities, `x`, `y` items, `p`, `s` prices, `m` money."""

    name: str
    expression: str
    openings: tuple[str, ...]
    phrases: tuple[str, ...]
    num_items: int


PURCHASES = (
    Purchase("cost", "{q}*{p}", COST, ("{q} {x}", "{q} of the {x}"), 1),
    Purchase(
        "cost_two", "{q}*{p}+{r}*{s}", COST, ("{q} {x} and {r} {y}", "{q} {x} with {r} {y}"), 2
    ),
    Purchase(
        "change", "{m}-{q}*{p}", CHANGE, ("from {m} after {q} {x}", "if I pay {m} for {q} {x}"), 1
    ),
    Purchase(
        "more", "{q}*{p}-{r}*{s}", MORE, ("{q} {x} compared to {r} {y}", "{q} {x} than {r} {y}"), 2
    ),
)


def shop(split: Split, seed: int, n: int) -> list[Task]:
    """n different tasks. Raises TaskError when the set has not that many."""
    rng = random.Random(f"shop:{split}:{seed}")
    return distinct(n, rng, partial(_draw_purchase, split, seed))


def _draw_purchase(split: Split, seed: int, rng: random.Random, index: int) -> Task | None:
    """A task, or None for a question of the other split or one that is not fair."""
    form = rng.choice(PURCHASES)
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


# ---- repair

FILES = ("shapes.py", "money.py", "clock.py", "sums.py", "stock.py", "units.py")
LETTERS = ("ab", "xy", "mn", "pq", "uv", "jk")
FIX = ("{}: {}. Fix it.", "Fix {}: {}.", "A test of {} fails: {}.", "Mend {}, where {}.")
FAILURES = (
    "{call} is {got}, not {want}",
    "{call} should be {want}, not {got}",
    "{call} gives {got} instead of {want}",
)
CALLER = "def call(name, *numbers):\n    return globals()[name](*numbers)\n\n\n"
"""The function by which hidden tests call a module's functions."""
_LINES = 3
_HIDDEN = 4
"""Hidden tests of each function."""


class Function(NamedTuple):
    """A function of one line: of `a` and `b`, or of `a` alone, right and wrong."""

    name: str
    right: str
    wrong: tuple[str, ...]

    @property
    def num_letters(self) -> int:
        return 2 if "b" in self.right else 1

    def line(self, expression: str, letters: str) -> str:
        """Returns the line without its `def`.

        >>> Function("area", "a*b", ()).line("a*b", "xy")
        'area(x,y): return x*y'
        """
        body = expression.translate(str.maketrans("ab", letters))
        return f"{self.name}({','.join(letters[: self.num_letters])}): return {body}"


FUNCTIONS = (
    Function("total", "a+b", ("a-b", "a*b", "a+a")),
    Function("gap", "a-b", ("b-a", "a+b", "a%b")),
    Function("area", "a*b", ("a+b", "a-b", "a*a")),
    Function("share", "a//b", ("a%b", "a*b", "b//a")),
    Function("rest", "a%b", ("a//b", "a-b", "b%a")),
    Function("mean", "(a+b)//2", ("a+b//2", "(a-b)//2", "(a+b)//3")),
    Function("border", "(a+b)*2", ("a+b*2", "(a-b)*2", "(a+b)*4")),
    Function("double", "a*2", ("a+2", "a*3", "a-2")),
    Function("half", "a//2", ("a*2", "a//3", "a-2")),
    Function("square", "a*a", ("a+a", "a*2", "a*3")),
    Function("next", "a+1", ("a-1", "a+2", "a*2")),
    Function("last", "a-1", ("a+1", "a-2", "a//2")),
    Function("hours", "a*24", ("a*60", "a+24", "a//24")),
    Function("minutes", "a*60", ("a*24", "a+60", "a//60")),
    Function("weeks", "a//7", ("a*7", "a%7", "a//12")),
    Function("dozens", "a//12", ("a*12", "a%12", "a//7")),
)


def repair(split: Split, seed: int, n: int) -> list[Task]:
    """n different tasks. Raises TaskError when the set has not that many."""
    rng = random.Random(f"repair:{split}:{seed}")
    return distinct(n, rng, partial(_draw_bug, split, seed))


def _draw_bug(split: Split, seed: int, rng: random.Random, index: int) -> Task | None:
    """Draws a task, or None if its bug is of the other split or the numbers do not show it."""
    functions = rng.sample(FUNCTIONS, _LINES)
    letters = [rng.choice(LETTERS) for _ in functions]
    place = rng.randrange(_LINES)
    form, wrong, names = functions[place], rng.choice(functions[place].wrong), letters[place]
    numbers = _numbers(rng)
    want, got = (_value(expression, numbers) for expression in (form.right, wrong))
    bug = (form.name, wrong, names)
    if split_of(bug) != split or want == got:
        return None
    lines = [
        function.line(function.right, its) for function, its in zip(functions, letters, strict=True)
    ]
    mended, lines[place] = lines[place], form.line(wrong, names)
    tests = [
        (function, (numbers if function is form and not number else _numbers(rng)))
        for function in functions
        for number in range(_HIDDEN)
    ]
    asserts = "".join(
        f"    assert call({function.name!r}, {_called(function, operands)})"
        f" == {_value(function.right, operands)}\n"
        for function, operands in tests
    )
    file, (opening, phrase) = rng.choice(FILES), rng.choice(wordings(FIX, FAILURES, split))
    call = f"{form.name}({_called(form, numbers)})"
    data = {
        "file": file,
        "source": "".join(f"def {line}\n" for line in lines),
        "prompt": CALLER,
        "entry_point": "call",
        "test": f"def check(call):\n{asserts}",
        "broken": lines[place],
        "mended": mended,
        "bug": list(bug),
        "form": form.name,
    }
    prompt = opening.format(file, phrase.format(call=call, got=got, want=want))
    task_id = f"repair:{split}:{seed}:{index}"
    return Task(task_id=task_id, env="repair", prompt=prompt, data=data, data_source="repair")


def _numbers(rng: random.Random) -> tuple[int, int]:
    """Two numbers, the greater one first."""
    second = rng.randint(2, 12)
    return rng.randint(second, 60), second


def _called(function: Function, numbers: tuple[int, int]) -> str:
    return ",".join(map(str, numbers[: function.num_letters]))


def _value(expression: str, numbers: tuple[int, int]) -> int:
    return int(eval(expression, {"a": numbers[0], "b": numbers[1]}))


# ---- all of them

SETS: Mapping[str, Callable[[Split, int, int], list[Task]]] = {
    "arith": arith,
    "shop": shop,
    "repair": repair,
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
    """Returns whether this names a generated set rather than a file.

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
