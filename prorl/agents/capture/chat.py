"""OpenAI's Chat Completions: `POST /v1/chat/completions`.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prorl import exact_json
from prorl.agents.capture.canonical import (
    ROLES,
    ConversationRequest,
    RefusedError,
    Reply,
    argument_text,
    read_call,
    read_limit,
    read_list,
    read_object,
    read_parts,
    read_role,
    read_text,
    read_tool,
    refuse,
)
from prorl.types import FinishReason, Json, Message, ToolCall

KEEP_ALIVE = b": keep-alive\n\n"
_REFUSED = {"n": 1, "logprobs": False, "audio": {}, "functions": [], "modalities": ["text"]}


def parse(body: dict[str, Json]) -> ConversationRequest:
    refuse(body, _REFUSED)
    messages = read_list(body.get("messages"), "messages")
    if not messages:
        raise RefusedError("messages is empty", "a conversation")
    tools = []
    for tool in read_list(body.get("tools"), "tools"):
        if (kind := read_object(tool, "a tool").get("type", "function")) != "function":
            raise RefusedError(f"a tool of type {kind!r:.40}", "tools of type function")
        tools.append(read_tool(tool.get("function")))
    options = body.get("stream_options") or {}
    return ConversationRequest(
        messages=tuple(_message(read_object(message, "a message")) for message in messages),
        tools=tuple(tools),
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stream=bool(body.get("stream")),
        wants_usage=bool(read_object(options, "stream_options").get("include_usage")),
        model=read_text(body.get("model"), "model"),
    )


def _message(sent: dict[str, Json]) -> Message:
    role, content = (
        sent.get("role"),
        read_parts(sent.get("content"), ("text", "refusal"), "image_url"),
    )
    if role == "assistant":
        return Message(
            role="assistant",
            content=content,
            tool_calls=tuple(
                _call(read_object(call, "a tool call"))
                for call in read_list(sent.get("tool_calls"), "tool_calls")
            ),
            reasoning=read_text(
                sent.get("reasoning_content") or sent.get("reasoning"), "reasoning_content"
            ),
        )
    if role == "tool":
        call_id = read_text(sent.get("tool_call_id"), "tool_call_id")
        return Message(role="tool", content=content, call_id=call_id)
    return Message(role=read_role(ROLES, role), content=content)


def _call(sent: dict[str, Json]) -> ToolCall:
    function = read_object(sent.get("function"), "tool_call.function")
    return read_call(function.get("name"), function.get("arguments") or "{}", sent.get("id"))


def answer(conversation: ConversationRequest, reply: Reply) -> Json:
    written = reply.message
    message: dict[str, Json] = {"role": "assistant", "content": written.content or None}
    if written.reasoning:
        message["reasoning_content"] = written.reasoning
    if written.tool_calls:
        message["tool_calls"] = list(map(_call_json, written.tool_calls))
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
    head = _head(conversation, reply, "chat.completion")
    return head | {"choices": [choice], "usage": _usage(reply)}


def events(conversation: ConversationRequest, reply: Reply) -> Iterator[bytes]:
    head, written = _head(conversation, reply, "chat.completion.chunk"), reply.message

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if written.reasoning:
        yield chunk({"reasoning_content": written.reasoning})
    if written.content:
        yield chunk({"content": written.content})
    for index, call in enumerate(written.tool_calls):
        yield chunk({"tool_calls": [{"index": index} | _call_json(call)]})
    yield chunk({}, _finish(reply))
    if conversation.wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def error(kind: str, message: str) -> Json:
    return {"error": {"message": message, "type": kind, "code": kind, "param": None}}


def failed(kind: str, message: str) -> bytes:
    return _event(error(kind, message))


def _event(data: Json) -> bytes:
    return b"data: " + exact_json.dumps(data) + b"\n\n"


def _head(conversation: ConversationRequest, reply: Reply, kind: str) -> dict[str, Json]:
    return {
        "id": f"chatcmpl-{reply.number}",
        "object": kind,
        "created": int(time.time()),
        "model": conversation.model,
    }


def _call_json(call: ToolCall) -> dict[str, Json]:
    function = {"name": call.name, "arguments": argument_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _finish(reply: Reply) -> str:
    if reply.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
