"""The env `shop`: prices that only a `price` tool knows, then a real `python` tool.

A task takes two or three calls that depend on each other.

`task.data`: `prices` (item -> integer), `items` (asked for, in order), `expression`, `answer`;
`prorl.tasks.generated` makes such tasks. `price` is answered here from the task's data; `python`
runs in the RUN sandbox. EVAL needs none: the reward is exact match.
"""

from __future__ import annotations

from prorl.envs.arith import ArithEnv
from prorl.envs.base import Solution, tool
from prorl.envs.tools import PYTHON
from prorl.errors import TaskError
from prorl.types import Task, ToolCall


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
