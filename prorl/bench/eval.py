"""`prorl bench eval`: what grading costs, with and without helpers that were started ahead.

| row | what |
|---|---|
| math_check_ms, math_check_p99_ms | one answer of the mix, by the rules, in the worker's process |
| math_500_two_processes_s | 500 of them by two warm processes, seen from outside |
| math_verify_first_ms | first check of a reference beyond the rules; rival: helper started ahead |
| math_verify_warm_ms | the checks after it |

The rows of math-verify say so where it is not installed.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from asyncio.subprocess import Process
from itertools import cycle, islice

from prorl.bench.children import line_of, python
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report, median
from prorl.envs import get_env, verify
from prorl.limits import Deadline
from prorl.types import Task

CHECKS = 500
_MIX = (
    ("42", "So we get 42 apples.\n#### 42", 1.0),
    ("3\\frac{1}{2}", "\\boxed{\\frac{7}{2}}", 1.0),
    ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
    ("[2,5)", "#### 2 \\le x < 5", 1.0),
    ("\\frac{\\sqrt{2}}{2}", "The answer is $\\frac{1}{\\sqrt{2}}$.", 1.0),
    ("5", "#### 4 or 5", 0.0),
    ("12 \\text{ cm}", "#### 12 m", 0.0),
    ("\\{1, 2, 3\\}", "#### 3, 2, 1", 1.0),
)
HALF = f"""
import asyncio, sys
from prorl.bench.eval import grade
asyncio.run(grade({len(_MIX)}))
print("ready", flush=True)
for line in sys.stdin:
    asyncio.run(grade({CHECKS // 2}))
    print("done", flush=True)
"""
"""A process that has warmed up grades half of the checks each time when it is told to."""
_BEYOND = ("\\int_0^1 x \\, dx", "\\boxed{\\frac{1}{2}}")


async def run(quick: bool = False) -> Report:
    """Grade the mix; `quick` repeats less."""
    repeats = 1 if quick else 3
    rows = [*await _rules(repeats), await _two_processes(repeats)]
    if verify.installed():
        rows += await _beyond(repeats)
    return Report(bench="eval", machine=machine(), rows=tuple(rows))


async def grade(number: int) -> list[float]:
    """Milliseconds of each of `number` checks; every verdict is checked."""
    env, taken = get_env("math"), []
    for reference, answer, wanted in islice(cycle(_MIX), number):
        task = Task(task_id="bench", env="math", prompt="", data={"answer": reference})
        began = time.perf_counter()
        score = await env.score(task, answer.encode(), None, Deadline(60.0))
        taken.append(1000 * (time.perf_counter() - began))
        assert score.reward == wanted, score.log
    return taken


async def _rules(repeats: int) -> list[Figure]:
    await grade(len(_MIX))
    began = time.process_time()
    runs = [await grade(CHECKS) for _ in range(repeats)]
    cpu_s = time.process_time() - began
    middle = [statistics.median(one) for one in runs]
    late = [sorted(one)[int(0.99 * len(one))] for one in runs]
    return [
        median("math_check_ms", middle, "ms", cpu_s=cpu_s),
        median("math_check_p99_ms", late, "ms"),
    ]


async def _two_processes(repeats: int) -> Figure:
    """Two processes that have warmed up, each told when to grade its half."""
    taken = []
    async with python("-c", HALF) as one, python("-c", HALF) as other:
        await asyncio.gather(_line(one), _line(other))
        for _ in range(repeats):
            began = time.perf_counter()
            await asyncio.gather(_line(one, b"go\n"), _line(other, b"go\n"))
            taken.append(time.perf_counter() - began)
    return median("math_500_two_processes_s", taken, "s")


async def _line(process: Process, said: bytes = b"") -> None:
    assert await line_of(process, said), "a grading process died"


async def _beyond(repeats: int) -> list[Figure]:
    cold, ahead, warm = [], [], []
    for _ in range(repeats):
        cold.append(await _one())
        warm += [await _one() for _ in range(20)]
        await verify.close()
        await verify.warm()
        ahead.append(await _one())
        await verify.close()
    first, started = median("math_verify_first_ms", cold, "ms"), statistics.median(ahead)
    return [
        first.beside("helper started ahead", started, "prorl.envs.verify.warm()"),
        median("math_verify_warm_ms", warm, "ms"),
    ]


async def _one() -> float:
    """Milliseconds of one check that goes to math-verify."""
    reference, answer = _BEYOND
    task = Task(task_id="bench", env="math", prompt="", data={"answer": reference})
    began = time.perf_counter()
    score = await get_env("math").score(task, answer.encode(), None, Deadline(120.0))
    assert score.reward == 1, score.log
    return 1000 * (time.perf_counter() - began)
