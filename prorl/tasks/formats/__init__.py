"""The row formats that task files come in: one name in `NAMES` each.

A format knows the keys that give it away and turns one row into a Task. The first of `NAMES` whose
keys are all in a file's first row is the file's format; `prorl run` and `prorl check` say which it
was. A format of your own is an entry point of the group `prorl.formats` whose value is a `Format`;
it is asked before ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import NamedTuple

from prorl import plugins
from prorl.errors import TaskError
from prorl.types import Json, Task

NAMES = (
    "harbor:HARBOR",
    "questions:PRORL",
    "programs:HUMANEVAL",
    "swe:R2E_GYM",
    "swe:SMITH",
    "swe:SWEBENCH",
    "questions:VERL",
    "questions:NEMO_GYM",
    "programs:LIVECODEBENCH",
    "programs:APPS",
    "programs:CONTEST",
    "questions:LISTED",
    "questions:LABELLED",
    "questions:GPQA",
    "questions:SCIQ",
    "questions:GSM8K",
    "questions:ANSWERS_FORMAT",
)
"""Modules of this folder and what they define, most particular first."""

GROUP = "prorl.formats"

LISTED_KEYS, NEAREST = 20, 4
MEND_KEYS = (
    "rename the keys, or write rows with task_id, env, prompt and data; docs/tasks.md has the keys"
    " of each format"
)

Row = Mapping[str, Json]


def _always(row: Row) -> bool:
    return True


class Format(NamedTuple):
    """One row format: how it is known, and how its rows are read."""

    name: str
    keys: tuple[str, ...]
    """All of them are in the first row of such a file; `a|b` means one of the two."""
    read: Callable[[Row, int], Task]
    """(row, index from 0) -> Task. Raises TaskError without a place; the reader adds it."""
    fits: Callable[[Row], bool] = _always
    """Returns, where the keys do not tell formats apart, whether the first row is of this one:
    whether the first row is of this one.
    """


def formats() -> Iterator[Format]:
    """Yields all formats: the users' first, then ours."""
    for name in plugins.registered(GROUP):
        plugin = plugins.load(GROUP, name, TaskError)
        if not isinstance(plugin, Format):
            raise TaskError(f"format {name!r} is {plugin!r}"[:200], "a prorl.tasks.formats.Format")
        yield plugin
    for name in NAMES:
        module, _, attribute = name.partition(":")
        yield getattr(import_module(f"prorl.tasks.formats.{module}"), attribute)


def detect(row: Row) -> Format:
    """Returns the format of a file from its first row. Raises TaskError."""
    candidates = list(formats())
    for candidate in candidates:
        has_keys = all(any(key in row for key in keys.split("|")) for keys in candidate.keys)
        if has_keys and candidate.fits(row):
            return candidate
    keys = ", ".join(map(repr, list(row)[:LISTED_KEYS])) or "(none)"
    more = ", ..." if len(row) > LISTED_KEYS else ""
    problem = f"keys {keys}{more} are of no known format"
    if nearest := _nearest(candidates, row):
        problem += f"; nearest: {nearest}"
    names = ", ".join(dict.fromkeys(layout.name for layout in candidates))
    raise TaskError(problem, f"one of {names}", MEND_KEYS)


def _nearest(candidates: Iterable[Format], row: Row) -> str:
    """Returns the formats that lack one key of several, with the key; empty where none does."""
    nearest = dict[str, str]()
    for candidate in candidates:
        lacking = [keys for keys in candidate.keys if not any(k in row for k in keys.split("|"))]
        if len(lacking) == 1 and len(candidate.keys) > 1:
            nearest.setdefault(candidate.name, lacking[0].replace("|", " or "))
    return ", ".join(f"{name} (lacks {key})" for name, key in islice(nearest.items(), NEAREST))


def text(row: Row, key: str) -> str:
    """Returns a text that a row must have, not an empty one. Raises TaskError."""
    if key not in row:
        raise TaskError(
            f"the key {key!r} is missing; found {', '.join(map(repr, row))}",
            f"{key!r} with a string",
            "add it",
        )
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        kind = "empty" if isinstance(value, str) else type(value).__name__
        raise TaskError(
            f"{key!r} is {kind}", "a string that is not empty", "mend or remove the row"
        )
    return value


def mapping(value: Json, name: str) -> dict[str, Json]:
    """JSON text of an object, or the object. Raises TaskError."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TaskError(f"{name} is {str(value)[:60]}", "the JSON text of an object")
    return value


def name_of(row: Row, source: str, index: int, *keys: str) -> str:
    """A task's id: the first of `keys` that the row has, else its place in the file."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return f"{source}/{value}" if isinstance(value, int) else value
    return f"{source}/{index}"


def conversation(value: Json) -> str:
    """Returns what the user asks, of a text or of a list of `{role, content}`.

    Other messages are left out: an env has a system message of its own. Raises TaskError.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list):
        user_messages = [
            message
            for message in value
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        texts = [
            str(message["content"])
            for message in user_messages
            if isinstance(message.get("content"), str)
        ]
        if texts and len(texts) == len(user_messages) and all(map(str.strip, texts)):
            return "\n\n".join(texts)
    raise TaskError(
        f"the prompt is {str(value)[:100]!r}", "a text, or messages of which one is the user's"
    )
