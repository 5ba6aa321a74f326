"""Brings tests and change into a fresh EVAL workspace, before any code of the change has run."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Collection, Sequence

from prorl.envs.swe import guard, shell
from prorl.envs.swe.guard import Rules
from prorl.errors import SandboxError
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, ToolResult


def runner_part(path: str, content: bytes | None) -> str:
    """What a settings file says to the test runner, as text to compare; empty: nothing.

    >>> runner_part("pyproject.toml", b"[project]\\nname = 'x'"), runner_part("setup.cfg", b"[tool:pytest]\\naddopts=-p x")
    ('', '{"tool:pytest": {"addopts": "-p x"}}')
    """
    if content is None:
        return ""
    text = content.decode("utf-8", "replace")
    try:
        found = _READERS[path.rpartition("/")[2]](text)
    except (ValueError, configparser.Error, RecursionError, AttributeError):
        return f"unreadable {text}"
    kept = {key: value for key, value in found.items() if value}
    return json.dumps(kept, sort_keys=True, default=str) if kept else ""


def _pyproject(text: str) -> dict[str, Json]:
    document = tomllib.loads(text)
    tools, project = document.get("tool", {}), document.get("project", {})
    found = {name: tools.get(name) for name in ("pytest", "tox", "nox", "coverage", "hatch")}
    return {**found, "entry-points": project.get("entry-points")}


def _setup_cfg(text: str) -> dict[str, Json]:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    names = (
        "tool:pytest",
        "pytest",
        "nosetests",
        "aliases",
        "options.entry_points",
        "coverage:run",
    )
    return {name: dict(parser[name]) for name in names if parser.has_section(name)}


def _package_json(text: str) -> dict[str, Json]:
    document = json.loads(text)
    names = ("scripts", "jest", "mocha", "ava", "nyc", "c8", "babel", "vitest", "type")
    return {name: document.get(name) for name in names}


_READERS = {"pyproject.toml": _pyproject, "setup.cfg": _setup_cfg, "package.json": _package_json}
SETTINGS = tuple(_READERS)
"""Files of which one part is the runner's."""


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
