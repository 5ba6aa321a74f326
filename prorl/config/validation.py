"""Turns a refusal of pydantic into one line in the words of this project."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from prorl.errors import ConfigError

_EXPECTED = {
    "missing": "a value: it is required",
    "extra_forbidden": "a known key",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "one of {expected}",
    "string_type": "text",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
    "finite_number": "a finite number",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "set_type": "a list",
    "path_type": "a path",
}
"""The value that was expected instead, by pydantic's type of error; fields are those of its
context.
"""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
}
"""The same for `int_type`, `int_parsing`, `int_from_float` and so on, by what comes first."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""A key that is none of a model's, or of a dataclass's."""

INPUT_CHARS = 200
"""Characters of a refused value that an error shows."""


def explain(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    """One clear line for the first thing that pydantic refused. With a did-you-mean for unknown
    keys. `where` names the file or body that `model` was read from.
    """
    first = error.errors()[0]
    path = dotted(first["loc"])
    if first["type"] in UNKNOWN:
        close = difflib.get_close_matches(str(first["loc"][-1]), _keys(model), n=1, cutoff=0.75)
        hint = f"did you mean `{close[0]}`?" if close else "see `prorl schema --config`"
        return ConfigError(f"{where}: unknown key `{path}`", "a known key", hint)
    return ConfigError(f"{where}: {describe_input(first)}", expected(first))


def differing(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Dotted names of the values in which two JSON objects differ.

    >>> list(differing({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}}))
    ['b.c']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from differing(ours.get(key), theirs.get(key), f"{at}.{key}" if at else key)
    elif ours != theirs:
        yield at


def dotted(place: tuple[Any, ...]) -> str:
    """`groups.0.n` for where pydantic found the mistake."""
    return ".".join(str(part) for part in place) or "(top level)"


def describe_input(error: Mapping[str, Any]) -> str:
    """The key and what stood there, cut where it is long."""
    path = dotted(error["loc"])
    if error["type"] == "missing":
        return f"no `{path}`"
    if error["type"] in UNKNOWN:
        return f"unknown key `{path}`"
    text = repr(error.get("input"))
    return f"`{path}` = {text if len(text) <= INPUT_CHARS else text[:INPUT_CHARS] + '...'}"


def expected(error: Mapping[str, Any]) -> str:
    """Returns what should stand there, without pydantic's words where we have better ones."""
    kind, context = error["type"], error.get("ctx", {})
    if error.get("input") != error.get("input"):  # NaN is neither less nor more than any bound
        return "a finite number"
    if kind in _EXPECTED:
        return _EXPECTED[kind].format(**context)
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    word = kind.split("_")[0]
    return _KINDS.get(word) or str(error["msg"]).lower()


def _keys(model: type[BaseModel]) -> list[str]:
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys.extend(_keys(info.annotation))
        elif is_dataclass(info.annotation):
            keys.extend(field.name for field in fields(info.annotation))
    return keys
