"""The workspace of a `swe` task: the repository is brought into it, its changes are read back, and
applied to a fresh one before any code of theirs has run.

Invariant: it is one git commit without history, made from the task's own files, archive or image.
Empty commits between it and the one tag keep the version that packages ask tags for.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from prorl.envs.swe import fields, guard, shell
from prorl.envs.swe.guard import Rules
from prorl.envs.tools import field_error
from prorl.errors import NotFoundError, SandboxError, TaskError
from prorl.limits import MAX_ARTIFACT_BYTES
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Task, ToolResult

MAX_ARCHIVE_BYTES = 256 << 20
SETUP_S, DIFF_S, GIT_S = 600.0, 40.0, 60.0
MAX_PATHS_BYTES = 8 << 20
_MAX_LISTED_PATHS = 5
_WILD = re.compile(r"([*?\[\\])")

_FURTHER = {"setup": "", "environment": {}, "requirements": [], "wheels": ""}
"""Fields that `prepare` reads beside files and archive, with what stands for none."""


def preparation(task: Task) -> str:
    """Everything that `prepare` reads, where there is a setup or an archive.

    Empty where there is neither: a copy would save nothing.
    """
    data, archive = task.data, task.data.get("archive", "")
    if not data.get("setup") and not archive:
        return ""
    about = Path(archive).stat() if archive and Path(archive).is_file() else None
    stamp = [about.st_size, about.st_mtime_ns] if about else []
    further = [data.get(name, none) for name, none in _FURTHER.items()]
    return json.dumps([data.get("files", {}), archive, stamp, *further], sort_keys=True)


async def prepare(task: Task, sandbox: Sandbox) -> None:
    """Bring the repository into the sandbox, run the setup and make it one commit.

    Raises TaskError when the task's own parts fail, SandboxError.
    """
    for path, text in fields.files(task).items():
        await sandbox.put(path, text.encode(), 0o755 if text.startswith("#!") else 0o644)
    if archive := task.data.get("archive"):
        await _unpack(task, Path(archive), sandbox)
    first = shell.LIST_FILES if task.data.get("files") or archive else ""
    if setup := task.data.get("setup"):
        limit_s = float(task.data.get("setup_s", SETUP_S))
        await _run(task, sandbox, "setup", first + setup, limit_s)
        first = ""
    await _run(task, sandbox, "the first commit", first + shell.BASE, SETUP_S)


async def _unpack(task: Task, archive: Path, sandbox: Sandbox) -> None:
    try:
        if archive.stat().st_size > MAX_ARCHIVE_BYTES:
            raise field_error(
                task,
                f"{archive} is larger than {MAX_ARCHIVE_BYTES} bytes",
                hint="put it into an image",
            )
        content = await asyncio.to_thread(archive.read_bytes)
    except OSError as cause:
        raise field_error(
            task, f"cannot read {archive} on this node: {cause.strerror}", "an archive"
        ) from cause
    await sandbox.put(shell.ARCHIVE, content)
    await _run(task, sandbox, f"unpacking {archive.name}", shell.UNPACK_TAR, SETUP_S)


async def changes(task: Task, sandbox: Sandbox) -> bytes:
    """The diff to the first commit, new files included, ignored ones not unless upstream tracks
    them or the reference changes them.

    Where it would be too large, generated files are left out, then new ones, then data, and a line
    in front of the diff names them (`remark`). Raises SandboxError when the agent has made it
    impossible to have.
    """
    changed = guard.patch_paths(fields.patch(task).decode("utf-8", "replace"))
    names = b"".join(path.encode() + b"\0" for path in changed)
    done = await sandbox.exec(["bash", "-c", shell.ARTIFACT], DIFF_S, names)
    problem = "cannot be read: its repository is broken"
    if done.timed_out:
        problem = f"cannot be read in {DIFF_S:g} s"
    elif done.exit_code == shell.TOO_LARGE:
        problem = f"are more than {MAX_ARTIFACT_BYTES} bytes"
    elif done.exit_code == 0:
        try:
            return await sandbox.get(shell.DIFF, MAX_ARTIFACT_BYTES)
        except (NotFoundError, OSError):
            pass
    raise SandboxError(
        FailureCode.SANDBOX_BROKEN,
        f"a workspace whose changes {problem}: {done.output.strip()[-500:]}",
    )


def remark(artifact: bytes) -> tuple[str, bytes]:
    """Returns the remark in front of the diff, for people, and the diff; both may be empty."""
    head, diff, rest = artifact.partition(b"diff --git ")
    return head.decode("utf-8", "replace"), diff + rest


async def _run(task: Task, sandbox: Sandbox, step: str, script: str, limit_s: float) -> None:
    done = await sandbox.exec(["bash", "-c", f"set -e\n{fields.exports(task)}{script}"], limit_s)
    if done.timed_out or done.exit_code != 0:
        in_time = f"ended with exit status {done.exit_code}"
        end = f"did not end in {limit_s:g} s" if done.timed_out else in_time
        raise TaskError(
            f"task {task.task_id!r}: {step} {end}: {done.output.strip()[-1000:]}",
            hint="run it by hand in such a sandbox",
        )


async def apply(
    sandbox: Sandbox, patch: bytes, without: Collection[str] = (), only: str = ""
) -> ToolResult:
    """Runs `git apply`, without these paths, or with one alone."""
    argv = [
        *("bash", "-c", shell.APPLY, "apply"),
        "--whitespace=nowarn",
        *(f"--exclude={_exactly(path)}" for path in without),
    ]
    argv += [f"--include={_exactly(only)}"] if only else []
    return await sandbox.exec([*argv, "-"], GIT_S, patch)


def _exactly(path: str) -> str:
    """A path as git's pattern; a byte that is no UTF-8 has become U+FFFD, which stands for any."""
    return _WILD.sub(r"\\\1", path).replace("\ufffd", "*")


async def guarded_apply(sandbox: Sandbox, change: bytes, rules: Rules) -> tuple[str, str]:
    """Applies what counts of a change: (why it does not apply, a note of what was left out)."""
    if guard.moves_files(change):
        return "it renames files, which a diff of ours never does", ""
    listed = await sandbox.exec(["bash", "-c", shell.PATHS_OF], GIT_S, change)
    if listed.exit_code != 0:
        return listed.output, ""
    rows = (await sandbox.get(shell.PATHS, MAX_PATHS_BYTES)).split(b"\0")
    paths = [row.split(b"\t", 2)[2].decode("utf-8", "replace") for row in rows if b"\t" in row]
    exclusions = guard.exclusions(paths, rules, await _there(sandbox, guard.questions(paths)))
    applied = await apply(sandbox, change, exclusions)
    return (applied.output, "") if applied.exit_code != 0 else ("", _exclusion_note(exclusions))


async def _there(sandbox: Sandbox, paths: Sequence[str]) -> frozenset[str]:
    if not paths:
        return frozenset()
    await sandbox.put(shell.QUERY, "".join(f"{path}\0" for path in paths).encode())
    await sandbox.exec(["bash", "-c", shell.THERE], GIT_S)
    listing = (await sandbox.get(shell.PATHS, MAX_PATHS_BYTES)).decode("utf-8", "replace")
    return frozenset(listing.split("\0"))


def _exclusion_note(exclusions: dict[str, str]) -> str:
    if not exclusions:
        return ""
    listing = ", ".join(
        f"{path} ({why})" for path, why in list(exclusions.items())[:_MAX_LISTED_PATHS]
    )
    num_more = len(exclusions) - _MAX_LISTED_PATHS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"left out of the change: {listing}{more}\n"
