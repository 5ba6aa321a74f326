"""The agent of the env `guest`: a program in an interpreter of its own, beside this worker.

It plays one rollout against the model endpoint and says the reward (docs/guests.md). Its own
failure is nobody's reward: it is infra, and another attempt follows. A budget that ends while the
policy speaks is the policy's.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import prorl
from prorl.agents.capture.model_endpoint import ModelEndpoint
from prorl.agents.context import AttemptContext
from prorl.agents.ending import End, end_with, run_to_trajectory
from prorl.agents.guest_broker import GuestWork
from prorl.agents.program import environment, served, until_over, without_call
from prorl.agents.sampler import Sampler
from prorl.errors import BudgetError, RolloutError
from prorl.types import FailureCode, Json, Message, StopReason, Trajectory
from prorl.waits import wait_limit_s

SHIPPED = Path(prorl.__file__).parent / "guests"
"""The folder that `{guests}` in an argv stands for."""
END_S = wait_limit_s("guest.end")


class GuestAgent:
    async def run(self, context: AttemptContext) -> Trajectory:
        sampler = Sampler(context)
        return await run_to_trajectory(context, sampler.record, _drive(context, sampler))


async def _drive(context: AttemptContext, sampler: Sampler) -> End:
    data = dict(context.task.data)
    argv, name = data.pop("argv", None), data.pop("guest", "")
    task = {
        "task_id": context.task.task_id,
        "prompt": context.task.prompt,
        "sample_index": context.sample_index,
        "data": data,
    }
    key = secrets.token_hex(16) if argv else ""  # the broker checks the key of a lease
    endpoint = ModelEndpoint(context, sampler, key=key)
    async with served(context, endpoint, _listener() if argv else None) as base_url:
        if argv:
            work = _play(context, endpoint, argv, environment(context, base_url, key), task)
        else:
            work = context.guest_broker.lend(
                GuestWork(
                    name=name,
                    key=context.key,
                    task=task,
                    deadline=context.deadline,
                    queue_s=context.limits.queue_s,
                    environment=partial(environment, context),
                    answer=endpoint.handle,
                )
            )
        try:
            outcome = await until_over(context, endpoint, work, "the guest")
        except BudgetError as error:
            if endpoint.ended.done():
                raise
            raise RolloutError(FailureCode.EVAL_FAILED, f"{error.message}: it hung") from None
    exit_code, reward = outcome.get("exit_code"), outcome.get("reward")
    if exit_code != 0 or reward is None:
        problem = f"exit status {exit_code}" if exit_code else "no reward.json"
        output = str(outcome.get("output", ""))
        raise RolloutError(
            FailureCode.EVAL_FAILED, f"the guest: {problem}: {output.strip()[-1500:]}"
        )
    if output := str(outcome.get("output", "")).strip():
        sampler.record.messages.append(Message(role="grader", name="guest", content=output))
    if not sampler.record.turns:  # it has no tokens to store, whatever EVAL would make of it
        score = await context.env.score(context.task, reward.encode(), None, context.deadline)
        text = f"the guest made no model call ({without_call(endpoint)})"
        return end_with(FailureCode.BAD_TASK, f"{text}, and left a reward of {score.reward:g}")
    return End(StopReason.DONE, artifact=reward.encode())


def _listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


async def _play(
    context: AttemptContext,
    endpoint: ModelEndpoint,
    argv: list[str],
    env: dict[str, str],
    task: dict[str, Json],
) -> dict[str, Json]:
    """Returns the guest's outcome; a guest that is cancelled has exited when this returns."""
    argv = [word.replace("{guests}", str(SHIPPED)) for word in argv]
    own = {name: text for name, text in os.environ.items() if not name.startswith("PRORL_")}
    message = json.dumps({"argv": argv, "env": env, "task": json.dumps(task)})
    async with context.guest_broker.starting(context.deadline, endpoint.first_call):
        guardian = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "prorl.linux.guest", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**own, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            printed, _ = await guardian.communicate(message.encode())
        finally:
            await _end(guardian)
    return json.loads(printed) if printed else {}


async def _end(guardian: asyncio.subprocess.Process) -> None:
    if guardian.returncode is not None:
        return
    with suppress(ProcessLookupError):
        guardian.terminate()
    try:
        async with asyncio.timeout(END_S):
            await guardian.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            guardian.kill()
