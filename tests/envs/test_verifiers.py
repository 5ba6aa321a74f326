"""Tasksets of the package `verifiers`: their prompts are asked, their reward functions judge."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.testing import make_task
from prorl.types import Json, Message, Score, Task

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sums(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace):
        if "break" in trace.last_reply:
            raise KeyError("a mistake of the taskset")
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, task, trace):
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def words(self, trace):
        return float(len(trace.last_reply.split()))

class SumsConfig(vf.TasksetConfig):
    first: int = 0
    silent: bool = False

class SumTaskset(vf.Taskset[Sums, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + 3):
            prompt = None if self.config.silent else f"{n}+1?"
            yield Sums(Data(prompt=prompt, system_prompt="Add.", answer=str(n + 1)))

__all__ = ["SumTaskset"]
"""
ENV = get_env("verifiers")
pytestmark = pytest.mark.skipif(
    find_spec("verifiers") is None, reason="the package `verifiers` is not installed"
)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prorl_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))


def _task(**data: Json) -> Task:
    return make_task("verifiers", "1+1?", **{"taskset": "prorl_sums", "index": 1, **data})


async def _score(answer: str, **data: Json) -> Score:
    return await ENV.score(_task(**data), answer.encode(), None, Deadline(120.0))


async def test_the_tasksets_functions_judge() -> None:
    ENV.check(_task())
    assert ENV.messages(_task()) == (
        Message(role="system", content="Add."),
        Message(role="user", content="1+1?"),
    )
    assert (await _score("It is 2")).reward == 1
    assert (await _score("3")).reward == 0.25
    assert (await _score("It is certainly, without any doubt, 2")).reward == 0.75
    assert (await _score("I do not know, and will not guess.")).reward == 0
    parts = {part.name: (part.value, part.weight) for part in (await _score("2")).parts}
    assert parts == {"right": (1, 0.75), "short": (1, 0.25), "metric_words": (1, 0)}
    assert (await _score("9", index=0, config={"first": 8})).reward == 1


async def test_a_function_that_fails_is_no_score() -> None:
    with pytest.raises(GraderError, match="reward functions"):
        await _score("break")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"taskset": "no_such_taskset"}, "no_such_taskset"),
        ({"index": 3}, "has 3 tasks, not 4"),
        ({"index": "1"}, "data.index"),
        ({"config": {"silent": True}}, "no prompt"),
        ({"config": {"other": 1}}, "other"),
    ],
)
def test_what_cannot_be_asked_is_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(_task(**data))


def test_a_command_prints_a_tasksets_rows(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "prorl.envs.verifiers", "prorl_sums", '{"first": 5}']
    done = subprocess.run(argv, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["5+1?", "6+1?", "7+1?"]
    assert rows[2]["data"] == {"taskset": "prorl_sums", "index": 2, "config": {"first": 5}}
