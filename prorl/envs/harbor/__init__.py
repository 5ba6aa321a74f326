"""Harbor's tasks: the agent works in the task's image, its tests say the reward (docs/harbor.md).

`prorl/tasks/formats/harbor.py` makes the tasks. Each part reads the folder that the task names.

    RUN    the image, written over by the agent; what it changed is packed at its end (`inside.py`)
    EVAL   a fresh sandbox: the pack, then tests/ as /tests, then test.sh; the reward files are read

Where the verifier is separate, EVAL's sandbox has the verifier's image, and only the declared
artifacts cross. Changes that are more than cross (`RolloutLimits.artifact_mb`) are graded where
they lie: the tests run in the agent's own sandbox, as they do in Harbor.

A verifier that leaves no valid reward is the policy's doing (reward 0) where the same tests on the
untouched image leave one, and the task's fault where they do not.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl.config.host_variables import filled, masked
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.harbor import inside
from prorl.envs.harbor.reward import NoRewardError, parts_of, parts_of_summary
from prorl.envs.tools import BASH, cut_short, field_error, text_field
from prorl.errors import (
    GraderError,
    NoReferenceError,
    NotFoundError,
    RolloutError,
    SandboxError,
    TaskError,
)
from prorl.limits import Deadline
from prorl.network_policy import NO_NETWORK, network_of
from prorl.protocols import Sandbox
from prorl.types import (
    IMAGE_WORKDIR,
    FailureCode,
    Json,
    RewardPart,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
)
from prorl.waits import wait_limit_s

MEMORY_BYTES, STORAGE_BYTES = 2 << 30, 2 << 30
"""The limits of tasks that state none."""
ADDRESS_BYTES = 1 << 40
"""No bound in practice: Java, Go and V8 map far more than they use, and images expect that."""
PROCESSES = 512
STEP_S = wait_limit_s("env.program")
WALL_S = 86400.0 + 7200.0
"""A run's longest RUN, and the verifier's time in the same sandbox."""
PACK_BYTES = 256 << 20
"""Room for the largest artifact beside what it holds."""
MAX_ARTIFACTS_BYTES = 512 << 20
"""The limit of what crosses to a separate verifier from the agent's living sandbox: it passes
through memory.
"""
MAX_FOLDER_BYTES = 64 << 20
"""The limit of a folder of a task, packed: it passes through the worker's memory."""
MAX_UNPACKED_BYTES, MAX_FOLDER_ENTRIES = 1 << 30, 100_000
"""The limits of the same folder, unpacked: reading it takes seconds, and links that lead in circles
come to an end.
"""
MAX_TASKS = 10_000
LOG_CHARS = 4000
SOLVE = "solve with "
"""Before the digest of the reference solution: the command that runs it."""


class HarborEnv(BaseEnv):
    """Remembers, for each task that `verify` tried, what its tests do on the untouched image."""

    name = "harbor"
    system = (
        "You work in a Linux container{network}. Do what the user asks for with bash, which starts"
        " in the working directory of the task. Tests look at the files that you leave when you"
        " are done; processes that you leave running end with you."
    )
    needs = ("folder", "image")
    offers = (BASH,)
    works_in_sandbox = True
    scores_in_sandbox = True
    reward_range = (0.0, math.inf)  # a verifier's reward may be continuous

    def __init__(self) -> None:
        self._untouched: dict[tuple[str, str], str] = {}
        """The fault of a task's tests on the untouched image, empty: nothing; bounded by
        MAX_TASKS.
        """

    def system_message(self, task: Task) -> str:
        """It promises no network: what a task asks for is granted, or not, by the operator."""
        is_closed = network_of(task, Stage.RUN).mode == NO_NETWORK
        return self.system.format(network=" without network" if is_closed else "")

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        spec = super().sandbox(task, stage)
        if spec is None:
            return None
        verifier, is_separate = task.data["verifier"], False
        if stage is Stage.EVAL and verifier["image"]:
            is_separate, resources = True, verifier["sandbox"]
            spec = replace(spec, image=verifier["image"])
        else:
            resources = task.data["sandbox"]
        workdir = verifier["workdir"] if is_separate else task.data.get("workdir")
        variables = verifier["variables"] if is_separate else task.data.get("environment") or {}
        storage = resources.get("overlay_bytes", STORAGE_BYTES)
        if stage is Stage.EVAL:
            storage += PACK_BYTES
        return replace(
            spec,
            fakeroot=True,
            workdir=workdir or IMAGE_WORKDIR,
            variables=tuple(f"{name}={value}" for name, value in variables.items()),
            memory_bytes=resources.get("memory_bytes", MEMORY_BYTES)
            + storage,  # files are in memory
            overlay_bytes=storage,
            cpus=resources.get("cpus", 0.0),
            address_bytes=ADDRESS_BYTES,
            file_bytes=storage,
            processes=PROCESSES,
            wall_s=WALL_S,
        )

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Wait until the image is healthy, then mark the time. Raises TaskError, SandboxError."""
        assert sandbox is not None
        await wait_until_healthy(task, sandbox, task.data.get("healthcheck"))
        done = await sandbox.exec(["bash", "-c", inside.START], STEP_S)
        if done.exit_code != 0:
            raise field_error(task, f"its image cannot be written over: {done.output[-200:]}")
        await put_files(task, sandbox, task.data.get("workdir_files"), ".")

    async def pack(self, task: Task, sandbox: Sandbox, max_bytes: int) -> bytes | None:
        """The packed changes, or the declared artifacts where the verifier is separate.

        None where they are more, or cannot be packed: a full disk, an unreadable file, no time.
        """
        return await self._pack_within(task, sandbox, max_bytes, STEP_S)

    async def _pack_within(
        self, task: Task, sandbox: Sandbox, max_bytes: int, limit_s: float
    ) -> bytes | None:
        """Run what collects artifacts, as well as it goes, and pack."""
        is_separate = bool(task.data["verifier"]["image"])
        sources = task.data["artifacts"] if is_separate else [{"source": "/", "exclude": []}]
        argv = inside.pack_argv(sources, max_bytes, is_changes=not is_separate)
        try:
            async with asyncio.timeout(limit_s):
                for hook in task.data.get("collect", ()):
                    await sandbox.exec(["bash", "-c", hook["command"]], hook["timeout_s"])
                done = await sandbox.exec(argv, limit_s)
                if done.exit_code == 0 and not done.timed_out:
                    return await sandbox.get(inside.PACK, max_bytes)
        except (TimeoutError, NotFoundError, OSError):
            pass
        return None

    async def verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        """Run the tests once on the untouched image; what comes out counts when a rollout's tests
        leave no reward.
        """
        problem = ""
        if not task.data["verifier"]["image"]:
            await put_files(task, sandbox, task.data.get("workdir_files"), ".")
        try:
            await _run_verifier(task, b"", sandbox, deadline)
        except NoRewardError as error:
            problem = str(error)
        while len(self._untouched) >= MAX_TASKS:
            del self._untouched[next(iter(self._untouched))]
        self._untouched[_key(task)] = problem

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """The verifier's rewards. Raises GraderError, SandboxError, RolloutError."""
        assert sandbox is not None
        try:
            parts, log = await grade_in_sandbox(task, artifact, sandbox, deadline)
        except NoRewardError as error:
            return self.without_reward(task, error)
        return Score(parts=parts, log=log[-LOG_CHARS:])

    async def score_in_place(
        self, task: Task, sandbox: Sandbox, fresh: Sandbox, deadline: Deadline
    ) -> Score:
        """The verifier's rewards in the agent's own sandbox, or for a separate verifier in `fresh`,
        to which the artifacts cross at once. What the agent broke there is its own doing.
        """
        try:
            if not task.data["verifier"]["image"]:
                parts, log = await grade_in_sandbox(task, b"", sandbox, deadline)
                log = f"graded in the agent's own sandbox\n{log}"
            else:
                limit_s = deadline.remaining_s / 2
                artifact = await self._pack_within(task, sandbox, MAX_ARTIFACTS_BYTES, limit_s)
                if artifact is None:
                    limit = f"{MAX_ARTIFACTS_BYTES >> 20} MiB in {limit_s:.0f} s"
                    raise NoRewardError(f"its artifacts cannot be packed into {limit}")
                parts, log = await grade_in_sandbox(task, artifact, fresh, deadline)
        except NoRewardError as error:
            return self.without_reward(task, error)
        except SandboxError as error:
            if error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return self.without_reward(task, NoRewardError(error.message))
        return Score(parts=parts, log=log[-LOG_CHARS:])

    def without_reward(self, task: Task, error: NoRewardError) -> Score:
        """Reward 0 where the tests leave a reward on the untouched image. Raises GraderError."""
        problem = self._untouched.get(_key(task), "they were not tried there")
        if problem:
            text = f"{error}; on the untouched image: {problem}"
            raise GraderError(FailureCode.BAD_TASK, text) from None
        zero = RewardPart(name="reward", value=0.0)
        return Score(parts=(zero,), log=f"reward 0, since {error}"[-LOG_CHARS:])

    def reference(self, task: Task) -> Solution:
        """Copy the solution to /solution and run solve.sh. Raises NoReferenceError, TaskError.

        The command names the solution by its digest, which only its owner can know: its files go
        into the sandbox beside the policy's tokens (`call`).
        """
        if not task.data["solution"]:
            raise NoReferenceError(f"task {task.task_id!r} has no solution/solve.sh")
        call = ToolCall("bash", {"command": solve_command(task)})
        return Solution((call,), "It is done.")

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run a tool in the sandbox; the reference's command with the solution's files."""
        command = str(call.arguments.get("command")) if call.name == BASH.name else ""
        if sandbox is not None and await is_solution(task, command):
            return await self.solve(task, sandbox, timeout_s)
        return await super().call(task, sandbox, call, timeout_s)

    async def solve(self, task: Task, sandbox: Sandbox, timeout_s: float) -> ToolResult:
        """Run the reference solution."""
        await put_files(task, sandbox, task.data["solution"], "/solution")
        variables = task.data.get("solution_environment") or {}
        command = f"chmod +x /solution/solve.sh; ({_exports(variables)}/solution/solve.sh)"
        call = ToolCall(BASH.name, {"command": command})
        done = await super().call(task, sandbox, call, timeout_s)
        return replace(done, output=masked(done.output, variables))


def solve_command(task: Task) -> str:
    """The command for which a task's reference solution is run."""
    whole = hashlib.sha256()
    for path, _ in _paths_of(task, task.data["solution"]):
        files = path.rglob("*") if path.is_dir() else [path]
        for file in sorted(file for file in files if file.is_file()):
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{SOLVE}{whole.hexdigest()}"


async def is_solution(task: Task, command: str) -> bool:
    """Tells whether a command stands for the task's reference solution."""
    if not command.startswith(SOLVE) or not task.data["solution"]:
        return False
    return command == await asyncio.to_thread(solve_command, task)


def _key(task: Task) -> tuple[str, str]:
    return task.task_id, text_field(task, "folder")


def _exports(variables: Mapping[str, str]) -> str:
    """Raises GraderError where the host lacks one: not the task's fault, nor the policy's."""
    try:
        values = filled(variables)
    except LookupError as error:
        raise GraderError(FailureCode.GRADER_ERROR, str(error.args[0])) from None
    return "".join(f"export {name}={shlex.quote(text)}; " for name, text in values.items())


async def wait_until_healthy(task: Task, sandbox: Sandbox, check: Json) -> None:
    """Run a healthcheck as Docker does: failures in the start period do not count."""
    if not check:
        return
    failures, starting = 0, Deadline(check["start_period_sec"])
    while True:
        done = await sandbox.exec(["bash", "-c", check["command"]], check["timeout_sec"])
        if done.exit_code == 0 and not done.timed_out:
            return
        failures += starting.expired
        if failures >= check["retries"]:
            raise field_error(
                task,
                f"its healthcheck failed {failures} times: {done.output[-150:]}",
                "exit code 0",
            )
        pause_s = check["interval_sec"] if starting.expired else check["start_interval_sec"]
        await asyncio.sleep(pause_s)


class StepError(GraderError):
    """A program of ours failed in the verifier's sandbox."""


async def grade_in_sandbox(
    task: Task, artifact: bytes, sandbox: Sandbox, deadline: Deadline
) -> tuple[tuple[RewardPart, ...], str]:
    """`_run_verifier` where the agent's work lies: that our programs fail there is its doing, for
    they do not on the untouched image.
    """
    try:
        return await _run_verifier(task, artifact, sandbox, deadline)
    except StepError as error:
        raise NoRewardError(error.message) from None


async def _run_verifier(
    task: Task, artifact: bytes, sandbox: Sandbox, deadline: Deadline
) -> tuple[tuple[RewardPart, ...], str]:
    """Rewards and log of the tests in a sandbox, after an artifact was unpacked there.

    Raises NoRewardError where the tests leave no valid reward, GraderError, SandboxError.
    """
    verifier = task.data["verifier"]
    notes = ""
    if artifact:
        limit_s = max(STEP_S, deadline.remaining_s)  # no agent's work is too much to be unpacked
        notes = (await _unpack(sandbox, artifact, "/", limit_s, is_agents=True)).output
    await _step(sandbox, ["bash", "-c", inside.CLEAR])
    if verifier["image"] and verifier["tests"]:
        await put_files(task, sandbox, task.data.get("workdir_files"), ".")
    await put_files(task, sandbox, verifier["tests"], "/tests")
    limit_s = min(float(verifier["timeout_s"]), deadline.remaining_s)
    script = f"{_exports(verifier['environment'])}{inside.TEST}"
    done = await sandbox.exec(["bash", "-c", script], limit_s)
    if done.timed_out and limit_s < verifier["timeout_s"]:
        raise cut_short("verifier")
    files = _read_files((await _step(sandbox, inside.reward_argv())).output)
    log = masked(f"{notes}{files.pop('log', '')}", verifier["environment"])
    if done.timed_out:
        raise NoRewardError(f"the verifier did not end in {limit_s:g} s")
    reads_summary = verifier.get("reads_summary", False)
    return (parts_of_summary if reads_summary else parts_of)(files), log


def _read_files(output: str) -> dict[str, str]:
    """Parses the last line that `inside.reward_argv` prints; a broken loader prints lines before
    it. Raises StepError.
    """
    try:
        files = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        files = None
    if not isinstance(files, dict):
        text = f"the reward files cannot be read: {output[:300]}"
        raise StepError(FailureCode.GRADER_ERROR, text)
    return files


def _paths_of(task: Task, files: Json) -> list[tuple[Path, str]]:
    """Files and folders of a task, and what they are called where they are put: `.` stands for the
    target itself. Later ones are put over earlier ones.
    """
    folder = Path(text_field(task, "folder"))
    return [(folder / source, name) for source, name in files or ()]


async def put_files(task: Task, sandbox: Sandbox, files: Json, target: str) -> None:
    """Copy files of the task into a folder of the sandbox. Raises as `_packed` and `_step`."""
    if paths := _paths_of(task, files):
        packed = await asyncio.to_thread(_packed, paths)
        await _unpack(sandbox, packed, target, STEP_S, is_agents=False)


async def _unpack(
    sandbox: Sandbox, pack: bytes, target: str, limit_s: float, *, is_agents: bool
) -> ToolResult:
    await sandbox.put(inside.PACK, pack)
    return await _step(sandbox, inside.unpack_argv(target, is_agents=is_agents), limit_s)


async def _step(sandbox: Sandbox, argv: list[str], limit_s: float = STEP_S) -> ToolResult:
    """Run a program of ours. Raises StepError where it fails, GraderError where time is short."""
    done = await sandbox.exec(argv, limit_s)
    if done.timed_out:
        text = f"the verifier's sandbox was not prepared in {limit_s:g} s"
        raise GraderError(FailureCode.GRADER_ERROR, text)
    if done.exit_code != 0:
        text = f"the verifier's sandbox cannot be prepared: {done.output[-300:]}"
        raise StepError(FailureCode.GRADER_ERROR, text)
    return done


class _Pack(io.BytesIO):
    """A pack in memory that takes MAX_FOLDER_BYTES."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_FOLDER_BYTES:
            raise TaskError(f"more than {MAX_FOLDER_BYTES >> 20} MiB, packed")
        return super().write(data)


def _packed(paths: Sequence[tuple[Path, str]]) -> bytes:
    """Files and folders of a task as a pack. Raises TaskError, RolloutError."""
    buffer, num_bytes, num_entries = _Pack(), 0, 0

    def count(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal num_bytes, num_entries
        num_bytes, num_entries = num_bytes + entry.size, num_entries + 1
        if num_bytes > MAX_UNPACKED_BYTES:
            raise TaskError(f"more than {MAX_UNPACKED_BYTES >> 20} MiB")
        if num_entries > MAX_FOLDER_ENTRIES:
            raise TaskError(f"more than {MAX_FOLDER_ENTRIES:,} files, those behind links included")
        return entry

    try:
        with tarfile.open(fileobj=buffer, mode="w:gz", dereference=True) as tar:
            info = tarfile.TarInfo(".prorl-meta.json")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
            for path, name in paths:
                tar.add(path, arcname=name, filter=count)
    except TaskError as error:
        hint = "put what is large into the image"
        raise TaskError(f"{path} has {error}", "less", hint) from None
    except OSError as error:
        text = f"{path} cannot be read on this node: {error.strerror}"
        raise RolloutError(FailureCode.BAD_TASK, text) from error
    return buffer.getvalue()
