"""Graders in their helpers: whose fault a failure is, limits of time, what hostile answers do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from prorl.envs import grading
from prorl.envs.math import MathEnv
from prorl.envs.stem import StemEnv
from prorl.errors import GraderError
from prorl.helper.pool import close, pool
from prorl.helper.process import HelperProgram
from prorl.limits import Deadline
from prorl.testing import make_task
from prorl.types import Score

UNREADABLE = r"\int_0^1 x \, dx"
"""A reference that the rules leave to math-verify."""
MOST_OWN_CPU_S = 10.0
"""What the loop's own process may spend on one answer; rules without bounds took minutes."""
SLOW_FOR_SYMPY = r"\prod_{k=1}^{99999999} k^{k^{k}}"


# one loop: its helpers stay warm from one trial to the next, as a stage's do
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def _helpers() -> AsyncIterator[None]:
    """math-verify, which takes seconds to start, has one second of the processor for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "MATH_VERIFY", replace(grading.MATH_VERIFY, cpu_s=1.0))
        yield
    close()


async def _score(reference: str, answer: str, budget_s: float = 110.0, env: str = "math") -> Score:
    task = make_task(env, "?", answer=reference)
    grader = MathEnv() if env == "math" else StemEnv()
    return await grader.score(task, answer.encode(), None, Deadline(budget_s))


async def test_a_reference_beyond_the_rules_goes_to_math_verify() -> None:
    assert (await _score(UNREADABLE, r"\boxed{\frac{1}{2}}")).reward == 1
    assert (await _score(UNREADABLE, r"\boxed{\frac{1}{3}}")).reward == 0


async def test_a_reference_that_nobody_reads_masks() -> None:
    with pytest.raises(GraderError, match="does not parse"):
        await _score("\\", "#### 1")


async def test_no_time_masks_and_never_scores() -> None:
    with pytest.raises(GraderError, match="no time was left"):
        await _score("1", "1", budget_s=0.0)


async def test_an_answer_that_takes_all_its_time_is_wrong() -> None:
    """The helper is killed, the reference alone is graded in time, the next answer is too."""
    score = await _score(UNREADABLE, f"#### {SLOW_FOR_SYMPY}")
    assert score.reward == 0
    assert "math-verify" in score.log
    assert (await _score(UNREADABLE, "#### 1/2")).reward == 1


@pytest.mark.slow  # in the fast suite a grader that spins has the same end
async def test_a_reference_that_takes_all_the_time_is_the_graders_failure() -> None:
    with pytest.raises(GraderError, match=r"processor time|MemoryError|longer"):
        await _score(SLOW_FOR_SYMPY, "#### 2")


@pytest.mark.parametrize(
    "answer",
    [
        "#### 5" + 900 * " " + "about",
        "#### A" + 985 * " " + "≈",
        "#### 5" + 985 * "\t" + "x",
        "#### 5" + 985 * "_" + "$",
        "#### " + "Yes " * 240,
        "#### " + "Hmm " * 240,
        "#### " + "ok " * 300,
        "#### x = " + "The " * 240,
        "#### " + "Aaa " * 230 + "= 5",
        "#### " + "(" * 990,
        "#### 5" + "'" * 900,
        "\\boxed{" * 9000,
        "$" * 60000,
        "\x00\x01" * 500,
        "\ud800",
    ],
)
async def test_no_answer_chooses_an_infra_failure_or_holds_the_loop(answer: str) -> None:
    """Each ended the service, or masked its group."""
    task = make_task("math", "?", answer="5")
    began = time.process_time()
    score = await MathEnv().score(task, answer.encode("utf-8", "replace"), None, Deadline(60))
    assert score.reward == 0
    assert time.process_time() - began < MOST_OWN_CPU_S


@pytest.mark.parametrize(
    ("answer", "words"),
    [("raise", "ValueError"), ("recurse", "RecursionError"), ("spin", "processor time")],
)
async def test_whatever_an_answer_causes_in_a_grader_is_its_own(answer: str, words: str) -> None:
    program = HelperProgram("tests.envs.bad_grader", cpu_s=0.5)
    verdict, why = await grading.ask(program, (answer,), ("fine",), Deadline(60))
    assert verdict is None
    assert words in why
    with pytest.raises(GraderError):
        await grading.ask(program, ("fine",), ("fine",), Deadline(0.0))
    with pytest.raises(GraderError, match=words):
        await grading.ask(program, (answer,), (answer,), Deadline(60))


async def test_a_helper_that_is_killed_from_outside_says_nothing_of_the_answer() -> None:
    program = HelperProgram("tests.envs.bad_grader", cpu_s=30.0)

    async def kill() -> None:
        for _ in range(2):
            while not (busy := list((await pool(program))._busy)):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            os.kill(busy[0].pid, signal.SIGKILL)
            while busy[0] in (await pool(program))._busy:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        group.create_task(kill())
        with pytest.raises(GraderError, match="SIGKILL"):
            await grading.ask(program, ("spin",), ("fine",), Deadline(60))


async def test_science_is_graded_there_too() -> None:
    assert (await _score("5 km", "#### 5000 m", env="stem")).reward == 1
    assert (await _score("5 km", "#### 5000 km", env="stem")).reward == 0
