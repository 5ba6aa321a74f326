"""The env `repair`: a real shell and editor, short words, hidden tests of the file that is left."""

from __future__ import annotations

import dataclasses

import pytest

from prorl.envs.repair import RepairEnv, edit
from prorl.errors import TaskError
from prorl.tasks.generated import generate
from prorl.testing import run
from prorl.types import ToolCall

ENV = RepairEnv()
TASK = next(task for task in generate("repair", seed=0, n=20) if task.data["form"] == "area")
BROKEN, MENDED, FILE = (TASK.data[name] for name in ("broken", "mended", "file"))


def bash(command: str) -> ToolCall:
    return ToolCall("bash", {"command": command})


def test_the_shell_and_the_editor_say_little() -> None:
    calls = (
        bash(f"grep area {FILE}"),
        edit(TASK, "no such line", MENDED),
        edit(TASK, BROKEN, MENDED),
        bash(f"cat {FILE} {FILE} {FILE}"),
    )
    looked, missed, edited, long = run(ENV, TASK, *calls, "Done.").outputs
    assert looked == f"def {BROKEN}"
    assert missed.startswith("error: `old_str` occurs 0 times")
    assert "/" not in missed
    assert edited.startswith("replaced at line ")
    assert len(long) == 120


@pytest.mark.parametrize(
    ("calls", "reward"),
    [
        ((edit(TASK, BROKEN, MENDED),), 1.0),
        ((bash(f"sed -i 's/{BROKEN}/{MENDED.replace('*', '[*]')}/' {FILE}"),), 0.0),
        ((bash(f"sed -i 's/^def {BROKEN}$/def {MENDED}/' {FILE}"),), 1.0),
        ((edit(TASK, BROKEN, MENDED), bash(f"echo 'rest = 1)' >> {FILE}")), 0.0),
        ((edit(TASK, BROKEN, MENDED), bash(f"rm {FILE}")), 0.0),
        ((bash(f"sed -i 's/return .*/return 440/' {FILE}"),), 0.0),
    ],
)
def test_the_whole_module_is_graded_in_its_final_state(
    calls: tuple[ToolCall, ...], reward: float
) -> None:
    assert run(ENV, TASK, *calls, "Done.").reward == reward


def test_a_task_without_its_module_is_refused() -> None:
    for lost in ("file", "source", "test"):
        data = {name: value for name, value in TASK.data.items() if name != lost}
        with pytest.raises(TaskError, match=lost):
            ENV.check(dataclasses.replace(TASK, data=data))
