"""Anthropic's Messages: `POST /v1/messages`.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator

from prorl import exact_json
from prorl.agents.capture.canonical import (
    IMAGE,
    ConversationRequest,
    RefusedError,
    Reply,
    argument_object,
    argument_text,
    read_call,
    read_limit,
    read_list,
    read_object,
    read_parts,
    read_text,
    read_tool,
    refuse,
)
from prorl.types import FinishReason, Json, Message, ToolCall

KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'
_REFUSED = {"container": "", "mcp_servers": []}
_SIGNATURE = "c2lnbmF0dXJl"
"""The signature of thoughts: any will do, agents send it back unread."""


def parse(body: dict[str, Json]) -> ConversationRequest:
    refuse(body, _REFUSED)
    system = read_parts(body.get("system"), ("text",), "image")
    first = (Message(role="system", content=system),) if system else ()
    messages = [
        message
        for sent in read_list(body.get("messages"), "messages")
        for message in _messages(read_object(sent, "a message"))
    ]
    if not messages:
        raise RefusedError("messages is empty", "a conversation")
    sent = (read_object(tool, "a tool") for tool in read_list(body.get("tools"), "tools"))
    return ConversationRequest(
        messages=(*first, *messages),
        tools=tuple(  # those without a schema are hosted elsewhere
            read_tool(tool, "input_schema") for tool in sent if "input_schema" in tool
        ),
        max_tokens=read_limit(body, "max_tokens"),
        stream=bool(body.get("stream")),
        model=read_text(body.get("model"), "model"),
    )


def _messages(sent: dict[str, Json]) -> Iterator[Message]:
    """One message of theirs: results are messages of their own, before the text beside them."""
    role, content = sent.get("role"), sent.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedError(f"a message of role {role!r:.40}", "user, assistant, system")
    if not isinstance(content, list):
        yield Message(role=role, content=read_text(content, "content"))
        return
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    results = False
    for block in content:
        match read_object(block, "a content block").get("type"):
            case "text":
                texts.append(read_text(block.get("text"), "text"))
            case "image" if role == "user":
                texts.append(IMAGE)
            case "thinking" if role == "assistant":
                thoughts.append(read_text(block.get("thinking"), "thinking"))
            case "redacted_thinking" if role == "assistant":
                pass
            case "tool_use" if role == "assistant":
                calls.append(read_call(block.get("name"), block.get("input"), block.get("id")))
            case "tool_result" if role == "user":
                results = True
                yield Message(
                    role="tool",
                    content=read_parts(block.get("content"), ("text",), "image"),
                    call_id=read_text(block.get("tool_use_id"), "tool_use_id"),
                )
            case kind:
                expected = (
                    "text, thinking, tool_use"
                    if role == "assistant"
                    else "text, image, tool_result"
                )
                raise RefusedError(f"a block of type {kind!r:.40} of role {role}", expected)
    if texts or not results:
        yield Message(
            role=role, content="".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls)
        )


def answer(conversation: ConversationRequest, reply: Reply) -> Json:
    blocks = [
        block | {"input": argument_object(call)} if call else block
        for block, call in _blocks(reply)
    ]
    return _message(conversation, reply) | {"content": blocks}


def events(conversation: ConversationRequest, reply: Reply) -> Iterator[bytes]:
    message = _message(conversation, reply)
    usage = message["usage"] | {"output_tokens": 1}
    begun = message | {"content": [], "stop_reason": None, "usage": usage}
    yield _event("message_start", message=begun)
    for index, (block, call) in enumerate(_blocks(reply)):
        empty, deltas = block, list[dict[str, Json]]()
        if call:
            deltas = [{"type": "input_json_delta", "partial_json": argument_text(call)}]
        elif block["type"] == "thinking":
            empty = block | {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        else:
            empty = block | {"text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    stop = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=stop, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def error(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}


def failed(kind: str, message: str) -> bytes:
    return _event("error", error={"type": kind, "message": message})


def _event(kind: str, **fields: Json) -> bytes:
    data = exact_json.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _message(conversation: ConversationRequest, reply: Reply) -> dict[str, Json]:
    stop = "tool_use" if reply.message.tool_calls else "end_turn"
    return {
        "id": f"msg_{reply.number:08d}",
        "type": "message",
        "role": "assistant",
        "model": conversation.model,
        "stop_reason": "max_tokens" if reply.finish is FinishReason.LENGTH else stop,
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _blocks(reply: Reply) -> Iterator[tuple[dict[str, Json], ToolCall | None]]:
    written = reply.message
    if written.reasoning:
        yield {"type": "thinking", "thinking": written.reasoning, "signature": _SIGNATURE}, None
    if written.content:
        yield {"type": "text", "text": written.content}, None
    for call in written.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, call
