"""Software-engineering tasks in SWE-bench's shape (Jimenez et al. 2024): change a repository so
that hidden tests pass.

| `task.data` | |
|---|---|
| FAIL_TO_PASS, PASS_TO_PASS | names of tests that must pass afterwards; lists, or lists as JSON text |
| test_patch | unified diff that brings the hidden tests |
| patch | the reference solution, for oracles |
| files, archive | the repository: path -> text; or a .tar[.gz] or git .bundle on the node (with `base_commit`) |
| image | folder or .sif to run in; it may hold the repository, which `setup` then copies into the workspace |
| setup | shell commands that make the workspace ready, as the agent's user; run once a node for siblings of a task |
| test_command | shell commands that run the tests; default: pytest on the files of `test_patch` |
| timeout_s, setup_s | limits of tests (60) and setup (600), below `limits.eval_s` and `limits.init_s` |
| tools, protected, sandbox | further tools (`prorl/tools`); patterns of files (below); fields of SandboxSpec |

The repository lies in the workspace as one git commit without history: a later fix cannot be read
out of it. An image needs git. What crosses into EVAL is the diff to that commit. EVAL prepares a
fresh workspace in the same way, brings the tests, then the diff without what it says about the
tests' own files and about `protected` ones (conftest.py and the like), runs the tests and reads
each named one's verdict.

The reward is 1 when all named tests pass, else 0; a diff that does not apply, tests that hang or a
sandbox that they break are 0 too. Not promised: tests share a process with the code that they test,
as in SWE-bench, so code written to forge their output can.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.swe_report import passed_tests, patch_paths
from prorl.envs.swe_shell import ARCHIVE, ARTEFACT, BASE, DIFF, LOG, TAIL, UNPACK_BUNDLE, UNPACK_TAR
from prorl.envs.tools import BASH, FILES, text_field
from prorl.errors import GraderError, NotFoundError, RolloutError, SandboxError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import (
    FailureCode,
    Json,
    RewardPart,
    Score,
    Task,
    ToolCall,
    ToolResult,
)

MAX_PATCH_BYTES = 512 << 10
MAX_REPORT_BYTES = 4 << 20
MAX_ARCHIVE_BYTES = 256 << 20
TESTS_S, SETUP_S, GIT_S, DIFF_S = 60.0, 600.0, 60.0, 40.0
GOLD_PATCH = ".git/reference.patch"
PROTECTED = (
    "conftest.py",
    "*/conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "*.pth",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.py",
    "pytest/*",
    "_pytest/*",
    "unittest.py",
    "unittest/*",
)
"""What steers or shadows a test runner from outside the tests.

A task whose solution must change one of these names its own `protected`.
"""

_SYSTEM = (
    "You work on a repository, which is your workspace. Change it so that it does what the user"
    " asks for; hidden tests decide. Look around with bash, edit with files or bash, run what helps"
    " you. Your changes in the workspace count as they are: when they are complete, say so in a"
    " sentence."
)
_KINDS: Mapping[str, type] = {
    "files": dict,
    "archive": str,
    "base_commit": str,
    "setup": str,
    "test_command": str,
    "protected": list,
}


class SweEnv(BaseEnv):
    """Implements `prorl.protocols.Prepares`, too."""

    name = "swe"
    system = _SYSTEM
    needs = ("test_patch",)
    offers = (BASH, FILES)
    scores_in_sandbox = True

    def check(self, task: Task) -> None:
        """The fields are there and of the right form; nothing is run. Raises TaskError."""
        super().check(task)
        if not _names(task, "FAIL_TO_PASS"):
            raise TaskError(
                f"task {task.task_id!r}: FAIL_TO_PASS is empty",
                "at least one test that a solution makes pass",
            )
        _names(task, "PASS_TO_PASS")
        if not patch_paths(text_field(task, "test_patch")):
            raise TaskError(
                f"task {task.task_id!r}: data.test_patch names no file", "a unified diff"
            )
        for name, kind in _KINDS.items():
            if not isinstance(task.data.get(name, kind()), kind):
                raise TaskError(
                    f"task {task.task_id!r}: data.{name} is {task.data[name]!r}"[:300],
                    f"a {kind.__name__}",
                )
        if not any(task.data.get(source) for source in ("files", "archive", "image")):
            raise TaskError(
                f"task {task.task_id!r}: no repository", "data.files, data.archive or data.image"
            )
        if wrong := [path for path, text in _files(task).items() if not isinstance(text, str)]:
            raise TaskError(f"task {task.task_id!r}: data.files[{wrong[0]!r}]", "text")

    # ---- the workspace

    def preparation(self, task: Task) -> str:
        """Everything that `prepare` reads, where there is a setup or an archive: else a copy saves
        nothing.
        """
        data, archive = task.data, task.data.get("archive", "")
        if not data.get("setup") and not archive:
            return ""
        about = Path(archive).stat() if archive and Path(archive).is_file() else None
        stamp = [about.st_size, about.st_mtime_ns] if about else []
        return json.dumps(
            [
                data.get("files", {}),
                archive,
                stamp,
                data.get("base_commit", ""),
                data.get("setup", ""),
            ],
            sort_keys=True,
        )

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Repository, setup, one commit.

        Raises TaskError when the task's own parts fail, SandboxError.
        """
        assert sandbox is not None
        for path, text in _files(task).items():
            await sandbox.put(path, text.encode(), 0o755 if text.startswith("#!") else 0o644)
        if archive := task.data.get("archive"):
            await self._unpack(task, archive, sandbox)
        if setup := task.data.get("setup"):
            await _run(task, sandbox, "setup", setup, float(task.data.get("setup_s", SETUP_S)))
        await _run(task, sandbox, "the first commit", BASE, SETUP_S)

    async def _unpack(self, task: Task, archive: str, sandbox: Sandbox) -> None:
        path = Path(archive)
        try:
            if path.stat().st_size > MAX_ARCHIVE_BYTES:
                raise TaskError(
                    f"task {task.task_id!r}: {archive} is larger than {MAX_ARCHIVE_BYTES} bytes",
                    mend="put it into an image",
                )
            content = await asyncio.to_thread(path.read_bytes)
        except OSError as cause:
            raise TaskError(
                f"task {task.task_id!r}: cannot read {archive} on this node: {cause.strerror}",
                "an archive",
            ) from cause
        await sandbox.put(ARCHIVE, content)
        script = (
            f"BASE_COMMIT={shlex.quote(task.data.get('base_commit', ''))}\n{UNPACK_BUNDLE}"
            if path.suffix == ".bundle"
            else UNPACK_TAR
        )
        await _run(task, sandbox, f"unpacking {path.name}", script, SETUP_S)

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The diff to the first commit, new files included, ignored ones not; empty when the agent
        has made that impossible.
        """
        assert sandbox is not None
        done = await sandbox.exec(["bash", "-c", ARTEFACT], DIFF_S)
        if done.timed_out:
            raise SandboxError(
                FailureCode.SANDBOX_BROKEN,
                f"a workspace whose changes cannot be read in {DIFF_S:g} s",
            )
        if done.exit_code != 0:
            return b""
        try:
            return await sandbox.get(DIFF, MAX_PATCH_BYTES)
        except (NotFoundError, OSError):
            return b""

    # ---- scoring

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Apply tests and diff, run the tests.

        Raises GraderError, SandboxError, RolloutError for a task whose tests do not apply.
        """
        assert sandbox is not None
        if not artefact.strip():
            return _score(task, frozenset(), "no change")
        applied = await _apply(sandbox, text_field(task, "test_patch").encode())
        if applied.exit_code != 0:
            raise RolloutError(
                FailureCode.BAD_TASK,
                f"task {task.task_id!r}: test_patch does not apply: {applied.output[-1000:]}",
            )
        applied = await _apply(sandbox, artefact, self._hands_off(task))
        if applied.exit_code != 0:
            return _score(task, frozenset(), f"the change does not apply: {applied.output}")
        try:
            report = await self._tested(task, sandbox, deadline)
        except SandboxError as error:
            if error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return _score(task, frozenset(), f"the tests broke their sandbox: {error.message}")
        return _score(task, passed_tests(report), report)

    def _hands_off(self, task: Task) -> tuple[str, ...]:
        """What of a diff is left out."""
        return (
            *patch_paths(text_field(task, "test_patch")),
            *task.data.get("protected", PROTECTED),
        )

    async def _tested(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> str:
        """The end of what the tests printed."""
        wanted_s = float(task.data.get("timeout_s", TESTS_S))
        limit_s = min(wanted_s, deadline.remaining_s)
        command = task.data.get("test_command") or _default_command(task)
        done = await sandbox.exec(["bash", "-c", f"(\n{command}\n) > {LOG} 2>&1"], limit_s)
        if done.timed_out and limit_s < wanted_s:
            raise GraderError(
                FailureCode.GRADER_ERROR, "too little of EVAL's time was left for the tests"
            )
        await sandbox.exec(["bash", "-c", f"tail -c {MAX_REPORT_BYTES} {LOG} > {TAIL}"], GIT_S)
        try:
            report = (await sandbox.get(TAIL, MAX_REPORT_BYTES)).decode("utf-8", "replace")
        except FileNotFoundError:
            return "the tests removed their own log"
        return report + ("\nthe tests did not end in time" if done.timed_out else "")

    def reference(self, task: Task) -> Solution:
        """Write the reference patch to a file and apply it."""
        self.check(task)
        write = ToolCall(
            "files",
            {"command": "create", "path": GOLD_PATCH, "file_text": text_field(task, "patch")},
        )
        apply = ToolCall(
            "bash", {"command": f"git apply --whitespace=nowarn {GOLD_PATCH} && git status --short"}
        )
        return Solution((write, apply), "The change is in the workspace.")


async def _run(task: Task, sandbox: Sandbox, what: str, script: str, limit_s: float) -> None:
    """Run a script of the task's in the workspace. Raises TaskError when it fails."""
    done = await sandbox.exec(["bash", "-c", f"set -e\n{script}"], limit_s)
    if done.timed_out or done.exit_code != 0:
        end = (
            f"did not end in {limit_s:g} s"
            if done.timed_out
            else f"ended with exit status {done.exit_code}"
        )
        raise TaskError(
            f"task {task.task_id!r}: {what} {end}: {done.output.strip()[-1000:]}",
            mend="run it by hand in such a sandbox",
        )


async def _apply(sandbox: Sandbox, patch: bytes, exclude: tuple[str, ...] = ()) -> ToolResult:
    without = [f"--exclude={pattern}" for pattern in exclude]
    return await sandbox.exec(["git", "apply", "--whitespace=nowarn", *without, "-"], GIT_S, patch)


def _default_command(task: Task) -> str:
    paths = " ".join(
        shlex.quote(path)
        for path in patch_paths(text_field(task, "test_patch"))
        if path.endswith(".py")
    )
    return f"python3 -m pytest -rA -p no:cacheprovider {paths}"


def _files(task: Task) -> Mapping[str, str]:
    files: Mapping[str, str] = task.data.get("files", {})
    return files


def _names(task: Task, key: str) -> tuple[str, ...]:
    """Names of tests: a list, or its JSON text as in the published data sets."""
    names: Json = task.data.get(key, [])
    try:
        names = json.loads(names) if isinstance(names, str) else names
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TaskError(
            f"task {task.task_id!r}: data.{key} is {task.data.get(key)!r}"[:300],
            "a list of tests' names",
        )
    return tuple(names)


def _score(task: Task, passed: frozenset[str], log: str) -> Score:
    """`resolved` counts; the shares of passed tests are kept for analysis."""
    parts = []
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        names = _names(task, key)
        parts.append(
            RewardPart(
                name=key.lower(),
                value=len(passed.intersection(names)) / len(names) if names else 1.0,
                weight=0.0,
            )
        )
    resolved = all(part.value == 1.0 for part in parts)
    return Score(
        parts=(RewardPart(name="resolved", value=float(resolved)), *parts), log=log[-4000:]
    )
