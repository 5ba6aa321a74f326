"""Helpers that the call grammars share: text with fenced markers in, content and calls out; nothing
raises.

A grammar reads text in which only real markers look like markers: what a model spelled letter by
letter is fenced (`prorl.renderer.guard`). What it takes out of the text it unfences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prorl import exact_json
from prorl.renderer.guard import bare
from prorl.types import Json, ToolCall, ToolSpec

_EXCERPT_CHARS = 200
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_PYTHON_WORDS: Mapping[str, Json] = {"True": True, "False": False, "None": None}


class ParsedText(NamedTuple):
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Tools = Mapping[str, ToolSpec]
Grammar = Callable[[str, Tools, bool], ParsedText]
"""(text of a turn without its thoughts, declared tools by name, whether the model ended the turn)
-> what it says. In a turn that was cut off a call that is not closed is broken: what is left of it
may read as another call.
"""
CUT_OFF = "the turn was cut off in this call"
MAX_CALLS = 256
"""The limit of the calls of one turn; what is behind them is one broken call. A policy that repeats
itself writes tens of thousands, each of which would be read, recorded and answered.
"""


def broken(error: str, text: str, name: str = "", id: str = "") -> ToolCall:
    """A call that cannot be carried out; the policy is told why."""
    return ToolCall(name, {}, f"{error}: {excerpt(text)}", id, text)


def excerpt(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "..."


def load(text: str) -> Json:
    """A JSON value. Raises ValueError, also for what nests too deeply to be written back."""
    value: Json = exact_json.loads(text)
    try:
        exact_json.dumps([[[[[[value]]]]]])  # room for the records that hold it
    except TypeError:
        raise ValueError("the call nests too deeply") from None
    return value


def json_arguments(name: str, text: str, id: str = "", *, is_cut: bool = False) -> ToolCall:
    """A call whose name stands elsewhere and whose arguments are a JSON object.

    `is_cut`: what is missing is not meant to be empty.
    """
    name, text, id = bare(name).strip(), bare(text), bare(id).strip()
    if is_cut:
        return broken(CUT_OFF, text, name, id)
    try:
        value = load(text or "{}")
    except ValueError as cause:
        return broken(f"the arguments are not valid JSON ({cause})", text, name, id)
    if not isinstance(value, dict):
        return broken("the arguments of a call are a JSON object, not", text, name, id)
    return ToolCall(name, value, "", id, text)


def json_call(text: str) -> ToolCall:
    """A call that is one JSON object with its name and arguments."""
    text = bare(text)
    try:
        value = load(text)
    except ValueError as cause:
        if "nests" in str(cause):
            return broken("the call nests too deeply", text)
        return broken(f"the call is not valid JSON ({cause})", text)
    return object_call(value, text)


def object_call(value: Json, text: str) -> ToolCall:
    """A call from a JSON value that should be an object with its name and arguments."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, dict):
            id = value.get("id")
            return ToolCall(value["name"], arguments, "", id if isinstance(id, str) else "", text)
    return broken('a call is {"name": "...", "arguments": {...}}, not', text)


def typed_call(name: str, values: Mapping[str, str], text: str, tools: Tools) -> ToolCall:
    """A call whose values are bare text: their types come from the tool's declared schema."""
    name, text = bare(name).strip(), bare(text)
    schema = tools[name].parameters if name in tools else {}
    stated = schema.get("properties")
    properties = stated if isinstance(stated, Mapping) else {}
    arguments: dict[str, Json] = {}
    for key, value in values.items():
        try:
            arguments[bare(key)] = coerce(bare(value), properties.get(bare(key)))
        except ValueError as cause:
            return broken(f"{bare(key)}: {cause}", text, name)
    return ToolCall(name, arguments, "", "", text)


def coerce(text: str, schema: Json) -> Json:
    """A value of the schema's type from bare text. Raises ValueError.

    >>> coerce("1", {"type": "string"}), coerce("1", {"type": "integer"}), coerce("x", None)
    ('1', 1, 'x')
    """
    types = _types(schema)
    if types == {"string"} or (not types and schema is None):
        return text
    try:
        value = _PYTHON_WORDS[text] if text in _PYTHON_WORDS else load(text)
    except ValueError:
        if not types or "string" in types:
            return text
        raise ValueError(f"expected {' or '.join(sorted(types))}, not") from None
    if not types or any(_is(value, name) for name in types - {"string"}):
        return value
    if "string" in types:
        return text
    raise ValueError(f"expected {' or '.join(sorted(types))}, not")


def _types(schema: Json) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    names_of_types = {name for name in names if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            names_of_types |= _types(option)
    return {name for name in names_of_types if name in _TYPES}


def _is(value: Json, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def split_calls(text: str, opener: str) -> tuple[list[str], tuple[ToolCall, ...]]:
    """Returns the text before the first opener and behind each, and a broken call for those that
    are too many to be read.
    """
    pieces = text.split(opener, MAX_CALLS + 1)
    if len(pieces) <= MAX_CALLS + 1:
        return pieces, ()
    return pieces[:-1], too_many(pieces[-1])


def too_many(rest: str) -> tuple[ToolCall, ...]:
    text = bare(rest[:_EXCERPT_CHARS])
    return (broken(f"a turn has at most {MAX_CALLS} calls, not this one", text),)


def blocks(
    text: str, opener: str, closer: str, ended: bool, read: Callable[[str], Sequence[ToolCall]]
) -> ParsedText:
    """The text outside of the blocks, and the calls in each.

    A block that nobody closed ends at the next opener or with the turn.
    """
    outside, more = split_calls(text, opener)
    rest, calls = [outside[0]], list[ToolCall]()
    for number, piece in enumerate(outside[1:], 2):
        inside, closed, after = piece.partition(closer)
        block_calls = read(inside)
        if not (ended or closed or more) and number == len(outside):
            last, text = block_calls[-1], bare(inside)
            error = f"{CUT_OFF}: {last.error or excerpt(text)}"
            block_calls = [ToolCall(last.name, {}, error, last.id, text)]
        calls += block_calls
        rest.append(after)
    return ParsedText(clean("".join(rest).replace(closer, "")), (*calls, *more))


def clean(text: str) -> str:
    return bare(text).strip()


def strip_newline(text: str) -> str:
    """Removes the one newline that frames a value at each end."""
    return text.removeprefix("\n").removesuffix("\n")
