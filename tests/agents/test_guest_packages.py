"""Guests of the real packages, each in an environment of its own: `make test-doors`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.testing import Replies, Reply, make_task, play
from prorl.types import Json, RolloutLimits, ToolCall

VENVS = Path(os.environ.get("PRORL_GUESTS", ".venv-guests")).absolute()
CASES: dict[str, tuple[dict[str, Json], list[Reply], list[Reply]]] = {
    "gymnasium": (
        {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}},
        ["I go down.\n1", "1", "2", "2", "1", "2"],
        ["7", "up", *["1"] * 9],
    ),
    "skyrl": (
        {"id": "gsm8k", "extras": {"reward_spec": {"ground_truth": "24"}}},
        ["#### 24"],
        ["#### 42"],
    ),
    "gem": (
        {"id": "game:GuessTheNumber-v0-easy", "seed": 3},
        [rf"\boxed{{{number}}}" for number in range(1, 9)],
        ["nothing"],
    ),
    "verifiers": (
        {"taskset": "sums", "index": 1},
        ["2"],
        ["nine, or so I think it may be"],
    ),
    "inspect": (
        {"task": "counting.py@counting", "args": {"last": 3}, "sample": 2},
        [ToolCall("add", {"x": 3, "y": 2}), "ANSWER: 5"],
        ["ANSWER: 6"],
    ),
    "langgraph": (
        {"app": "half:make", "reward": "half:reward", "answer": "24"},
        [ToolCall("halve", {"x": 48}), "It is 24"],
        ["It is 42"],
    ),
    "the one of docs/guests.md": ({"answer": "24"}, ["It is 24"], ["It is 42"]),
}

SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sums(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply.endswith(self.data.answer))

class SumTaskset(vf.Taskset[Sums, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield Sums(Data(prompt=f"{n}+1?", system_prompt="Add.", answer=str(n + 1)))

__all__ = ["SumTaskset"]
"""
"""A taskset as its authors write them."""

COUNTING = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def add():
    async def execute(x: int, y: int):
        \"\"\"Add two numbers.

        Args:
            x: One.
            y: Another.
        \"\"\"
        return x + y
    return execute

@task
def counting(last: int):
    samples = [Sample(id=i, input=f"{i + 1}+2?", target=str(i + 3)) for i in range(last)]
    return Task(MemoryDataset(samples), solver=[use_tools(add()), generate()], scorer=match())
"""
"""A task of Inspect."""

HALF = """
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

def halve(x: int) -> int:
    \"\"\"Half of a number.\"\"\"
    return x // 2

def make():
    return create_react_agent(ChatOpenAI(model="policy", max_retries=0), [halve])

def reward(state, data):
    return state["messages"][-1].content.endswith(data["answer"])
"""
"""An app of LangGraph, and what judges it."""

WRITTEN = {"sums.py": SUMS, "counting.py": COUNTING, "half.py": HALF}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_right_is_one_and_wrong_is_not(name: str, tmp_path: Path) -> None:
    at = VENVS / ("gem" if name.startswith("the") else name) / "bin"
    if not at.exists():
        pytest.skip(f"no environment of {name} at {VENVS}: make test-doors makes it")
    data, right, wrong = CASES[name]
    script = f"{{guests}}/{name}_guest.py"
    if name.startswith("the"):
        page = (Path(__file__).parents[2] / "docs" / "guests.md").read_text()
        script = str(tmp_path / "shown.py")
        Path(script).write_text(page.split("```python\n")[1].split("```")[0])
    for file, text in WRITTEN.items():
        (tmp_path / file).write_text(text)
    if name == "inspect":
        data = data | {"task": f"{tmp_path}/{data['task']}"}
    path = f"PATH={at}:{os.environ['PATH']}"
    argv = ["env", path, f"PYTHONPATH={tmp_path}", str(at / "python"), script]
    for said, expected in ((right, True), (wrong, False)):
        played = await play(
            get_env("guest"),
            make_task("guest", "Half of 48?", argv=argv, **data),
            Replies(*said),
            limits=RolloutLimits(max_turns=40),
        )
        assert (played.reward == 1.0) is expected
        assert len(played.trajectory.sequences) == 1
