"""Guests of the real packages, each in an environment of its own: `make test-adapters`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.errors import RolloutError
from prorl.testing import Played, Replies, Reply, make_task, play
from prorl.types import FAILURE_CLASS, FailureCode, Json, RolloutLimits, ToolCall
from tests.agents.test_guest_broker import free_port
from tests.waiting import until

VENVS = Path(os.environ.get("PRORL_GUEST_VENVS", ".venv-guests")).absolute()
EXTRACT: Json = {
    "type": "function",
    "name": "extract_synonym_values",
    "parameters": {
        "type": "object",
        "properties": {"synonym_values": {"type": "array", "items": {"type": "integer"}}},
    },
    "strict": True,
}
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
    "openenv": ({"app": "adding:app", "field": "text"}, ["4", "5"], ["four", "5"]),
    "agentlightning": ({"agent": "halving:agent", "input": "48"}, ["It is 24"], ["It is 42"]),
    "rllm": (
        {"flow": "flowing:flow", "evaluator": "flowing:right", "metadata": {"answer": "24"}},
        ["It is 24"],
        ["It is 42"],
    ),
    "nemo_gym": (
        {
            "server": "resources_servers.example_multi_step.app:ExampleMultiStepResourcesServer",
            "row": {
                "responses_create_params": {
                    "input": "Get the values of Blue and of Green, then extract them.",
                    "tools": [EXTRACT],
                },
                "id": 1,
                "expected_synonyms": ["Blue", "Green"],
                "expected_synonym_values": [711, 712],
                "minefield_label": "Red",
                "minefield_label_value": 713,
            },
        },
        [ToolCall("extract_synonym_values", {"synonym_values": [711, 712]}), "Done."],
        [ToolCall("extract_synonym_values", {"synonym_values": [713]}), "Done."],
    ),
    "verltool": (
        {"url": "http://127.0.0.1:1", "reward": "halves:right", "answer": "24"},
        ["<halve>48</halve>", "It is 24"],
        ["It is 42"],
    ),
    "the one of docs/guests.md": ({"answer": "24"}, ["It is 24"], ["It is 42"]),
}

ADDING = """
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    text: str

class Asked(Observation):
    question: str = ""

class Adding(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.left, self._state = [(2, 2), (2, 3)], State(step_count=0)
        return self.ask(None)

    def ask(self, reward):
        if not self.left:
            return Asked(done=True, reward=reward)
        return Asked(question="%d+%d?" % self.left[0], done=False, reward=reward)

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        return self.ask(0.5 * (action.text == str(sum(self.left.pop(0)))))

    @property
    def state(self):
        return self._state

app = create_fastapi_app(Adding, Said, Asked)
"""
"""An OpenEnv server."""

HALVING = """
import agentlightning as agl
from openai import OpenAI

@agl.rollout
def agent(task, llm):
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages = [{"role": "user", "content": f"Half of {task}?"}]
    said = client.chat.completions.create(model=llm.model, messages=messages)
    return float(said.choices[0].message.content.endswith(str(int(task) // 2)))
"""
"""An agent of Agent Lightning, as its README has them."""

FLOWING = """
import rllm
from openai import AsyncOpenAI
from rllm.types import Step, Trajectory

@rllm.rollout(name="halver")
async def flow(task, config):
    client = AsyncOpenAI(base_url=config.base_url, api_key="EMPTY")
    messages = [{"role": "user", "content": task.instruction}]
    said = await client.chat.completions.create(model=config.model, messages=messages)
    return Trajectory(steps=[Step(model_response=said.choices[0].message.content, done=True)])

@rllm.evaluator
def right(task, episode):
    return episode.trajectories[0].steps[-1].model_response.endswith(task.metadata["answer"])
"""
"""A flow of rLLM, with the key that its cookbooks have."""

HALVES = """
import re
import sys

def right(messages, data):
    return messages[-1]["content"].endswith(data["answer"])

if __name__ == "__main__":
    import uvicorn
    from verl_tool.servers import tool_server
    from verl_tool.servers.tools import base

    class Halve(base.BaseTool):
        tool_type = "halve"

        def parse_action(self, action):
            found = re.search("<halve>(\\\\d+)</halve>", action)
            return (int(found[1]), True) if found else (None, False)

        def conduct_action(self, trajectory_id, action, extra_field):
            number, valid = self.parse_action(action)
            return str(number // 2) if valid else "", False, valid

    base.ALL_TOOLS.append("halve")
    base.register_tool(Halve)
    sys.modules["verl_tool.servers.tools.halve"] = base
    config = tool_server.ServerConfig(host="127.0.0.1", port=int(sys.argv[1]))
    server = tool_server.AsyncToolServer(("halve",), config)
    uvicorn.run(server.app, host="127.0.0.1", port=int(sys.argv[1]))
"""
"""A tool of VeRL-Tool, its server, and its reward manager."""

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
"""An app of LangGraph, and its evaluator."""

WRITTEN = {
    "sums.py": SUMS,
    "counting.py": COUNTING,
    "half.py": HALF,
    "adding.py": ADDING,
    "halving.py": HALVING,
    "flowing.py": FLOWING,
    "halves.py": HALVES,
}


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def world(name: str, at: Path, folder: Path) -> AsyncIterator[dict[str, Json]]:
    """Yields, as further data, the server that a guest needs beside it."""
    if name != "verltool":
        yield {}
        return
    words = [at / "python", folder / "halves.py", port := free_port()]
    process = await asyncio.create_subprocess_exec(*map(str, words))
    try:
        await until(lambda: _answers(port))
        yield {"url": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_a_right_answer_is_rewarded_and_a_wrong_answer_is_not(
    name: str, tmp_path: Path
) -> None:
    at = VENVS / ("gem" if name.startswith("the") else name) / "bin"
    if not at.exists():
        pytest.skip(f"no environment of {name} at {VENVS}: make test-adapters makes it")
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

    async def played(data: dict[str, Json], replies: list[Reply]) -> Played:
        task = make_task("guest", "Half of 48?", argv=argv, **data)
        limits = RolloutLimits(max_turns=40)
        return await play(get_env("guest"), task, Replies(*replies), limits=limits)

    async with world(name, at, tmp_path) as more:
        for answer, expected in ((right, True), (wrong, False)):
            outcome = await played(data | more, answer)
            assert (outcome.reward == 1.0) is expected
            assert len(outcome.trajectory.sequences) == 1
    broken = {key: "none such" for key in data if key != "answer"}
    with pytest.raises(RolloutError) as caught:
        await played(broken, wrong)
    assert not FAILURE_CLASS[FailureCode(caught.value.code)].trains
