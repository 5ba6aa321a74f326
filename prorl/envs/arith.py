"""The envs `arith` and `shop`: arithmetic in words with a real `python` tool, for small policies.

Messages and outputs of tools are short. In `shop` prices must be looked up first, by a tool that is
answered here from the task's data (`prices`: item -> integer; `items` asked for, in order).

`task.data`: `expression` (the right Python expression), `answer` (its value as text);
`prorl.tasks.generated` makes such tasks. RUN needs a sandbox for the tool; EVAL needs none: the
reward is 1 for the exact answer, else 0.
"""

from __future__ import annotations

from dataclasses import replace

from prorl.envs.base import BaseEnv, Solution, tool
from prorl.envs.tools import BAD_CALL, PYTHON
from prorl.errors import TaskError
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Grade, Task, ToolCall, ToolResult

_OUTPUT_CHARS = 40


@reward("exact")
def exact(task: Task, artifact: bytes) -> Grade:
    answer, right = artifact.decode("utf-8", "replace"), task.data["answer"]
    log = "right" if answer == right else f"expected {right}, given {answer[:_OUTPUT_CHARS]}"
    return Grade(float(answer == right), log)


class ArithEnv(BaseEnv):
    name = "arith"
    system = "Answer with a number."
    needs = ("expression", "answer")
    offers = (PYTHON,)
    rubric = Rubric((exact, 1.0))

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run a tool; its output cut to what a policy with a short context can read.

        The text says what went wrong, so the exit status of code that failed is not kept: an agent
        would say it a second time.
        """
        result = await super().call(task, sandbox, call, timeout_s)
        kept = result.exit_code if result.exit_code == BAD_CALL else 0
        return replace(result, output=short_output(result), exit_code=kept)

    def reference(self, task: Task) -> Solution:
        return Solution(
            (ToolCall(PYTHON.name, {"code": task.data["expression"]}),), task.data["answer"]
        )


class ShopEnv(ArithEnv):
    name = "shop"
    repeatable = ("price",)

    @tool("Price of one item.", item={"type": "string"})
    def price(self, task: Task, item: str) -> str:
        return str(task.data["prices"].get(item, "error: not sold"))

    def check(self, task: Task) -> None:
        super().check(task)
        prices, items = task.data.get("prices"), task.data.get("items")
        if (
            not isinstance(prices, dict)
            or not isinstance(items, list)
            or not all(item in prices for item in items)
        ):
            raise TaskError(
                f"task {task.task_id}: prices {prices!r} for items {items!r}",
                "a price for each item",
            )

    def reference(self, task: Task) -> Solution:
        prices = tuple(ToolCall("price", {"item": item}) for item in task.data["items"])
        return Solution(
            (*prices, ToolCall(PYTHON.name, {"code": task.data["expression"]})), task.data["answer"]
        )


def short_output(result: ToolResult) -> str:
    """Last line of what was printed; for an exception its name.

    >>> failed = ToolResult(output="Traceback ...\\nNameError: x", exit_code=1)
    >>> short_output(ToolResult(output="42\\n")), short_output(failed)
    ('42', 'error: NameError')
    """
    if result.exit_code == BAD_CALL:
        return f"error: {result.output}"[:_OUTPUT_CHARS]
    if result.timed_out:
        return "error: timeout"
    last = (result.output.strip().splitlines() or [""])[-1].strip()
    if result.exit_code:
        return f"error: {last.partition(':')[0]}"[:_OUTPUT_CHARS]
    return last[:_OUTPUT_CHARS]
