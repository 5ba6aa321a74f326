"""What all dialects have in common: a conversation that asks for its next message, and the reply.

A message is compared with what the same agent sent before, so its digest leaves out what wanders
between two requests: item ids, `cache_control`, how a text is cut into parts, the order of keys and
the kind of numbers in a call's arguments (JavaScript writes 1.0 as 1), and thoughts, which many
agents send back once or never.

>>> one = Message(role="assistant", content="", tool_calls=(ToolCall("f", {"a": 1, "b": 2.0}),))
>>> two = Message(role="assistant", content="", tool_calls=(ToolCall("f", {"b": 2, "a": 1.0}),))
>>> chain([one], ()) == chain([two], ())
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import orjson

from prorl import exact_json
from prorl.errors import UserError
from prorl.types import FinishReason, Json, Message, ToolCall, ToolSpec

ROLES = {"system": "system", "developer": "system", "user": "user"}
"""Of OpenAI's messages that no model wrote, and what they are here."""
INVALID_CALL = "invalid_tool_call"
"""Name of a call of which not even the name can be read: the agent must see a call, since a text
would be its final answer.
"""


class RefusedError(UserError):
    """What a client asks and the door cannot express (HTTP 400)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None = None
    """May only lower the run's."""
    stream: bool = False
    wants_usage: bool = False
    """Of a stream of Chat Completions."""
    model: str = ""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Of tools that Responses groups, by their bare names."""
    custom: frozenset[str] = frozenset()
    """Tools of Responses that take text instead of arguments."""


class Reply(NamedTuple):
    number: int
    """Of the call in its attempt."""
    message: Message
    """Its calls have ids that no other call of the attempt has."""
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


# ---- reading what a client sent


def read_object(value: Json, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise RefusedError(f"{what} is {_kind(value)}", "a JSON object")
    return value


def read_list(value: Json, what: str) -> list[Json]:
    """A JSON list; null is an empty one. Raises RefusedError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RefusedError(f"{what} is {_kind(value)}", "a list")
    return value


def read_text(value: Json, what: str) -> str:
    """A string; null is an empty one. Raises RefusedError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RefusedError(f"{what} is {_kind(value)}", "a string")
    return value


def read_limit(body: Mapping[str, Json], *names: str) -> int | None:
    """The first of the named limits that is given. Raises RefusedError."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedError(f"{name} is {value!r}", "a whole number above 0")
        return value
    return None


def read_parts(content: Json, kinds: Sequence[str]) -> str:
    """The text of a content: a string, or parts of these kinds joined. Raises RefusedError."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in read_list(content, "content"):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = read_object(part, "a part of content").get("type")
        if kind not in kinds:
            raise RefusedError(f"a content part of type {kind!r}", " or ".join(kinds))
        texts.append(read_text(part.get("text", part.get("refusal")), f"{kind}.text"))
    return "".join(texts)


def read_call(name: Json, arguments: Json, call_id: Json) -> ToolCall:
    """A call as an agent sends it back; one that does not parse keeps its text."""
    text = arguments if isinstance(arguments, str) else exact_json.dumps(arguments).decode()
    try:
        value, error = exact_json.loads(text), ""
    except orjson.JSONDecodeError as cause:
        value, error = {}, str(cause)
    if not isinstance(value, dict):
        value, error = {}, "no object"
    return ToolCall(
        read_text(name, "the name of a call"),
        value,
        error,
        read_text(call_id, "the id of a call"),
        text,
    )


def read_tool(sent: Json, schema: str = "parameters") -> ToolSpec:
    """A function that the policy may call, whose schema has that name. Raises RefusedError."""
    tool = read_object(sent, "a tool")
    parameters = tool.get(schema)
    return ToolSpec(
        read_text(tool.get("name"), "a tool's name"),
        read_text(tool.get("description"), "a tool's description"),
        {} if parameters is None else read_object(parameters, "a tool's schema"),
    )


def refuse(body: Mapping[str, Json], unset: Mapping[str, Json]) -> None:
    """Raise RefusedError where a field asks for what this door does not do.

    `unset` says with which value each field asks for nothing. What the run decides (temperature,
    stop, tool_choice ...) is not read.
    """
    for name, nothing in unset.items():
        if body.get(name) not in (None, nothing):
            raise RefusedError(f"{name} is given", f"a request without {name}")


def _kind(value: Json) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


# ---- answering


def argument_text(call: ToolCall) -> str:
    """The arguments of a call of ours, as JSON text; what the policy wrote where they are none."""
    return call.text if call.error else exact_json.dumps(dict(call.arguments)).decode()


# ---- comparing an agent with itself


def chain(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[bytes]:
    """One digest per beginning of a conversation, from none of its messages to all.

    So "is the beginning of" is one comparison.
    """
    shown = exact_json.dumps([tool._asdict() for tool in tools], option=orjson.OPT_SORT_KEYS)
    digests = [blake2b(shown, digest_size=16).digest()]
    for message in messages:
        calls = [[call.id, call.name, canonical_arguments(call)] for call in message.tool_calls]
        said = orjson.dumps([message.role, message.content, message.call_id, calls])
        digests.append(blake2b(digests[-1] + said, digest_size=16).digest())
    return digests


def canonical_arguments(call: ToolCall) -> str:
    """The arguments of a call with sorted keys and numbers as doubles; else its text."""
    try:
        value = json.loads(exact_json.dumps(dict(call.arguments)), parse_int=float)
        return (
            call.text if call.error else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
        )
    except (TypeError, RecursionError):
        return call.text
