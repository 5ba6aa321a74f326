"""Gemini's API: `POST /v1beta/models/NAME:generateContent` and `:streamGenerateContent`.

The method stands in the address, not in the body, so `Gemini` is two dialects: `WHOLE` and
`STREAM`. A stream is one of server-sent events, as every client asks for it (`alt=sse`).

https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prorl import exact_json
from prorl.agents.capture.canonical import (
    IMAGE,
    ConversationRequest,
    RefusedError,
    Reply,
    argument_object,
    is_deep,
    read_call,
    read_limit,
    read_list,
    read_object,
    read_text,
    read_tool,
    refuse,
)
from prorl.types import FinishReason, Json, Message, ToolCall, ToolSpec

_REFUSED = {"candidateCount": 1, "responseLogprobs": False, "responseModalities": ["TEXT"]}
_STATUS = {"invalid_request_error": (400, "INVALID_ARGUMENT")}
_STATUS |= {"rate_limit_error": (429, "RESOURCE_EXHAUSTED")}
_PARTS = "text, functionCall, functionResponse, images"


@dataclass(frozen=True, slots=True)
class Gemini:
    """Implements `prorl.agents.capture.reading.Dialect`."""

    stream: bool
    KEEP_ALIVE: bytes = b"\n"
    """Clients read blank lines between two events, and no comments."""

    def parse(self, body: dict[str, Json]) -> ConversationRequest:
        if "generateContentRequest" in body:  # a `:countTokens` may hold the request that it counts
            body = read_object(body["generateContentRequest"], "generateContentRequest")
        config = read_object(body.get("generationConfig") or {}, "generationConfig")
        refuse(config, _REFUSED)
        refuse(body, {"cachedContent": ""})
        system = _texts(body.get("systemInstruction"))
        first = (Message(role="system", content=system),) if system else ()
        contents = [
            message
            for content in read_list(body.get("contents"), "contents")
            for message in _messages(read_object(content, "a content"))
        ]
        if not contents:
            raise RefusedError("contents is empty", "a conversation")
        return ConversationRequest(
            messages=(*first, *contents),
            tools=tuple(_tools(read_list(body.get("tools"), "tools"))),
            max_tokens=read_limit(config, "maxOutputTokens"),
            stream=self.stream,
        )

    def answer(self, conversation: ConversationRequest, reply: Reply) -> Json:
        finish = "MAX_TOKENS" if reply.finish is FinishReason.LENGTH else "STOP"
        content = {"role": "model", "parts": list(_parts(reply.message))}
        return {
            "candidates": [{"content": content, "finishReason": finish, "index": 0}],
            "usageMetadata": {
                "promptTokenCount": reply.prompt_tokens,
                "cachedContentTokenCount": reply.cached_tokens,
                "candidatesTokenCount": reply.completion_tokens,
                "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
            },
            "modelVersion": conversation.model or "policy",
            "responseId": f"resp_{reply.number}",
        }

    def events(self, conversation: ConversationRequest, reply: Reply) -> Iterator[bytes]:
        yield b"data: " + exact_json.dumps(self.answer(conversation, reply)) + b"\n\n"

    def error(self, kind: str, message: str) -> Json:
        code, status = _STATUS.get(kind, (503, "UNAVAILABLE"))
        return {"error": {"code": code, "message": message, "status": status}}

    def failed(self, kind: str, message: str) -> bytes:
        """Clients look for an error where no event is."""
        return exact_json.dumps(self.error(kind, message))


WHOLE, STREAM = Gemini(stream=False), Gemini(stream=True)


def _texts(content: Json) -> str:
    """The text of a system instruction: a string, or a content of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = read_list(read_object(content, "systemInstruction").get("parts"), "parts")
    return "".join(
        read_text(read_object(part, "a part").get("text"), "systemInstruction.text")
        for part in parts
    )


def _messages(content: dict[str, Json]) -> Iterator[Message]:
    """Messages of one content: results are messages of their own, before the text beside them."""
    sender = content.get("role") or "user"
    if sender not in ("user", "model", "function"):
        raise RefusedError(f"a content of role {sender!r:.40}", "user, model, function")
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    has_results = False
    for item in read_list(content.get("parts"), "parts"):
        part = read_object(item, "a part")
        if "text" in part:
            (thoughts if part.get("thought") else texts).append(read_text(part["text"], "text"))
        elif "functionCall" in part and sender == "model":
            call = read_object(part["functionCall"], "a functionCall")
            calls.append(read_call(call.get("name"), call.get("args") or {}, call.get("id")))
        elif "functionResponse" in part and sender != "model":
            has_results = True
            yield _result(read_object(part["functionResponse"], "a functionResponse"))
        elif _is_image(part):
            texts.append(IMAGE)
        elif part.keys() - {"thought", "thoughtSignature"}:
            raise RefusedError(f"a part of {', '.join(part):.60} of role {sender}", _PARTS)
    if sender == "model":
        yield Message(
            role="assistant",
            content="".join(texts),
            reasoning="".join(thoughts),
            tool_calls=tuple(calls),
        )
    elif texts or not has_results:
        yield Message(role="user", content="".join(texts))


def _result(response: dict[str, Json]) -> Message:
    """A tool's result: the text of its only field `output` or `error`, else all of it as JSON."""
    value = read_object(response.get("response") or {}, "a response")
    text = next(iter(value.values())) if len(value) == 1 else None
    if not value.keys() <= {"output", "error"} or not isinstance(text, str):
        text = exact_json.dumps(value).decode()
    images = [
        _is_image(read_object(part, "a part"))
        for part in read_list(response.get("parts"), "functionResponse.parts")
    ]
    if not all(images):
        raise RefusedError("a functionResponse part of another kind", "images")
    return Message(
        role="tool",
        content=text + IMAGE * len(images),
        name=read_text(response.get("name"), "functionResponse.name"),
        call_id=read_text(response.get("id"), "functionResponse.id"),
    )


def _is_image(part: dict[str, Json]) -> bool:
    medium = part.get("inlineData") or part.get("fileData")
    if medium is None:
        return False
    kind = read_text(read_object(medium, "inlineData").get("mimeType"), "mimeType")
    return kind.startswith("image/")


def _tools(sent: list[Json]) -> Iterator[ToolSpec]:
    """Declared functions; tools that are hosted elsewhere are none."""
    for group in sent:
        declarations = read_object(group, "a tool").get("functionDeclarations")
        for item in read_list(declarations, "functionDeclarations"):
            tool = read_object(item, "a functionDeclaration")
            schema = tool.get("parametersJsonSchema")
            if schema is None and not is_deep(tool.get("parameters")):
                schema = _json_schema(tool.get("parameters"))
            yield read_tool(tool | {"parameters": schema or tool.get("parameters")})


def _json_schema(schema: Json) -> Json:
    """A schema of Gemini's own kind, whose types are in capitals, as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    lower = {"type": kind.lower()} if isinstance(kind, str) and kind.isupper() else {}
    return {name: _json_schema(value) for name, value in schema.items()} | lower


def _parts(message: Message) -> Iterator[Json]:
    if message.reasoning:
        yield {"text": message.reasoning, "thought": True}
    if message.content or not (message.tool_calls or message.reasoning):
        yield {"text": message.content}
    for call in message.tool_calls:
        yield {"functionCall": {"id": call.id, "name": call.name, "args": argument_object(call)}}
