"""Settings of an env: a typed record, checked before the run exists.

    @dataclass(frozen=True, kw_only=True)
    class CapitalsSettings(PromptSettings):
        hints: Annotated[int, Meta(ge=0, le=3, description="facts told beforehand")] = 0

    class Capitals(BaseEnv):
        settings = CapitalsSettings
        ...
            hints = CapitalsSettings.of(task).hints

Fields have defaults and types that JSON has: text, numbers, `bool`, `Literal`, lists, mappings;
`msgspec.Meta` bounds and describes them. A ValueError of `__post_init__` is the user's mistake, in
its own words. Where settings come from: `prorl/env_settings.py`. A record is a dataclass, and not
a pydantic model, because helpers of users import this module: pydantic would cost each of them
11 MB and .1 s.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from prorl.env_settings import KEY, settings_of
from prorl.errors import TaskError
from prorl.types import Json, Task

NO_TOOLS = "none"
"""The value of the setting `tools` that offers none: the policy is offered no tool."""

MAX_PREVIEW_CHARS = 120
"""Characters of a refused value that an error shows."""


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """The record of an env that takes no settings; those of others derive from it."""

    @classmethod
    def of(cls, task: Task) -> Self:
        """The settings of a task. Raises TaskError."""
        settings = settings_of(task)
        return cls.read(settings, f"task {task.task_id!r}: data.{KEY}") if settings else cls()

    @classmethod
    def read(cls, values: Mapping[str, Json], where: str) -> Self:
        """The record of these values; `where` begins the error. Raises TaskError."""
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            near = difflib.get_close_matches(unknown[0], names, n=1)
            raise TaskError(
                f"{where}: unknown setting {unknown[0]!r}",
                ", ".join(names) or "no settings",
                f"did you mean {near[0]!r}?" if near else "",
            )
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise _wrong_value(cls, values, where, str(error)) from None


@dataclass(frozen=True, kw_only=True)
class PromptSettings(EnvSettings):
    """Settings that every env takes whose policy is prompted by us."""

    tools: Annotated[
        tuple[str, ...] | str | None,
        Meta(description="names of the tools that are offered instead of the env's own; or `none`"),
    ] = None
    system: Annotated[
        str | None, Meta(description="the system message instead of the env's own; empty: none")
    ] = None

    def __post_init__(self) -> None:
        names = self.tool_names or ()
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"`tools` = {self.tools!r}; expected different names of tools")

    @property
    def tool_names(self) -> tuple[str, ...] | None:
        """The names that `tools` holds; None where it is not set.

        >>> [PromptSettings(tools=value).tool_names for value in ("none", "bash,python", None)]
        [(), ('bash', 'python'), None]
        """
        return _names(self.tools) if isinstance(self.tools, str) else self.tools


def _names(text: str) -> tuple[str, ...]:
    return () if text == NO_TOOLS else tuple(name.strip() for name in text.split(","))


def named_tools(task: Task) -> tuple[str, ...]:
    """The names in the setting `tools` of a task, unchecked, whatever its env. Raises TaskError."""
    value = settings_of(task).get("tools")
    if not isinstance(value, str | list | None):
        return ()  # the env's own check says what is wrong
    return _names(value) if isinstance(value, str) else tuple(map(str, value or ()))


def record_of(env: object) -> type[EnvSettings]:
    """The record that an env declares. Raises TaskError for one that is none."""
    record: Json = getattr(env, "settings", EnvSettings)
    is_record = isinstance(record, type) and issubclass(record, EnvSettings)
    if is_record and "__dataclass_fields__" in vars(record):
        checked: type[EnvSettings] = record
        return checked
    raise TaskError(
        f"`settings` of env {getattr(env, 'name', env)!r} is {record!r}"[:300],
        "a class that derives from PromptSettings or EnvSettings of prorl.envs.settings",
        "write @dataclass(frozen=True, kw_only=True) above it",
    )


class SettingRow(NamedTuple):
    """A setting as documentation shows it."""

    name: str
    type: str
    default: str
    meaning: str


def rows_of(record: type[EnvSettings]) -> Iterator[SettingRow]:
    """The settings of a record, in the order of its fields."""
    annotations = get_type_hints(record, include_extras=True)
    for field in fields(record):
        annotation = annotations[field.name]
        default = "" if field.default is MISSING else field.default
        meanings = [meta.description or "" for meta in _metas(annotation)]
        yield SettingRow(
            field.name,
            in_words(annotation),
            "the env's own" if default is None else str(msgspec.json.encode(default), "utf-8"),
            " ".join(filter(None, meanings)),
        )


def _wrong_value(
    record: type[EnvSettings], values: Mapping[str, Json], where: str, problem: str
) -> TaskError:
    """Returns the error of the first value that is refused alone, else of the record as a whole."""
    annotations = get_type_hints(record, include_extras=True)
    for name, value in values.items():
        annotation = annotations[name]
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError:
            preview = repr(value)
            if len(preview) > MAX_PREVIEW_CHARS:
                preview = f"{preview[:MAX_PREVIEW_CHARS]}..."
            return TaskError(f"{where}: `{name}` = {preview}", in_words(annotation))
    return TaskError(f"{where}: {problem}")


_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "",
}
_BOUNDS: Mapping[str, Callable[[Any], str]] = {
    "ge": lambda value: f"{value} or more",
    "gt": lambda value: f"more than {value}",
    "le": lambda value: f"at most {value}",
    "lt": lambda value: f"less than {value}",
    "min_length": lambda value: f"at least {value} long",
    "max_length": lambda value: f"at most {value} long",
    "pattern": lambda value: f"which matches {value}",
}


def in_words(annotation: Any) -> str:
    """A type as an error or a page says it.

    >>> in_words(Annotated[int, Meta(ge=0, le=3)]), in_words(Literal["boxed", "any"])
    ('a whole number, 0 or more, at most 3', 'one of boxed, any')
    >>> in_words(tuple[str, ...] | str | None)
    'a list of texts or text'
    """
    if get_origin(annotation) is Annotated:
        bounds = [
            words(value)
            for meta in _metas(annotation)
            for name, words in _BOUNDS.items()
            if (value := getattr(meta, name)) is not None
        ]
        return ", ".join([in_words(get_args(annotation)[0]), *bounds])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(in_words, inner)))
    if (origin or annotation) in (list, tuple, set, frozenset):
        return "a list of texts" if inner[:1] == (str,) else "a list"
    if (origin or annotation) is dict or origin is Mapping:
        return "an object"
    return _WORDS.get(annotation, str(annotation))


def _metas(annotation: Any) -> list[Meta]:
    return [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, Meta)]
