"""The env `shop`: prices that only a `price` tool knows, then a real `python` tool: two or three
calls that depend on each other.

`task.data`: `prices` (item -> integer), `items` (asked for, in order), `expression`, `answer`;
`prorl.tasks.generated` makes such tasks. `price` is answered here from the task's data; `python`
runs in the RUN sandbox. EVAL needs none: the reward is exact match.
"""

from __future__ import annotations

from prorl.envs.arith import SYSTEM, call_python, exact
from prorl.envs.tools import BAD_CALL, PYTHON, Solution, call_problem, text_field
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.protocols import Reference, Sandbox
from prorl.types import Message, SandboxSpec, Score, Stage, Task, ToolCall, ToolResult, ToolSpec

PRICE = ToolSpec(
    "price",
    "Price of one item.",
    {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
)


class ShopEnv:
    """Implements `prorl.protocols.Env`."""

    name = "shop"

    def check(self, task: Task) -> None:
        """Raise TaskError if `task.data` lacks prices, items, the expression or the answer."""
        text_field(task, "expression")
        text_field(task, "answer")
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

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """One for `python` in RUN, none in EVAL."""
        return SandboxSpec() if stage is Stage.RUN else None

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """`price` and `python`."""
        return (PRICE, PYTHON)

    def messages(self, task: Task) -> tuple[Message, ...]:
        """A system message of four words and the question."""
        return (Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt))

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing: the task has no files."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Answer `price` from the task; run `python` in the sandbox."""
        return (
            look_up(task, call)
            if call.name == PRICE.name
            else await call_python(sandbox, call, timeout_s)
        )

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The final answer's text."""
        return final.strip().encode()

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """1 for the exact answer."""
        return exact(task, artefact)

    def reference(self, task: Task) -> Reference:
        """A look-up for each item, then `python` with the right prices."""
        prices = tuple(ToolCall(PRICE.name, {"item": item}) for item in task.data["items"])
        return Solution(
            (*prices, ToolCall(PYTHON.name, {"code": task.data["expression"]})), task.data["answer"]
        )


def look_up(task: Task, call: ToolCall) -> ToolResult:
    """What `price` says."""
    if problem := call_problem((PRICE,), call):
        return ToolResult(output=f"error: {problem}"[:40], exit_code=BAD_CALL)
    price = task.data["prices"].get(call.arguments["item"])
    return ToolResult(output="error: not sold") if price is None else ToolResult(output=str(price))
