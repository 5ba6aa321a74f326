"""The env `shop`: prices come from the task, python from the sandbox, the answer must be exact."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from prorl.envs.arith import ShopEnv
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.tasks.generated import generate
from prorl.testing import LocalSandbox
from prorl.types import Stage, ToolCall

ENV = ShopEnv()
TASK = next(task for task in generate("shop", seed=0, n=20) if len(task.data["items"]) == 2)


async def test_the_reference_looks_every_price_up_computes_and_is_worth_one(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    reference = ENV.reference(TASK)
    outputs = []
    for call in reference.calls:
        call = (
            call
            if call.name == "price"
            else ToolCall("python", {"code": f"print({call.arguments['code']})"})
        )
        outputs.append((await ENV.call(TASK, sandbox, call, 10.0)).output)
    assert outputs == [
        *(str(TASK.data["prices"][item]) for item in TASK.data["items"]),
        TASK.data["answer"],
    ]
    assert [name for name, _ in sandbox.calls] == ["python"]
    score = await ENV.score(
        TASK, await ENV.artefact(TASK, outputs[-1], sandbox), None, Deadline(1.0)
    )
    assert score.reward == 1.0


async def test_prices_need_no_sandbox_and_only_what_is_sold_has_one() -> None:
    assert ENV.sandbox(TASK, Stage.EVAL) is None
    unknown = await ENV.call(TASK, None, ToolCall("price", {"item": "yachts"}), 1.0)
    assert unknown.output == "error: not sold"
    for call in (
        ToolCall("price", {}),
        ToolCall("price", {"item": 7}),
        ToolCall("cost", {"item": "figs"}),
    ):
        assert (await ENV.call(TASK, None, call, 1.0)).exit_code == 2


def test_a_task_with_an_item_that_has_no_price_is_refused() -> None:
    ENV.check(TASK)
    for data in (
        {**TASK.data, "items": ["yachts"]},
        {**TASK.data, "prices": 3},
        {"prices": {}, "items": [], "answer": "1"},
    ):
        with pytest.raises(TaskError):
            ENV.check(dataclasses.replace(TASK, data=data))
