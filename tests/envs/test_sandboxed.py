"""Math and code through a real sandbox: the oracle is right, the useless answer is not, and the
test runner's secrets stay its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import prorl.sandbox
from prorl.envs import get_env
from prorl.envs.code import SOLUTION_FILE, CodeEnv
from prorl.errors import SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.tasks import load_tasks
from prorl.testing import isolated, play, scripted
from prorl.types import FailureCode, Stage, StopReason, Task

DATA = Path(__file__).parents[2] / "../shared/data"
CODE = CodeEnv()
TASK = Task(
    task_id="t/0",
    env="code",
    prompt="def double(x):\n",
    data={
        "prompt": "def double(x):\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    },
)


@pytest.fixture
async def eval_sandbox() -> AsyncIterator[Sandbox]:
    async with prorl.sandbox.open("pyns", spec=CODE.sandbox(TASK, Stage.EVAL)) as sandbox:
        yield sandbox


@pytest.mark.parametrize(("kind", "reward"), [("oracle", 1.0), ("noop", 0.0)])
@pytest.mark.parametrize("name", ["gsm8k/train-2000.jsonl", "humaneval/HumanEval.jsonl.gz"])
async def test_oracle_and_noop(name: str, kind: str, reward: float) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"the data file {name} is not beside this checkout")
    (task,) = load_tasks(DATA / name, limit=1)
    env = get_env(task.env)
    played = await play(env, task, scripted(kind, env), boxes=isolated("pyns"))
    assert played.trajectory.stop_reason is StopReason.DONE, played.trajectory.failure
    assert played.reward == reward
    assert all("exit status" not in output for output in played.outputs), played.outputs


STEAL = """
import os
def double(x):
    parent = os.getppid()
    for name in ("fd/0", "fd/1", "mem", "environ", "maps"):
        try:
            open(f"/proc/{parent}/{name}", "rb")
            return 4
        except OSError:
            pass
"""


async def test_the_judge_cannot_be_read_by_the_program(eval_sandbox: Sandbox) -> None:
    """The program answers right if it can open anything of the test runner's."""
    assert (await CODE.score(TASK, STEAL.encode(), eval_sandbox, Deadline(30.0))).reward == 0


@pytest.mark.parametrize(
    "setup", [f"ln -s /etc/passwd {SOLUTION_FILE}", f"head -c 300000 /dev/zero > {SOLUTION_FILE}"]
)
async def test_an_artifact_that_is_no_small_file_is_the_policys_doing(setup: str) -> None:
    async with prorl.sandbox.open("pyns", spec=CODE.sandbox(TASK, Stage.RUN)) as sandbox:
        await sandbox.call("bash", {"command": setup}, 10.0)
        with pytest.raises(SandboxError) as caught:
            await CODE.artifact(TASK, "see the file", sandbox)
    assert caught.value.code is FailureCode.SANDBOX_BROKEN
