"""Every built-in env: its oracle scores 1, an agent that does nothing 0, and what goes wrong in a
grader is never a score.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from prorl.envs import BUILT_IN, get_env
from prorl.errors import GraderError
from prorl.limits import Deadline
from prorl.protocols import RewardFn
from prorl.rubric import Rubric, reward
from prorl.tasks import load_tasks
from prorl.testing import Replies, make_task, node, play
from prorl.types import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")  # all ask the same graders

_CODE = "def double(x):\n"
TASKS: dict[str, tuple[Task, ...]] = {
    "math": (
        make_task("math", "Half of 48?", answer="24", solution="48/2 = <<48/2=24>>24\n#### 24"),
        make_task("math", "Where is $x^2 < 4$?", answer="(-2, 2)"),
    ),
    "stem": (
        make_task("stem", "Most of air?", choices=["oxygen", "nitrogen"], answer="B"),
        make_task("stem", "How fast is light?", answer="3.0e8 m/s"),
        make_task("stem", "What is rust?", answer="iron oxide", aliases=["Fe2O3"]),
    ),
    "code": (
        Task(
            task_id="double",
            env="code",
            prompt=_CODE,
            data={
                "prompt": _CODE,
                "entry_point": "double",
                "test": "def check(candidate):\n    assert candidate(2) == 4\n",
                "canonical_solution": "    return x * 2\n",
            },
        ),
        make_task(
            "code",
            "Print twice the number that is read.",
            cases=[{"input": "2\n", "output": "4\n"}],
            canonical_solution="print(2 * int(input()))\n",
        ),
    ),
    "arith": tuple(load_tasks("arith:train?n=3&seed=3")),
    "shop": tuple(load_tasks("shop:train?n=3&seed=3")),
    "repair": tuple(load_tasks("repair:train?n=3&seed=3")),
    "swe": tuple(load_tasks(Path(__file__).with_name("swe_tasks.jsonl"))),
    "guest": (),  # its tasks bring programs: tests/agents/test_guest.py
    "harbor_steps": (),
    "harbor": (),  # its tasks are folders with an image: tests/envs/test_harbor.py
    "noop": (),  # always 1, for benches
}
NEEDS_BOXES = ("swe",)


async def test_no_env_is_forgotten() -> None:
    assert set(TASKS) == set(BUILT_IN)


@pytest.mark.parametrize(("name", "task"), [(name, task) for name in TASKS for task in TASKS[name]])
async def test_the_oracle_has_1_and_the_idle_0(name: str, task: Task) -> None:
    env, reference = get_env(name), get_env(name).reference(task)
    async with node("pyns") if name in NEEDS_BOXES else nullcontext() as boxes:
        oracle = Replies(*reference.calls, reference.answer)
        assert (await play(env, task, oracle, boxes=boxes)).reward == 1
        for idle in ("I do not know.", "" if name not in NEEDS_BOXES else "no"):
            assert (await play(env, task, Replies(idle), boxes=boxes)).reward == 0


@reward("raises")
def _raises(task: Task, artifact: bytes) -> float:
    raise KeyError("a grader's own mistake")


@reward("nothing")
def _nan(task: Task, artifact: bytes) -> float:
    return float("nan")


@pytest.mark.parametrize(("broken", "code"), [(_raises, "grader_error"), (_nan, "bad_task")])
@pytest.mark.parametrize(
    "name", [name for name in TASKS if TASKS[name] and name not in ("swe", "code", "repair")]
)
async def test_a_grader_that_fails_is_no_score(name: str, broken: RewardFn, code: str) -> None:
    env, task = get_env(name), TASKS[name][0]
    env.rubric = Rubric(*env.rubric.rewards, (broken, 1.0))  # type: ignore[attr-defined]
    with pytest.raises(GraderError, match=code):
        await env.score(task, b"#### 24", None, Deadline(60))


async def test_a_grader_that_hangs_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.rubric.HANG_S", 0.1)

    @reward("hangs")
    async def hangs(task: Task, artifact: bytes) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(GraderError, match="hangs: TimeoutError"):
        await Rubric((hangs, 1.0)).score(make_task("math"), b"", None, Deadline(0.1))
