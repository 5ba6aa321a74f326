"""Brings tests and change into a fresh EVAL workspace, before any code of the change has run."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from prorl.envs.swe import guard, shell
from prorl.envs.swe.guard import Rules
from prorl.envs.swe.settings import SETTINGS, runner_part
from prorl.errors import SandboxError
from prorl.protocols import Sandbox
from prorl.types import FailureCode, ToolResult

GIT_S = 60.0
MAX_PATHS_BYTES = 8 << 20
_SHOWN_PATHS = 5
_SETTING = "settings of the test runner"
_UNREADABLE = b"\0"
"""No text of any settings file."""
_WILD = re.compile(r"([*?\[\\])")


async def apply(
    sandbox: Sandbox, patch: bytes, without: Collection[str] = (), only: str = ""
) -> ToolResult:
    """`git apply`, without these paths, or one alone."""
    argv = [
        "git",
        "apply",
        "--whitespace=nowarn",
        *(f"--exclude={_exactly(one)}" for one in without),
    ]
    argv += [f"--include={_exactly(only)}"] if only else []
    return await sandbox.exec([*argv, "-"], GIT_S, patch)


def _exactly(path: str) -> str:
    """A path as git's pattern; a byte that is no UTF-8 has become U+FFFD, which stands for any."""
    return _WILD.sub(r"\\\1", path).replace("\ufffd", "*")


async def guarded_apply(
    sandbox: Sandbox, change: bytes, rules: Rules, reference: bytes = b""
) -> tuple[str, str]:
    """Apply what counts of a change: (why it does not apply, what was left out, for people)."""
    if guard.moves_files(change):
        return "it renames files, which a diff of ours never does", ""
    listed = await sandbox.exec(["bash", "-c", shell.PATHS_OF], GIT_S, change)
    if listed.exit_code != 0:
        return listed.output, ""
    rows = (await sandbox.get(shell.PATHS, MAX_PATHS_BYTES)).split(b"\0")
    paths = [row.split(b"\t", 2)[2].decode("utf-8", "replace") for row in rows if b"\t" in row]
    there = await _there(sandbox, guard.questions(paths))
    left = guard.left_out(paths, rules, there)
    settings = [path for path in paths if path.rpartition("/")[2] in SETTINGS and path not in left]
    allowed = {path: [await _content(sandbox, path)] for path in settings}
    left |= {path: _SETTING for path, (content,) in allowed.items() if content == _UNREADABLE}
    for path in rules.reference & allowed.keys() - left.keys():
        allowed[path].append(await _reference_content(sandbox, path, reference, allowed[path][0]))
    applied = await apply(sandbox, change, left)
    if applied.exit_code != 0:
        return applied.output, ""
    for path in allowed.keys() - left.keys():
        parts = [runner_part(path, content) for content in allowed[path]]
        if runner_part(path, await _content(sandbox, path)) not in parts:
            left[path] = _SETTING
            await _write(sandbox, path, allowed[path][-1])
    return "", _told(left)


async def _reference_content(
    sandbox: Sandbox, path: str, reference: bytes, before: bytes | None
) -> bytes | None:
    """What the reference patch makes of a settings file."""
    await apply(sandbox, reference, only=path)
    found = await _content(sandbox, path)
    await _write(sandbox, path, before)
    return found


async def _write(sandbox: Sandbox, path: str, content: bytes | None) -> None:
    """Put a settings file back; None: there is none."""
    await sandbox.exec(["rm", "-f", path], GIT_S)
    if content is not None:
        await sandbox.put(path, content)


async def _there(sandbox: Sandbox, paths: Sequence[str]) -> frozenset[str]:
    if not paths:
        return frozenset()
    await sandbox.put(shell.ASKED, "".join(f"{path}\0" for path in paths).encode())
    await sandbox.exec(["bash", "-c", shell.THERE], GIT_S)
    found = (await sandbox.get(shell.PATHS, MAX_PATHS_BYTES)).decode("utf-8", "replace")
    return frozenset(found.split("\0"))


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    """A settings file; None when there is none, _UNREADABLE for a link or one that is too large:
    the runner would read it.
    """
    try:
        return await sandbox.get(path)
    except OSError:
        return None
    except SandboxError as error:
        if error.code is not FailureCode.SANDBOX_BROKEN:
            raise
        return _UNREADABLE


def _told(left: dict[str, str]) -> str:
    if not left:
        return ""
    shown = ", ".join(f"{path} ({why})" for path, why in list(left.items())[:_SHOWN_PATHS])
    more = f" and {len(left) - _SHOWN_PATHS} more" if len(left) > _SHOWN_PATHS else ""
    return f"left out of the change: {shown}{more}\n"
