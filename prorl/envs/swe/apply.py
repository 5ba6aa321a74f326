"""Brings tests and change into a fresh EVAL workspace, before any code of the change has run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

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


async def apply(sandbox: Sandbox, patch: bytes, without: Collection[str] = ()) -> ToolResult:
    """`git apply`, without these paths."""
    # a byte that is no UTF-8 has become U+FFFD, which stands for any here
    patterns = (_WILD.sub(r"\\\1", path).replace("\ufffd", "*") for path in without)
    argv = ["git", "apply", "--whitespace=nowarn", *(f"--exclude={one}" for one in patterns), "-"]
    return await sandbox.exec(argv, GIT_S, patch)


async def guarded_apply(sandbox: Sandbox, change: bytes, rules: Rules) -> tuple[str, str]:
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
    counted = [path for path in paths if path not in {*left, *rules.reference}]
    settings = [path for path in counted if path.rpartition("/")[2] in SETTINGS]
    before = {path: await _content(sandbox, path) for path in settings}
    left |= {path: _SETTING for path, content in before.items() if content == _UNREADABLE}
    applied = await apply(sandbox, change, left)
    if applied.exit_code != 0:
        return applied.output, ""
    kept = {path: content for path, content in before.items() if path not in left}
    left |= dict.fromkeys(await _restore(sandbox, kept), _SETTING)
    return "", _told(left)


async def _restore(sandbox: Sandbox, before: Mapping[str, bytes | None]) -> list[str]:
    """Put back settings files whose part for the test runner the change has changed; their paths.

    `before` is what each of them held, None where there was none.
    """
    restored = []
    for path, content in before.items():
        now = await _content(sandbox, path)
        if runner_part(path, now) != runner_part(path, content):
            restored.append(path)
            await sandbox.exec(["rm", "-f", path], GIT_S)
            if content is not None:
                await sandbox.put(path, content)
    return restored


async def _there(sandbox: Sandbox, paths: Sequence[str]) -> frozenset[str]:
    """Which of the paths exist."""
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
