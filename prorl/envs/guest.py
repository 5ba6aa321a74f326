"""Envs and harnesses of other frameworks, as guests: programs that play against the policy's model
endpoint.

    {"task_id": "lake/7", "env": "guest", "prompt": "",
     "data": {"argv": ["/venvs/gym/bin/python", "{guests}/gymnasium_guest.py"],
              "id": "FrozenLake-v1", "seed": 7}}

`data.argv` is started beside the RUN worker with the rights of the service; `data.guest` instead is
the name of guests that come from elsewhere. What they are given and leave: docs/guests.md.
"""

from __future__ import annotations

import math

import orjson

from prorl import exact_json
from prorl.config import NAME
from prorl.envs.base import BaseEnv
from prorl.envs.settings import EnvSettings
from prorl.errors import RolloutError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import FailureCode, RewardPart, Score, Task


class GuestEnv(BaseEnv):
    name = "guest"
    settings = EnvSettings  # the guest prompts the policy
    agent = "guest"

    def check(self, task: Task) -> None:
        """There is an argv, or a guest's name. Raises TaskError."""
        super().check(task)
        argv, guest = task.data.get("argv"), task.data.get("guest")
        if guest is not None and argv is None:
            if not (isinstance(guest, str) and NAME.fullmatch(guest)):
                raise TaskError(f"task {task.task_id!r}: data.guest is {guest!r}"[:300], "a name")
        elif not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)):
            raise TaskError(
                f"task {task.task_id!r}: data.argv is {argv!r}"[:300],
                "what starts the guest, a list of texts, or data.guest: who leases it",
                'for example ["/venvs/gym/bin/python", "/guests/lake.py"]',
            )

    def runs_code(self, task: Task) -> bool:
        """Returns whether the guest has an argv; a guest that comes from elsewhere is on its own
        host.
        """
        return "argv" in task.data

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """Nothing: a guest that ended has said its reward, and this one did not come to it."""
        return b""

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Returns what the guest said; 0 where the policy's budget ended first.

        Raises RolloutError: BAD_TASK where the guest calls the task bad, EVAL_FAILED where it
        failed itself. It must play anew then: its reward is part of its play.
        """
        if not artifact:
            return Score(
                parts=(RewardPart(name="reward", value=0.0),), log="the policy's budget ended"
            )
        try:
            report = exact_json.loads(artifact)
        except orjson.JSONDecodeError as cause:
            raise RolloutError(FailureCode.EVAL_FAILED, f"reward.json: {cause}") from cause
        if not isinstance(report, dict):
            raise RolloutError(FailureCode.EVAL_FAILED, "reward.json is no object")
        if failed := report.get("failed"):
            code = FailureCode.BAD_TASK if failed == "task" else FailureCode.EVAL_FAILED
            raise RolloutError(code, f"the guest: {report.get('message', failed)}"[:2000])
        parts = tuple(
            RewardPart(name=name, value=float(value), weight=float(name == "reward"))
            for name, value in report.items()
            if isinstance(value, int | float) and math.isfinite(value)
        )
        if "reward" not in {part.name for part in parts}:
            text = f"reward.json has no finite number `reward`: {artifact[:300]!r}"
            raise RolloutError(FailureCode.EVAL_FAILED, text)
        return Score(parts=parts)
