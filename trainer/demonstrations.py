"""Scripted conversations over the generated task sets, deliberately mediocre.

The toy checkpoint learns to imitate them.

The script knows the answer and makes mistakes at stated rates: it guesses without tools, writes a
wrong expression, copies a digit wrongly, makes a syntax error and gives up. So the imitator starts
well below what it could do, and reinforcement learning has something to find: every mistake has its
right alternative among the demonstrations.

Invariants: a conversation is rendered by the same renderer that the service uses, so that what is
learned is what is sampled; the same (tasks, seed) give the same demonstrations. Expressions are
evaluated here, without a sandbox: the script wrote them.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.envs.arith import ArithEnv
from prorl.envs.shop import ShopEnv
from prorl.envs.tools import PYTHON
from prorl.trainer.mistakes import Mistakes, break_syntax, guess_near, spoil, wrong_digit
from prorl.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.protocols import Env
    from prorl.renderer import ChatMLRenderer
    from prorl.types import Int32

SHOP = ShopEnv()
ENVS: dict[str, Env] = {"arith": ArithEnv(), "shop": SHOP}


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
    messages, prices = _ask_prices(task, rng, mistakes)
    expression = _right_expression(task, prices)
    if rng.random() < mistakes.guess:
        return [*messages, _say(guess_near(evaluate(expression), rng))]
    expression = spoil(expression, task.data["form"] in _HARD_FORMS, rng, mistakes)
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
        if rng.random() < mistakes.invent_price:
            prices[item] = rng.randint(2, 99)
            continue
        prices[item] = task.data["prices"][item]
        call = ToolCall("price", {"item": item})
        messages += _exchange(call, SHOP.price(task, item))
    return messages, prices


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
