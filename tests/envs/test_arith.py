"""The envs `arith` and `shop`: a real python tool, prices of the task, short and exact answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from prorl.envs.arith import ArithEnv, ShopEnv
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.tasks.generated import generate
from prorl.testing import LocalSandbox
from prorl.types import Stage, ToolCall

# one loop: its grader stays warm from one test to the next
pytestmark = pytest.mark.asyncio(loop_scope="module")

ENV, SHOP = ArithEnv(), ShopEnv()
(TASK,) = generate("arith", seed=0, n=1)
BASKET = next(task for task in generate("shop", seed=0, n=20) if len(task.data["items"]) == 2)


async def test_the_reference_earns_1_and_anything_else_0() -> None:
    for final, reward in (
        (TASK.data["answer"], 1.0),
        (f" {TASK.data['answer']}\n", 1.0),
        ("0" + TASK.data["answer"], 0.0),
        ("", 0.0),
    ):
        score = await ENV.score(TASK, await ENV.artifact(TASK, final, None), None, Deadline(1.0))
        assert score.reward == reward
        assert ("expected" in score.log) == (reward == 0)


async def test_an_artifact_that_is_no_text_scores_nothing() -> None:
    assert (await ENV.score(TASK, b"\xff\xfe", None, Deadline(1.0))).reward == 0


async def test_python_runs_in_the_sandbox_and_answers_in_few_characters(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    for code, output in (
        ("print('x'); print(6*7)", "42"),
        ("1/0", "error: ZeroDivisionError"),
        ("(1", "error: SyntaxError"),
        ("0", ""),
    ):
        result = await ENV.call(TASK, sandbox, ToolCall("python", {"code": code}), 10.0)
        assert (result.output, result.exit_code) == (output, 0)
    assert (
        len(
            (
                await ENV.call(
                    TASK, sandbox, ToolCall("python", {"code": "print('y' * 999)"}), 10.0
                )
            ).output
        )
        == 40
    )
    slow = await ENV.call(
        TASK, sandbox, ToolCall("python", {"code": "import time; time.sleep(9)"}), 0.3
    )
    assert (slow.timed_out, slow.output) == (True, "error: timeout")


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("bash", {"command": "ls"}),
        ToolCall("python", {}),
        ToolCall("python", {"code": 3}),
        ToolCall("", {}, "no JSON"),
    ],
)
async def test_a_call_that_does_not_fit_is_a_short_result(tmp_path: Path, call: ToolCall) -> None:
    sandbox = LocalSandbox(tmp_path)
    result = await ENV.call(TASK, sandbox, call, 1.0)
    assert (result.exit_code, sandbox.calls) == (2, [])
    assert result.output.startswith("error: ")
    assert len(result.output) <= 40


async def test_a_task_without_its_answer_is_refused() -> None:
    ENV.check(TASK)
    with pytest.raises(TaskError, match="answer"):
        ENV.check(dataclasses.replace(TASK, data={"expression": "1+1"}))


async def test_the_reference_looks_every_price_up_computes_and_earns_1(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    reference = SHOP.reference(BASKET)
    outputs = []
    for call in reference.calls:
        call = (
            call
            if call.name == "price"
            else ToolCall("python", {"code": f"print({call.arguments['code']})"})
        )
        outputs.append((await SHOP.call(BASKET, sandbox, call, 10.0)).output)
    assert outputs == [
        *(str(BASKET.data["prices"][item]) for item in BASKET.data["items"]),
        BASKET.data["answer"],
    ]
    assert [name for name, _ in sandbox.calls] == ["python"]
    score = await SHOP.score(
        BASKET, await SHOP.artifact(BASKET, outputs[-1], sandbox), None, Deadline(1.0)
    )
    assert score.reward == 1.0


async def test_prices_need_no_sandbox_and_only_sold_items_have_a_price() -> None:
    assert SHOP.sandbox(BASKET, Stage.EVAL) is None
    unknown = await SHOP.call(BASKET, None, ToolCall("price", {"item": "yachts"}), 1.0)
    assert unknown.output == "error: not sold"
    for call in (
        ToolCall("price", {}),
        ToolCall("price", {"item": 7}),
        ToolCall("cost", {"item": "figs"}),
    ):
        assert (await SHOP.call(BASKET, None, call, 1.0)).exit_code == 2


async def test_a_task_with_an_item_that_has_no_price_is_refused() -> None:
    SHOP.check(BASKET)
    for data in (
        {**BASKET.data, "items": ["yachts"]},
        {**BASKET.data, "prices": 3},
        {"prices": {}, "items": [], "answer": "1"},
    ):
        with pytest.raises(TaskError):
            SHOP.check(dataclasses.replace(BASKET, data=data))
