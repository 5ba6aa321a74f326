"""Reads and checks the fields of `task.data` of the `swe` env."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from prorl.envs.swe import guard, shell
from prorl.envs.swe.logs import PARSERS, choose
from prorl.envs.tools import field_error, text_field
from prorl.types import Json, Task

_KINDS: Mapping[str, type] = {
    "files": dict,
    "archive": str,
    "setup": str,
    "test_command": str,
    "log_parser": str,
    "environment": dict,
    "verified": bool,
}
_ALIASES = {
    "test_cmd": "test_command",
    "test_commands": "test_command",
    "install": "setup",
    "pre_install": "setup",
    "repo_archive": "archive",
    "env": "environment",
    "env_vars": "environment",
    "docker_image": "image",
    "image_name": "image",
}
"""Names of other producers, which would be ignored here: `prorl/tasks` translates whole rows."""


def check_fields(task: Task) -> None:
    """The fields are there and of the right form. Raises TaskError."""
    if not test_names(task, "FAIL_TO_PASS"):
        expected = "at least one test that a solution makes pass"
        raise field_error(task, "FAIL_TO_PASS is empty", expected)
    test_names(task, "PASS_TO_PASS")
    is_in_image = not test_patch(task) and task.data.get("image") and task.data.get("test_command")
    if not is_in_image and not guard.patch_paths(text_field(task, "test_patch")):
        raise field_error(task, "data.test_patch names no file", "a unified diff")
    for name, kind in _KINDS.items():
        if not isinstance(task.data.get(name, kind()), kind):
            raise field_error(task, f"data.{name} is {task.data[name]!r}", f"a {kind.__name__}")
    for name, ours in _ALIASES.items():
        if task.data.get(name) and not task.data.get(ours):
            hint = "rename it, or give the row to prorl as its producer wrote it"
            raise field_error(task, f"data.{name} is not read", f"data.{ours}", hint)
    if not any(task.data.get(source) for source in ("files", "archive", "image")):
        raise field_error(task, "no repository", "data.files, data.archive or data.image")
    if log_parser(task) not in PARSERS:
        expected = f"one of {', '.join(PARSERS)}"
        raise field_error(task, f"data.log_parser is {log_parser(task)!r}", expected)
    for name, text in environment(task).items():
        if not name.isidentifier() or not isinstance(text, str):
            expected = "names of variables with texts"
            raise field_error(task, f"data.environment has {name!r}: {text!r}", expected)
    if wrong := [path for path, text in files(task).items() if not isinstance(text, str)]:
        raise field_error(task, f"data.files[{wrong[0]!r}]", "text")


def test_patch(task: Task) -> str:
    """The diff that brings the tests; empty where the image has them."""
    return str(task.data.get("test_patch") or "")


def patch(task: Task) -> bytes:
    """Returns the reference solution; empty where the task has none."""
    diff = task.data.get("patch")
    return diff.encode("utf-8", "surrogatepass") if isinstance(diff, str) else b""


def files(task: Task) -> Mapping[str, str]:
    contents: Mapping[str, str] = task.data.get("files") or {}
    return contents


def environment(task: Task) -> Mapping[str, str]:
    variables: Mapping[str, str] = task.data.get("environment") or {}
    return variables


def exports(task: Task) -> str:
    return shell.exports(environment(task), task.data.get("image") or "")


def command(task: Task) -> str:
    """Returns the command that runs the tests: the task's own, or pytest on the Python files of
    both lists and `test_patch`.
    """
    if own := task.data.get("test_command"):
        return str(own)
    names = (*test_names(task, "FAIL_TO_PASS"), *test_names(task, "PASS_TO_PASS"))
    named = (name.partition("::")[0] for name in names if "::" in name)
    paths = dict.fromkeys([*guard.patch_paths(test_patch(task)), *named])
    words = " ".join(shlex.quote(path) for path in paths if path.endswith(".py"))
    return f"python3 -m pytest -rA -p no:cacheprovider {words}"


def log_parser(task: Task) -> str:
    return str(task.data.get("log_parser") or choose(command(task)))


def rules(task: Task) -> guard.Rules:
    return guard.make_rules(
        test_patch(task),
        (*test_names(task, "FAIL_TO_PASS"), *test_names(task, "PASS_TO_PASS")),
        str(task.data.get("patch") or ""),
        command(task),
    )


def test_names(task: Task, key: str) -> tuple[str, ...]:
    """Names of tests: a list, or its JSON text as in the published data sets. Raises TaskError."""
    names: Json = task.data.get(key, [])
    try:
        names = json.loads(names) if isinstance(names, str) else names
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise field_error(task, f"data.{key} is {task.data.get(key)!r}", "a list of tests' names")
    return tuple(names)
