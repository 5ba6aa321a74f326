"""OpenAI's Responses: `POST /v1/responses`.

https://platform.openai.com/docs/api-reference/responses

A run of the model's own items (thoughts, text, calls) is one assistant message. A turn that was cut
off is `completed` when it holds a text or a call: codex ends at `incomplete`; the record knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

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
from prorl.agents.capture.chat import KEEP_ALIVE as KEEP_ALIVE
from prorl.agents.capture.chat import error as error
from prorl.types import FinishReason, Json, Message, ToolCall, ToolSpec

_REFUSED = {
    "previous_response_id": "",
    "conversation": "",
    "background": False,
    "top_logprobs": 0,
    "prompt": {},
}
_TEXTS = ("input_text", "output_text", "text", "refusal")
_IMAGE = "input_image"
_OWN = ("reasoning", "function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_TEXT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The schema of a tool that takes text."""


def parse(body: dict[str, Json]) -> ConversationRequest:
    refuse(body, _REFUSED)
    if "message.output_text.logprobs" in read_list(body.get("include"), "include"):
        raise RefusedError("include names logprobs", "a request without them")
    tools, namespaces, custom = _tools(read_list(body.get("tools"), "tools"))
    instructions = read_text(body.get("instructions"), "instructions")
    first = (Message(role="system", content=instructions),) if instructions else ()
    messages = (*first, *_messages(body.get("input")))
    if not messages:
        raise RefusedError("input is empty", "a conversation")
    return ConversationRequest(
        messages=messages,
        tools=tools,
        max_tokens=read_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        model=read_text(body.get("model"), "model"),
        namespaces=namespaces,
        custom=custom,
    )


def _tools(sent: list[Json]) -> tuple[tuple[ToolSpec, ...], dict[str, str], frozenset[str]]:
    """Tools, namespaces by bare names, names of those that take text; hosted ones are none."""
    tools, namespaces, custom = list[ToolSpec](), dict[str, str](), set[str]()
    for tool in sent:
        kind = read_object(tool, "a tool").get("type")
        if kind == "namespace":
            for inner in read_list(tool.get("tools"), "namespace.tools"):
                tools.append(read_tool(inner))
                namespaces[tools[-1].name] = read_text(tool.get("name"), "a namespace's name")
        elif kind == "custom":
            tools.append(read_tool(tool | {"parameters": _TEXT_SCHEMA}))
            custom.add(tools[-1].name)
        elif kind == "function":
            tools.append(read_tool(tool))
    return tuple(tools), namespaces, frozenset(custom)


def _messages(sent: Json) -> Iterator[Message]:
    if isinstance(sent, str):
        yield Message(role="user", content=sent)
        return
    own = list[dict[str, Json]]()
    for item in read_list(sent, "input"):
        kind = read_object(item, "an item").get("type", "message")
        if kind in _OWN or (kind == "message" and item.get("role") == "assistant"):
            own.append(item)
            continue
        if own:
            yield _assistant(own)
            own = []
        if kind in _RESULTS:
            call_id = read_text(item.get("call_id"), "call_id")
            yield Message(
                role="tool", content=read_parts(item.get("output"), _TEXTS, _IMAGE), call_id=call_id
            )
        elif kind == "message":
            role = read_role(ROLES, item.get("role"))
            yield Message(role=role, content=read_parts(item.get("content"), _TEXTS, _IMAGE))
        else:
            problem = f"an item of type {kind!r:.40}"
            raise RefusedError(problem, "messages, reasoning, calls and their outputs")
    if own:
        yield _assistant(own)


def _assistant(items: list[dict[str, Json]]) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for item in items:
        match item.get("type", "message"):
            case "message":
                texts.append(read_parts(item.get("content"), _TEXTS, _IMAGE))
            case "reasoning":
                thoughts.append(read_parts(item.get("content"), ("reasoning_text", "text"), _IMAGE))
            case "custom_tool_call":
                value = {"input": read_text(item.get("input"), "custom_tool_call.input")}
                calls.append(read_call(item.get("name"), value, item.get("call_id")))
            case _:
                arguments = item.get("arguments") or "{}"
                calls.append(read_call(item.get("name"), arguments, item.get("call_id")))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
    )


def answer(conversation: ConversationRequest, reply: Reply) -> Json:
    return _response(conversation, reply, _items(conversation, reply))


def _response(
    conversation: ConversationRequest, reply: Reply, output: list[dict[str, Json]]
) -> dict[str, Json]:
    cut = reply.finish is FinishReason.LENGTH and not any(
        item["type"] != "reasoning" for item in output
    )
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "model": conversation.model,
        "output": output,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "temperature": None,
        "top_p": None,
    }


def _items(conversation: ConversationRequest, reply: Reply) -> list[dict[str, Json]]:
    written, number = reply.message, reply.number
    items = list[dict[str, Json]]()
    if written.reasoning:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": written.reasoning}],
                "encrypted_content": None,
                "status": "completed",
            }
        )
    if written.content:
        items.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": written.content, "annotations": []}],
            }
        )
    return items + [
        _call(conversation, call, f"fc_{number}_{i}") for i, call in enumerate(written.tool_calls)
    ]


def _call(conversation: ConversationRequest, call: ToolCall, item_id: str) -> dict[str, Json]:
    head = {"id": item_id, "call_id": call.id, "name": call.name, "status": "completed"}
    if call.name in conversation.custom:
        value = call.text if call.error else call.arguments.get("input")
        return {
            "type": "custom_tool_call",
            **head,
            "input": value if isinstance(value, str) else "",
        }
    if space := conversation.namespaces.get(call.name):
        head["namespace"] = space
    return {"type": "function_call", **head, "arguments": argument_text(call)}


def events(conversation: ConversationRequest, reply: Reply) -> Iterator[bytes]:
    numbers, items = count(), _items(conversation, reply)
    response = _response(conversation, reply, items)
    begun = response | {"status": "in_progress", "output": [], "usage": None}

    def event(kind: str, **fields: Json) -> bytes:
        return _event({"type": kind, "sequence_number": next(numbers), **fields})

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(items):
        empty = item | {"status": "in_progress"}
        empty |= {
            name: type(item[name])() for name in ("content", "arguments", "input") if name in item
        }
        yield event("response.output_item.added", output_index=index, item=empty)
        at: dict[str, Json] = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "message":
                part, at = item["content"][0], at | {"content_index": 0}
                yield event("response.content_part.added", **at, part=part | {"text": ""})
                yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
                yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **at, part=part)
            case "reasoning":
                text, at = item["content"][0]["text"], at | {"content_index": 0}
                yield event("response.reasoning_text.delta", **at, delta=text)
                yield event("response.reasoning_text.done", **at, text=text)
            case "custom_tool_call":
                yield event("response.custom_tool_call_input.delta", **at, delta=item["input"])
                yield event("response.custom_tool_call_input.done", **at, input=item["input"])
            case _:
                text = item["arguments"]
                yield event("response.function_call_arguments.delta", **at, delta=text)
                yield event(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=text
                )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


def failed(kind: str, message: str) -> bytes:
    return _event({"type": "error", "code": kind, "message": message, "param": None})


def _event(data: dict[str, Json]) -> bytes:
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + exact_json.dumps(data) + b"\n\n"
