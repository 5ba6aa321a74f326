"""Settings of envs as a run, a command line or a row states them, and how a task gets them.

    "math?tools=none&answer_format=boxed"               a command line, `load_tasks`
    {"name": "math", "tools": [], "system": "Think."}   a config file, a run's config
    {"math": {"tools": []}, "code": {"partial": true}}  the same for several envs
    {"settings": {"grading": "strict"}}                 `data` of a row, which comes first

`merge` writes the effective settings to `task.data["settings"]`: they are part of the task, hence
of its digest and of what is stored. Which settings an env takes, it declares itself
(`prorl/envs/settings.py`); this module looks at their shape alone.

>>> read("math?tools=none&answer_format=boxed")
{'math': {'tools': 'none', 'answer_format': 'boxed'}}
>>> read({"name": "code", "partial": True}), read("auto")
({'code': {'partial': True}}, {})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson

from prorl.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from prorl.types import Json, Task

AUTO = "auto"
"""The name `auto` of an env: each task keeps its own."""

KEY = "settings"
"""The key in `task.data`: the settings that hold for the task."""

FORMS = "NAME?KEY=VALUE&..., {name: NAME, KEY: VALUE}, or {NAME: {KEY: VALUE}} for several envs"


def read(value: Json) -> dict[str, dict[str, Json]]:
    """Settings by the env's name, from any of the forms above. Raises ConfigError."""
    if isinstance(value, str):
        name, mark, query = value.partition("?")
        settings = _from_query(value, query) if mark else {}
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        name = value["name"]
        settings = {key: inner for key, inner in value.items() if key != "name"}
    elif isinstance(value, Mapping):
        if wrong := [key for key, inner in value.items() if not isinstance(inner, Mapping)]:
            raise ConfigError(f"`env` has {wrong[0]!r}: {value[wrong[0]]!r}"[:300], FORMS)
        return {str(name): dict(inner) for name, inner in value.items() if inner}
    else:
        raise ConfigError(f"`env` = {value!r}"[:300], FORMS)
    if not name or (name == AUTO and settings):
        raise ConfigError(f"`env` = {value!r}"[:300], "the name of an env before its settings")
    return {name: settings} if settings else {}


def env_of_all(value: Json) -> str:
    """The env that replaces every task's own; `auto` where each task keeps its own.

    >>> env_of_all("math?tools=none"), env_of_all({"math": {}, "code": {"partial": True}})
    ('math', 'auto')
    """
    if isinstance(value, str):
        return value.partition("?")[0] or AUTO
    name = value.get("name") if isinstance(value, Mapping) else None
    return name if isinstance(name, str) else AUTO


def merge(task: Task, settings: Mapping[str, Mapping[str, Json]], *, above: bool = False) -> Task:
    """The task with the settings of its env below those of its own row, or `above` them. Raises
    TaskError.
    """
    common = settings.get(task.env)
    if not common:
        return task
    own = settings_of(task)
    merged = {**own, **common} if above else {**common, **own}
    return replace(task, data={**task.data, KEY: merged})


def settings_of(task: Task) -> Mapping[str, Json]:
    """`data.settings` of a task. Raises TaskError."""
    settings: Json = task.data.get(KEY, {})
    if not isinstance(settings, Mapping):
        problem = f"task {task.task_id!r}: data.{KEY} is {settings!r}"[:300]
        raise TaskError(problem, "an object: setting -> value")
    return settings


def _from_query(text: str, query: str) -> dict[str, Json]:
    """Settings of a command line: a value that is JSON is that value, any other is a text."""
    settings: dict[str, Json] = {}
    for part in query.split("&"):
        key, sign, value = part.partition("=")
        if not key or not sign or key in settings:
            raise ConfigError(
                f"`env` = {text!r}"[:300],
                "KEY=VALUE, each key once, with & between them",
                "write & and % inside a value as %26 and %25",
            )
        value = unquote(value)
        try:
            settings[key] = orjson.loads(value)
        except orjson.JSONDecodeError:
            settings[key] = value
    return settings
