"""math-verify in its helpers: three verdicts, warm helpers, limits, and what dies on time."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator

import pytest

from prorl.envs import verify
from prorl.envs.math import MathEnv
from prorl.errors import GraderError
from prorl.limits import Deadline
from prorl.testing import make_task

pytestmark = pytest.mark.skipif(
    not verify.installed(), reason="math-verify is not installed (extra `math`)"
)
UNREADABLE = r"\int_0^1 x \, dx"
"""A reference that the rules leave to math-verify."""


@pytest.fixture(autouse=True)
async def _helpers_end() -> AsyncIterator[None]:
    yield
    await verify.close()


async def _reward(reference: str, answer: str, budget_s: float = 110.0) -> float:
    task = make_task("math", "?", answer=reference)
    return (await MathEnv().score(task, answer.encode(), None, Deadline(budget_s))).reward


async def test_a_reference_beyond_the_rules_goes_to_math_verify() -> None:
    assert await _reward(UNREADABLE, r"\boxed{\frac{1}{2}}") == 1
    assert await _reward(UNREADABLE, r"\boxed{\frac{1}{3}}") == 0


async def test_a_reference_that_nobody_reads_masks() -> None:
    with pytest.raises(GraderError, match="does not parse"):
        await verify.verify("\\", "1", 60.0)


async def test_no_time_masks_and_never_scores() -> None:
    with pytest.raises(GraderError, match="Timeout"):
        await _reward(UNREADABLE, "1", budget_s=0.001)


async def test_a_hanging_check_dies_of_its_processor_time() -> None:
    """The kernel ends the helper; the check is a grader error; the next one finds a new helper."""
    await verify.warm()
    began = time.monotonic()
    with pytest.raises(GraderError, match=r"the helper died|Timeout"):
        await verify.verify("2", r"\prod_{k=1}^{99999999} k^{k^{k}}", 60.0)
    assert time.monotonic() - began < 60
    assert await verify.verify("1/2", "0.5", 60.0)


async def test_helpers_are_kept_warm() -> None:
    await verify.warm()
    first = [helper.pid for helper in (await verify._pool())._free]
    assert len(first) == 1
    for _ in range(5):
        assert await verify.verify("x+1", "1+x", 60.0)
    assert [helper.pid for helper in (await verify._pool())._free] == first


async def test_helpers_that_were_closed_are_started_again_and_stay() -> None:
    """The first pool's end must not end the second one's helpers."""
    for _ in range(2):
        await verify.warm()
        await verify.close()
    await verify.warm()
    await asyncio.sleep(0)
    assert await _reward("\\int_0^1 x \\, dx", "\\boxed{\\frac{1}{2}}") == 1


async def test_there_are_no_more_helpers_than_there_may_be() -> None:
    pool = verify.Helpers((sys.executable, "-uc", _ECHO), most=2)
    pids = await asyncio.gather(*(pool.ask({"n": n}) for n in range(8)))
    assert len(set(pids)) <= 2
    await pool.close()


def test_helpers_end_with_their_loop() -> None:
    async def check() -> int:
        await verify.warm()
        return (await verify._pool())._free[0].pid

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(check()), 0)


@pytest.mark.parametrize(
    "program", ["", "print('not JSON')", "import os; print('{}'); os._exit(3)"]
)
async def test_a_helper_that_is_none_is_an_error_and_no_verdict(program: str) -> None:
    pool = verify.Helpers((sys.executable, "-uc", program))
    with pytest.raises((ConnectionError, ValueError)):
        await pool.ask({})
    await pool.close()


_ECHO = """
import os, sys
print("{}")
for line in sys.stdin:
    print(os.getpid())
"""
