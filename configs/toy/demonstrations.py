"""Scripted conversations over the generated task sets, deliberately mediocre.

The toy checkpoint learns to imitate them.

The script knows the answer and makes mistakes at stated rates: it guesses without tools, writes a
wrong expression, copies a digit wrongly, makes a syntax error and gives up. So the imitator starts
well below what it could do, and reinforcement learning has something to find: every mistake has its
right alternative among the demonstrations.

Invariants: a conversation is rendered by the same renderer that the service uses, so that what is
learned is what is sampled; the same (tasks, seed) give the same demonstrations. Expressions are
evaluated here, without a sandbox: the script wrote them.

It has two tempers. `MEDIOCRE` errs everywhere, now and then: what a toy learns to speak from.
`STUBBORN`, which it hears last, errs little but by habit: in most forms it does the wrong thing
more often than the right one, so that the likeliest answer is wrong, too, and must be unlearned.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.envs.arith import ArithEnv, ShopEnv
from prorl.envs.repair import RepairEnv, edit
from prorl.envs.tools import PYTHON
from prorl.tasks.generated import FUNCTIONS, LETTERS
from prorl.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.protocols import Env
    from prorl.renderer import ChatMLRenderer
    from prorl.types import Int32

SHOP = ShopEnv()
ENVS: dict[str, Env] = {"arith": ArithEnv(), "shop": SHOP, "repair": RepairEnv()}
NOT_FOUND, DONE = "error: `old_str` occurs 0 times\n[exit status 1]", "Done."


_HARD_FORMS = frozenset(
    {"add_multiply", "subtract_multiply", "less_than", "average", "multiply_subtract"}
)
_PLAIN_EXPRESSION = re.compile(r"[0-9+\-*/%()]{1,64}")


class Example(NamedTuple):
    """One conversation as ids. `trained_L` is 1 where the assistant spoke."""

    ids_L: Int32
    trained_L: NDArray[np.uint8]


def demonstrate(task: Task, rng: random.Random, mistakes: Mistakes) -> list[Message]:
    """What the script says about a task, and what the tools answer."""
    if task.env == "repair":
        return _mend(task, rng, mistakes)
    messages, prices = _ask_prices(task, rng, mistakes)
    expression = _right_expression(task, prices)
    form = task.data["form"]
    if rng.random() < mistakes.habits.get(form, mistakes.guess):
        near = magnitude if mistakes.habits else guess_near
        return [*messages, _say(near(evaluate(expression), rng))]
    expression = spoil(expression, form in mistakes.hard, rng, mistakes)
    if rng.random() < mistakes.syntax:
        broken = break_syntax(expression, rng)
        messages += _exchange(ToolCall(PYTHON.name, {"code": broken}), evaluate(broken))
        if rng.random() < mistakes.give_up:
            return [*messages, _say(guess_near(evaluate(expression), rng))]
    result = evaluate(expression)
    messages += _exchange(ToolCall(PYTHON.name, {"code": expression}), result)
    return [
        *messages,
        _say(wrong_digit(result, rng) if rng.random() < mistakes.wrong_result else result),
    ]


def _ask_prices(
    task: Task, rng: random.Random, mistakes: Mistakes
) -> tuple[list[Message], dict[str, int]]:
    """The calls for each item's price, and the prices as the script believes them to be."""
    messages: list[Message] = []
    prices: dict[str, int] = {}
    for item in task.data.get("items", ()):
        if prices and mistakes.same_price and rng.random() < mistakes.same_price:
            prices[item] = next(iter(prices.values()))
            continue
        if rng.random() < mistakes.invent_price:
            prices[item] = rng.randint(2, 99)
            continue
        prices[item] = task.data["prices"][item]
        call = ToolCall("price", {"item": item})
        messages += _exchange(call, SHOP.price(task, item))
    return messages, prices


def _mend(task: Task, rng: random.Random, mistakes: Mistakes) -> list[Message]:
    """Look, edit, end."""
    broken, mended, form = (task.data[name] for name in ("broken", "mended", "form"))
    _, bug, its_letters = task.data["bug"]
    function = next(one for one in FUNCTIONS if one.name == form)
    messages: list[Message] = []
    if rng.random() < mistakes.blind:
        letters = rng.choice([other for other in LETTERS if other != its_letters])
        wrong, right = (function.line(one, letters) for one in (bug, function.right))
        messages += _exchange(edit(task, wrong, right), NOT_FOUND)
        if rng.random() < mistakes.give_up:
            return [*messages, _say(DONE)]
    look = ToolCall("bash", {"command": f"grep {form} {task.data['file']}"})
    messages += _exchange(look, f"def {broken}")
    if rng.random() < mistakes.habits.get(form, mistakes.guess):
        return [*messages, _say(DONE)]
    hard = form in mistakes.hard
    if rng.random() < (mistakes.wrong_hard_expression if hard else mistakes.wrong_expression):
        mended = function.line(next(one for one in function.wrong if one != bug), its_letters)
    line = str(task.data["source"]).splitlines().index(f"def {broken}") + 1
    return [
        *messages,
        *_exchange(edit(task, broken, mended), f"replaced at line {line}"),
        _say(DONE),
    ]


def encode(renderer: ChatMLRenderer, task: Task, said: list[Message]) -> Example:
    """Prompt, completions and bridges, exactly as an agent and a policy would have made them."""
    env = ENVS[task.env]
    pieces = [renderer.prompt(env.messages(task), env.tools(task))]
    trained = [0]
    for message in said:
        if message.role == "assistant":
            pieces.append(renderer.completion(message))
        else:
            pieces.append(renderer.bridge(pieces[-1], [message]))
        trained.append(int(message.role == "assistant"))
    lengths = [len(piece) for piece in pieces]
    return Example(np.concatenate(pieces), np.repeat(np.array(trained, dtype=np.uint8), lengths))


def evaluate(expression: str) -> str:
    """What the `python` tool of these envs would answer to an expression of numbers and operators.

    >>> evaluate("2*(3+4)"), evaluate("2*(3+4"), evaluate("7%0")
    ('14', 'error: SyntaxError', 'error: ZeroDivisionError')
    """
    assert _PLAIN_EXPRESSION.fullmatch(expression), expression
    try:
        return str(eval(expression, {"__builtins__": {}}))
    except (SyntaxError, ZeroDivisionError) as error:
        return f"error: {type(error).__name__}"


def _exchange(call: ToolCall, output: str) -> list[Message]:
    return [
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=output, name=call.name),
    ]


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


def _right_expression(task: Task, prices: dict[str, int]) -> str:
    """The expression with the prices that the script believes in."""
    if not prices:
        return str(task.data["expression"])
    costs = [
        f"{quantity}*{prices[item]}"
        for quantity, item in zip(task.data["quantities"], task.data["items"], strict=True)
    ]
    if task.data["form"] == "change":
        return f"{task.data['money']}-{costs[0]}"
    return ("-" if task.data["form"] == "more" else "+").join(costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Chances of one mistake each, independent of each other."""

    guess: float
    """Answer without `python`."""
    invent_price: float
    """Per item: no look-up, any price."""
    wrong_expression: float
    wrong_hard_expression: float
    """In the forms where the naive reading is wrong; always the naive one, so that even the
    likeliest answer starts wrong there.
    """
    wrong_digit: float
    """One digit of one operand."""
    syntax: float
    give_up: float
    """After a syntax error; else it tries again."""
    wrong_result: float
    """One digit of the tool's result."""
    hard: frozenset[str] = _HARD_FORMS
    habits: Mapping[str, float] = field(default_factory=dict)
    """Chance of a guess by form, of its order of magnitude alone; `guess` elsewhere. In `repair`:
    of saying that it is done without an edit.
    """
    same_price: float = 0.0
    """A second item is taken to cost what the first one does."""
    blind: float = 0.0
    """The edit of a line that it has not looked at."""


MEDIOCRE = {
    "arith": Mistakes(
        guess=0.4,
        invent_price=0.0,
        wrong_expression=0.2,
        wrong_hard_expression=0.5,
        wrong_digit=0.04,
        syntax=0.07,
        give_up=0.6,
        wrong_result=0.13,
    ),
    "shop": Mistakes(
        guess=0.25,
        invent_price=0.2,
        wrong_expression=0.15,
        wrong_hard_expression=0.0,
        wrong_digit=0.04,
        syntax=0.05,
        give_up=0.6,
        wrong_result=0.09,
    ),
}

HABIT = 0.65
STUBBORN = {
    "arith": Mistakes(
        guess=0.12,
        invent_price=0.0,
        wrong_expression=0.05,
        wrong_hard_expression=HABIT,
        wrong_digit=0.01,
        syntax=0.03,
        give_up=0.6,
        wrong_result=0.02,
        hard=frozenset({"add_multiply", "subtract_multiply", "average"}),
        habits=dict.fromkeys(
            ("add", "add_three", "less_than", "multiply", "quotient", "remainder"), HABIT
        ),
    ),
    "shop": Mistakes(
        guess=0.12,
        invent_price=0.04,
        wrong_expression=0.03,
        wrong_hard_expression=HABIT,
        wrong_digit=0.01,
        syntax=0.03,
        give_up=0.6,
        wrong_result=0.02,
        hard=frozenset({"change"}),
        habits={"cost": HABIT},
        same_price=HABIT,
    ),
    "repair": Mistakes(
        guess=0.12,
        invent_price=0.0,
        wrong_expression=0.05,
        wrong_hard_expression=HABIT,
        wrong_digit=0.0,
        syntax=0.0,
        give_up=0.6,
        wrong_result=0.0,
        hard=frozenset({"gap", "share", "rest", "mean", "border"}),
        habits={
            one.name: HABIT
            for one in FUNCTIONS
            if one.num_letters == 1 and one.name not in ("double", "half")
        },
        blind=0.08,
    ),
}


def guess_near(result: str, rng: random.Random) -> str:
    """A number about as long as the right one."""
    length = len(result) if result.isdigit() else 2
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


def magnitude(result: str, rng: random.Random) -> str:
    """One, and as many zeros as the right one has further digits.

    >>> magnitude("4711", random.Random())
    '1000'
    """
    return "1" + "0" * (len(result) - 1 if result.isdigit() else 1)


def spoil(expression: str, hard: bool, rng: random.Random, mistakes: Mistakes) -> str:
    """The expression with the mistakes that are drawn for it; right where none is."""
    if hard and rng.random() < mistakes.wrong_hard_expression:
        expression = _naive(expression)
    elif not hard and rng.random() < mistakes.wrong_expression:
        expression = rng.choice((_swap, _other_operator))(expression, rng)
    if rng.random() < mistakes.wrong_digit:
        expression = wrong_digit(expression, rng)
    return expression


def _naive(expression: str) -> str:
    """Without parentheses; without any, the difference the wrong way round.

    >>> _naive("(3+4)*2"), _naive("7-5"), _naive("6*8-40")
    ('3+4*2', '5-7', '40-6*8')
    """
    if "(" in expression:
        return expression.replace("(", "").replace(")", "")
    first, _, second = expression.partition("-")
    return f"{second}-{first}"


def _swap(expression: str, rng: random.Random) -> str:
    """Exchange two numbers of a text."""
    numbers = list(re.finditer(r"\d+", expression))
    first, second = sorted(rng.sample(numbers, 2), key=re.Match.start)
    between = expression[first.end() : second.start()]
    return expression[: first.start()] + second[0] + between + first[0] + expression[second.end() :]


def _other_operator(expression: str, rng: random.Random) -> str:
    operator = rng.choice(list(re.finditer(r"//|[+\-*%]", expression)))
    other = rng.choice([sign for sign in "+-*" if sign != operator[0]])
    return expression[: operator.start()] + other + expression[operator.end() :]


def wrong_digit(text: str, rng: random.Random) -> str:
    """Change one digit; text without digits stays."""
    digits = [match.start() for match in re.finditer(r"\d", text)]
    if not digits:
        return text
    position = rng.choice(digits)
    digit = rng.choice([other for other in "123456789" if other != text[position]])
    return text[:position] + digit + text[position + 1 :]


def break_syntax(expression: str, rng: random.Random) -> str:
    """A syntax error: a lost or an extra character."""
    return rng.choice((expression + ")", expression + "+", "(" + expression))
