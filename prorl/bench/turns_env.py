"""The env of `prorl bench turns` whose tools need no sandbox: `shop` without its Python."""

from __future__ import annotations

from prorl.envs.base import BaseEnv, Solution, tool
from prorl.rubric import Rubric, reward
from prorl.types import Task, ToolCall


@reward("exact")
def exact(task: Task, artefact: bytes) -> float:
    """Whether it is the answer."""
    return float(artefact.decode() == task.data["answer"])


class Prices(BaseEnv):
    """`task.data`: `prices`, `items` and `answer`, as `shop` has them."""

    name = "prices"
    rubric = Rubric((exact, 1.0))
    repeatable = ("price",)

    @tool("Price of one item.", item={"type": "string"})
    def price(self, task: Task, item: str) -> str:
        """What `price` says."""
        return str(task.data["prices"][item])

    def reference(self, task: Task) -> Solution:
        """Every price, then the answer."""
        calls = (ToolCall("price", {"item": item}) for item in task.data["prices"])
        return Solution(tuple(calls), task.data["answer"])
