"""The parts that all dialects share: a conversation that asks for its next message, and the reply.

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
"""Roles of OpenAI's messages that no model wrote, and the roles that they have here."""
INVALID_CALL = "invalid_tool_call"
"""The name of a call whose own name cannot be read. The agent must see a call, since it would take
a text for its final answer.
"""


MAX_MESSAGES = 4096
"""A request has at most so many messages; agents send hundreds. The loop needs about 10 ms to take
so many over from a helper.
"""
MAX_TOOLS = 1024
"""A request offers at most so many tools; agents offer tens."""
MAX_TOOL_BYTES = 512 << 10
"""All tools of a request together have at most so many bytes; coding agents send 100 KB."""
MAX_VALUES = 250_000
"""The arguments of all calls of a request have at most so many values, counted by their commas and
opening brackets. So many take 25 ms of the loop.
"""
MAX_DEPTH = 64
"""A schema and a call's arguments nest at most so deep, because the code that renders them is
recursive.
"""


IMAGE = "[an image, which this policy does not see]"
"""The text that the policy reads in the place of an image; `image_placeholders` counts them."""


class RefusedError(UserError):
    """A client asks for something that the model endpoint cannot express (HTTP 400)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None = None
    """The limit that the client sets; it may only lower the run's."""
    stream: bool = False
    wants_usage: bool = False
    """True if a stream of Chat Completions ends with the counts of tokens."""
    model: str = ""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """The namespaces of tools that Responses groups, by the tools' bare names."""
    custom: frozenset[str] = frozenset()
    """Tools of Responses that take text instead of arguments."""


class Reply(NamedTuple):
    number: int
    """The place of the call among those of its attempt."""
    message: Message
    """Its calls have ids that no other call of the attempt has."""
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


# ---- reading what a client sent


def load_json(text: str | bytes) -> Json:
    r"""A JSON value. Raises ValueError.

    Half of a surrogate pair, which JavaScript writes where it cuts a string, is read as U+FFFD.

    >>> load_json(b'["a\\ud83d", "\\ud83d\\ude00"]') == ["a\ufffd", "\U0001f600"]
    True
    """
    try:
        return exact_json.loads(text)
    except orjson.JSONDecodeError as cause:
        if "surrogate" not in str(cause):
            raise
    try:
        return _whole(json.loads(text))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _whole(value: Json) -> Json:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def check_size(conversation: ConversationRequest) -> None:
    """Raise RefusedError for a request of more parts than a loop can take over at once."""
    if (size := len(conversation.messages)) > MAX_MESSAGES:
        raise RefusedError(f"{size:,} messages", f"at most {MAX_MESSAGES:,}")
    if (size := len(conversation.tools)) > MAX_TOOLS:
        raise RefusedError(f"{size:,} tools", f"at most {MAX_TOOLS:,}")
    size = sum(len(exact_json.dumps(tool._asdict())) for tool in conversation.tools)
    if size > MAX_TOOL_BYTES:
        raise RefusedError(f"tools of {size:,} bytes", f"at most {MAX_TOOL_BYTES:,}")
    texts = [call.text for message in conversation.messages for call in message.tool_calls]
    if (size := sum(map(_num_values, texts))) > MAX_VALUES:
        raise RefusedError(f"calls with {size:,} values", f"at most {MAX_VALUES:,}")


def _num_values(text: str) -> int:
    return sum(map(text.count, ",[{"))


def is_deep(value: Json, room: int = MAX_DEPTH) -> bool:
    """Returns whether a JSON value nests deeper than its readers can follow."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not room or any(is_deep(item, room - 1) for item in value))


def check_schema(schema: Json, place: str) -> None:
    """Raise RefusedError for a JSON schema that is none where renderer and grammars read it."""
    if isinstance(schema, bool):
        return
    named = read_object(schema, place)
    kind = named.get("type")
    if not isinstance(kind, str | list | None):
        raise RefusedError(f"type of {place} is {_kind(kind)}", "a string, or a list of strings")
    for name, inner in read_object(named.get("properties") or {}, f"{place}'s properties").items():
        check_schema(inner, f"{place}'s {name:.40}")
    for name in ("anyOf", "oneOf", "allOf"):
        for inner in read_list(named.get(name), f"{name} of {place}"):
            check_schema(inner, f"{name} of {place}")


def read_object(value: Json, place: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise RefusedError(f"{place} is {_kind(value)}", "a JSON object")
    return value


def read_list(value: Json, place: str) -> list[Json]:
    """A JSON list; null is an empty one. Raises RefusedError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RefusedError(f"{place} is {_kind(value)}", "a list")
    return value


def read_text(value: Json, place: str) -> str:
    """A string; null is an empty one. Raises RefusedError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RefusedError(f"{place} is {_kind(value)}", "a string")
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


def read_role(roles: Mapping[str, str], role: Json) -> str:
    """The role of a message that no model wrote. Raises RefusedError."""
    if not isinstance(role, str) or role not in roles:
        expected = ", ".join(dict.fromkeys((*roles, "assistant", "tool")))
        raise RefusedError(f"a message of role {role!r:.40}", expected)
    return roles[role]


def read_parts(content: Json, kinds: Sequence[str], image: str) -> str:
    """The text of a content: a string, or parts of these kinds joined. Raises RefusedError.

    A part of the kind `image` is read as IMAGE.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in read_list(content, "content"):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = read_object(part, "a part of content").get("type")
        if kind == image:
            texts.append(IMAGE)
            continue
        if kind not in kinds:
            raise RefusedError(f"a content part of type {kind!r:.40}", " or ".join((*kinds, image)))
        texts.append(read_text(part.get("text", part.get("refusal")), f"{kind}.text"))
    return "".join(texts)


def read_call(name: Json, arguments: Json, call_id: Json) -> ToolCall:
    """A call as an agent sends it back; one that does not parse keeps its text."""
    if is_deep(arguments):
        raise RefusedError(f"a call's arguments deeper than {MAX_DEPTH}", "flatter ones")
    text = arguments if isinstance(arguments, str) else exact_json.dumps(arguments).decode()
    try:
        value, error = load_json(text), ""
    except ValueError as cause:
        value, error = {}, str(cause)
    if is_deep(value):
        value, error = {}, f"it nests deeper than {MAX_DEPTH}"
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
    if parameters is not None:
        if is_deep(parameters):
            raise RefusedError(f"a tool's schema deeper than {MAX_DEPTH}", "a flatter one")
        check_schema(parameters, "a tool's schema")
    return ToolSpec(
        read_text(tool.get("name"), "a tool's name"),
        read_text(tool.get("description"), "a tool's description"),
        {} if parameters is None else read_object(parameters, "a tool's schema"),
    )


def refuse(body: Mapping[str, Json], unset: Mapping[str, Json]) -> None:
    """Raise RefusedError where a field asks for what this endpoint does not do.

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


def argument_object(call: ToolCall) -> Json:
    """The arguments of a call of ours as the object that some dialects want."""
    return {"__raw": call.text} if call.error else dict(call.arguments)


# ---- comparing an agent with itself


def chain(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[bytes]:
    """One digest per beginning of a conversation, from none of its messages to all.

    So "is the beginning of" is one comparison.
    """
    tools_json = exact_json.dumps([tool._asdict() for tool in tools], option=orjson.OPT_SORT_KEYS)
    digests = [blake2b(tools_json, digest_size=16).digest()]
    for message in messages:
        calls = [[call.id, call.name, canonical_arguments(call)] for call in message.tool_calls]
        text = orjson.dumps([message.role, message.content, message.call_id, calls])
        digests.append(blake2b(digests[-1] + text, digest_size=16).digest())
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
