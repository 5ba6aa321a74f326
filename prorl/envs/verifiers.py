"""Tasksets of the package `verifiers` (`verifiers.v1`, from 0.4 on).

A prompt is asked, the task's own reward functions judge the answer.

    python -m prorl.envs.verifiers TASKSET [CONFIG_JSON] > tasks.jsonl
    {"task_id": "boxes/0", "env": "verifiers", "prompt": "1+1?", "data": {"taskset": "boxes"}}

| `task.data` | |
|---|---|
| taskset | id of an installed taskset, as `verifiers` finds it |
| index | which of its tasks, in its order (0) |
| config | fields of the taskset's config |
| tools | as in every env: tools of ours, in a sandbox |

Each reward function is one part of the reward with its weight; metrics have weight 0. One that
fails is a grader error. Tasks that need a box of theirs (`runtime`), tools of theirs or a user who
speaks first are refused: what they ask for would not be there. Reward functions run in the worker's
process, in a thread, as every env's own code does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from typing import Any

import anyio.to_thread

from prorl.envs.base import BaseEnv
from prorl.errors import GraderError, RolloutError, TaskError, boundary
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rewards import rubric_of
from prorl.types import FailureCode, Json, Message, RewardPart, Score, Task

MAX_TASKS = 1_000_000
"""Of a taskset: an endless one is read up to here."""


class VerifiersEnv(BaseEnv):
    """One answer for one prompt; no tools of its own."""

    name = "verifiers"
    needs = ("taskset",)

    def check(self, task: Task) -> None:
        """The taskset is there, has such a task, and asks for nothing that is not. TaskError."""
        super().check(task)
        if find_spec("verifiers") is None:
            raise TaskError("the env 'verifiers'", "the package", "pip install verifiers")
        index: Json = task.data.get("index", 0)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise TaskError(f"task {task.task_id!r}: data.index is {index!r}", "0 or more")
        try:
            with boundary(RolloutError, FailureCode.BAD_TASK, "verifiers"):
                theirs = _theirs(task)
        except RolloutError as cause:
            raise TaskError(
                f"task {task.task_id!r}: {cause.message}"[:500], "an installed taskset and a task"
            ) from cause
        if problem := _beyond(theirs):
            raise TaskError(f"task {task.task_id!r}: {problem}", "a prompt and reward functions")

    def messages(self, task: Task) -> tuple[Message, ...]:
        data = _theirs(task).data
        system = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return (*system, Message(role="user", content=data.prompt))
        said = (Message(role=one.role, content=_text(one.content)) for one in data.prompt)
        return (*system, *said)

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """What the task's own functions say, and the task's further parts. Raises GraderError."""
        theirs, answer = _theirs(task), artefact.decode("utf-8", "replace")

        def judge() -> Any:
            from verifiers.v1.configs.agent import AgentConfig
            from verifiers.v1.graph import MessageNode
            from verifiers.v1.trace import AgentInfo, Trace, TraceTask
            from verifiers.v1.types import AssistantMessage, UserMessage

            data = theirs.data
            asked = MessageNode(message=UserMessage(content=data.prompt_text))
            said = MessageNode(parent=0, message=AssistantMessage(content=answer), sampled=True)
            about = TraceTask(
                type=type(theirs).__name__, data=data, key=theirs.key, hash=theirs.hash
            )
            trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=[asked, said])
            asyncio.run(theirs.score(trace))
            return trace

        with boundary(GraderError, FailureCode.GRADER_ERROR, "the taskset's reward functions"):
            with anyio.fail_after(deadline.remaining_s):
                trace = await anyio.to_thread.run_sync(judge, abandon_on_cancel=True)
            # The taskset's rewards by their weight, its metrics without any.
            rewards = (
                RewardPart(name=name, value=float(one.score), weight=float(one.weight))
                for name, one in trace.rewards.items()
            )
            metrics = (
                RewardPart(name=f"metric_{name}", value=float(value), weight=0.0)
                for name, value in trace.metrics.items()
            )
            parts = (*rewards, *metrics)
        more = await rubric_of(task, self.rubric).score(task, artefact, sandbox, deadline)
        return Score(parts=(*parts, *more.parts), log=answer[-1000:])


@lru_cache(maxsize=8)
def _tasks(taskset: str, config: str) -> tuple[list[Any], Iterator[Any]]:
    """The tasks that were read so far, and the rest of them."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    made = taskset_config_type(taskset)(id=taskset, **json.loads(config))
    return [], islice(iter(load_taskset(made)), MAX_TASKS)


def _theirs(task: Task) -> Any:
    """The `verifiers` task. Raises what the taskset raises, LookupError where it ends before."""
    config = json.dumps(task.data.get("config", {}), sort_keys=True)
    read, rest = _tasks(task.data["taskset"], config)
    index = task.data.get("index", 0)
    while len(read) <= index:
        following = next(rest, None)
        if following is None:
            raise LookupError(f"{task.data['taskset']} has {len(read)} tasks, not {index + 1}")
        read.append(following)
    return read[index]


def _beyond(theirs: Any) -> str:
    """What a task needs that is not here; empty: nothing."""
    if theirs.NEEDS_CONTAINER or theirs.data.image:
        return "it needs a container of its own"
    if type(theirs).toolsets(theirs.config):
        return "it has tools of its own"
    if theirs.data.prompt is None:
        return "it has no prompt: a user begins"
    for function in theirs.hooks("reward"):
        needed = inspect.signature(function).parameters.get("runtime")
        if needed is not None and needed.default is inspect.Parameter.empty:
            return f"its reward {function.__name__} needs a runtime"
    return "" if theirs.hooks("reward") else "it has no reward function"


def _text(content: Json) -> str:
    from verifiers.v1.types import content_text

    found: Callable[[Json], str] = content_text
    return found(content)


def main() -> int:
    """Print a taskset's tasks as rows for `prorl run --tasks`."""
    if len(sys.argv) not in (2, 3):
        print("python -m prorl.envs.verifiers TASKSET [CONFIG_JSON]", file=sys.stderr)
        return 2
    config = json.loads(sys.argv[2]) if len(sys.argv) == 3 else {}
    _, tasks = _tasks(sys.argv[1], json.dumps(config, sort_keys=True))
    for index, one in enumerate(tasks):
        data = {"taskset": sys.argv[1], "index": index, **({"config": config} if config else {})}
        row = {"task_id": f"{sys.argv[1]}/{index}", "env": "verifiers", "data": data}
        print(json.dumps({**row, "prompt": one.data.prompt_text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
