"""Task folders of Harbor and terminal-bench: a container, an instruction, tests.

The tests tell the reward; `prorl/tasks/folders.py` reads the folders.

| `task.data` | |
|---|---|
| folder | the task's, on every node |
| image | a name of the registry: `prorl image build NAME --from FOLDER` makes it |
| test, solution | scripts of the folder |
| timeout_s | limit of the tests (600) |
| environment | variables of the tests |

The policy is root of the image, over which it writes; it works in the image's WORKDIR, without any
network. What crosses into EVAL are the files that it changed, made or removed, but not the
system's (`shell.SYSTEM`): up to 1 MiB packed. EVAL starts the image afresh, brings these files,
then the tests, with stand-ins for what their scripts would fetch from the net (apt-get, curl, uv,
pip): pytest must be in the image.

The reward is what the tests write to /logs/verifier/reward.txt (a number) or reward.json (its
numbers' `reward`, or their mean); of terminal-bench 1 when pytest's summary has passes and nothing
else. Tests that tell no reward are a grader's failure where they cannot be started, else 0.

What remains possible: programs of the policy that the tests start may write the reward, as in
Harbor itself. Processes that it left, and changes of system files, are gone.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import replace
from pathlib import Path

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.harbor import shell
from prorl.envs.tools import BASH, FILES, cut_short, text_field
from prorl.errors import GraderError, NotFoundError, RolloutError, SandboxError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import (
    FailureCode,
    RewardPart,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
)

OVERLAY_BYTES = 1 << 30
TESTS_S, STEP_S = 600.0, 60.0
MAX_TEST_BYTES = 16 << 20
LOG_CHARS = 4000
_SYSTEM = (
    "You are root in a container without network. Do what the user asks for with bash and files;"
    " bash starts in the working directory of the task. Tests look at the files that you leave."
    " When you are done, say so in a sentence."
)


class HarborEnv(BaseEnv):
    """Stateless, as every env; reads the task's folder in EVAL."""

    name = "harbor"
    system = _SYSTEM
    needs = ("folder", "image", "test")
    offers = (BASH, FILES)
    scores_in_sandbox = True

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        spec = super().sandbox(task, stage)
        return spec and replace(
            spec, fakeroot=True, overlay_bytes=spec.overlay_bytes or OVERLAY_BYTES
        )

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        assert sandbox is not None
        done = await sandbox.exec(["bash", "-c", shell.START], STEP_S)
        if done.exit_code != 0:
            raise TaskError(
                f"task {task.task_id!r}: its image cannot be used: {done.output[-500:]}"
            )

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        command = call.arguments.get("command") if call.name == BASH.name else None
        if isinstance(command, str):
            call = call._replace(arguments={**call.arguments, "command": shell.GO + command})
        return await super().call(task, sandbox, call, timeout_s)

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The files that changed, packed. Raises SandboxError where they cannot be had."""
        assert sandbox is not None
        done = await sandbox.exec(["bash", "-c", shell.COLLECT], STEP_S)
        problem = f"cannot be packed: {done.output[-300:]}"
        if done.exit_code == shell.TOO_LARGE:
            problem = f"are more than {shell.MAX_CHANGES_BYTES} bytes, packed"
        elif done.exit_code == 0 and not done.timed_out:
            try:
                return await sandbox.get(shell.CHANGES, shell.MAX_CHANGES_BYTES)
            except (NotFoundError, OSError) as cause:
                problem = f"cannot be read: {cause}"
        raise SandboxError(FailureCode.SANDBOX_BROKEN, f"a container whose changes {problem}")

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Bring changes and tests, run the tests.

        Raises GraderError, SandboxError, RolloutError.
        """
        assert sandbox is not None
        await self._bring(task, artefact, sandbox)
        done = await self._tested(task, sandbox, deadline)
        value = 0.0 if done.timed_out else await self._reward(task, sandbox, done)
        log = f"{'the tests did not end in time' if done.timed_out else ''}{done.output}"
        return Score(parts=(RewardPart(name="tests", value=value),), log=log[-LOG_CHARS:])

    async def _tested(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> ToolResult:
        """What the tests' script printed, in the task's environment."""
        brought = await sandbox.exec(["bash", "-c", shell.BRING], STEP_S)
        if brought.exit_code != 0:
            raise GraderError(
                FailureCode.GRADER_ERROR, f"the tests cannot be brought: {brought.output[-300:]}"
            )
        exports = "".join(
            f"export {name}={shlex.quote(str(text))}\n"
            for name, text in (task.data.get("environment") or {}).items()
        )
        name = Path(text_field(task, "test")).name
        script = exports + shell.TEST.format(test=f"/tests/{name}")
        wanted_s = float(task.data.get("timeout_s", TESTS_S))
        limit_s = min(wanted_s, deadline.remaining_s)
        done = await sandbox.exec(["bash", "-c", script], limit_s)
        if done.timed_out and limit_s < wanted_s:
            raise cut_short("tests")
        return done

    async def _bring(self, task: Task, artefact: bytes, sandbox: Sandbox) -> None:
        folder = Path(text_field(task, "folder"))
        for name, content in (await asyncio.to_thread(_tests, task, folder)).items():
            await sandbox.put(f".prorl/tests/{name}", content, 0o755)
        for name, text in shell.STAND_INS.items():
            await sandbox.put(f".prorl/bin/{name}", f"#!/bin/bash\n{text}".encode(), 0o755)
        if not artefact:
            return
        await sandbox.put(shell.CHANGES, artefact)
        done = await sandbox.exec(["bash", "-c", shell.RESTORE], STEP_S)
        if done.exit_code != 0:
            raise GraderError(
                FailureCode.GRADER_ERROR, f"the changes cannot be brought: {done.output[-300:]}"
            )

    async def _reward(self, task: Task, sandbox: Sandbox, done: ToolResult) -> float:
        try:
            said = (await sandbox.get(shell.REWARD, 1 << 16)).decode("utf-8", "replace").strip()
        except (NotFoundError, OSError):
            said = ""
        if said:
            return reward_of(said)
        if text_field(task, "test").endswith("run-tests.sh"):
            return float(all_passed(done.output))
        if done.exit_code in (126, 127):
            raise GraderError(
                FailureCode.GRADER_ERROR, f"the tests cannot be run: {done.output[-500:]}"
            )
        return 0.0

    def reference(self, task: Task) -> Solution:
        """Write the solution's files and run its script."""
        self.check(task)
        folder, name = Path(text_field(task, "folder")), text_field(task, "solution")
        script = folder / name
        if not script.is_file():
            raise TaskError(f"task {task.task_id!r}: {script} is not there", "a solution")
        files = sorted(script.parent.iterdir()) if script.parent != folder else [script]
        calls = [
            ToolCall(
                "files",
                {"command": "create", "path": f".prorl/solution/{each.name}", "file_text": text},
            )
            for each in files
            if each.is_file() and (text := _text(each)) is not None
        ]
        run = (
            "mkdir -p /solution && cp -r /workspace/.prorl/solution/. /solution/ &&"
            f" PATH=/workspace/.prorl/bin:$PATH bash /solution/{script.name}"
        )
        return Solution((*calls, ToolCall("bash", {"command": run})), "It is done.")


def reward_of(said: str) -> float:
    """What the tests wrote: a number, or an object of numbers.

    >>> reward_of("1"), reward_of('{"reward": 0.5, "style": 1}'), reward_of('{"a": 1, "b": 0}')
    (1.0, 0.5, 0.5)
    """
    try:
        value = json.loads(said)
    except ValueError:
        return 0.0
    if isinstance(value, dict):
        numbers = [float(one) for one in value.values() if isinstance(one, int | float)]
        value = value.get("reward", sum(numbers) / len(numbers) if numbers else 0.0)
    good = isinstance(value, int | float) and 0 <= value <= 1
    return float(value) if good else 0.0


def all_passed(log: str) -> bool:
    """Whether pytest's short summary (`-rA`) has passes and nothing that failed.

    >>> all_passed("PASSED t.py::a"), all_passed("PASSED t.py::a\\nFAILED t.py::b"), all_passed("")
    (True, False, False)
    """
    words = [line.split(" ", 1)[0] for line in log.splitlines()]
    return "PASSED" in words and not {"FAILED", "ERROR"} & set(words)


def _tests(task: Task, folder: Path) -> dict[str, bytes]:
    """Files of tests/ and the script. Raises RolloutError."""
    script = folder / text_field(task, "test")
    found = {script.name: script} if script.is_file() else {}
    for path in sorted((folder / "tests").rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder / "tests"))] = path
    try:
        size = sum(path.stat().st_size for path in found.values())
        if script.name not in found or size > MAX_TEST_BYTES:
            raise OSError(f"no {script}, or more than {MAX_TEST_BYTES} bytes of tests")
        return {name: path.read_bytes() for name, path in found.items()}
    except OSError as cause:
        raise RolloutError(
            FailureCode.BAD_TASK, f"task {task.task_id!r}: its tests cannot be read here: {cause}"
        ) from cause


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None
