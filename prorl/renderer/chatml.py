"""Messages <-> token ids in ChatML with Hermes tool calls, as Qwen 2.5 and 3 have it.

Invariants: ids that exist are never rendered again (`bridge` gives only what follows them); content
can never spell a marker, since `Tokenizer.encode` yields no specials; `parse` never raises,
whatever was sampled. It does not promise that `completion` gives the ids that a model sampled for
the same message: only the sampled ids are the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prorl import exact_json
from prorl.errors import ConfigError
from prorl.renderer.grammar import hermes
from prorl.renderer.guard import CompletionDecoder, split_thoughts
from prorl.types import Message, ToolSpec

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32


class _Tag(str):
    """A marker of the format: only this type becomes a special, equal text does not."""

    __slots__ = ()


_START, _END, _EOT = _Tag("<|im_start|>"), _Tag("<|im_end|>"), _Tag("<|endoftext|>")
_CALL, _CALL_END = _Tag("<tool_call>"), _Tag("</tool_call>")
_RESPONSE, _RESPONSE_END = _Tag("<tool_response>"), _Tag("</tool_response>")
_THINK, _THINK_END = _Tag("<think>"), _Tag("</think>")
_TAGS = (_CALL, _CALL_END, _THINK, _THINK_END)
NO_TOOLS: tuple[ToolSpec, ...] = ()


class ChatMLRenderer:
    """Implements `prorl.protocols.Renderer` over a tokenizer with `<|im_start|>` and `<|im_end|>`.

    Tools are described as Qwen's template does, or on one line, `tools: python(code)`, for a
    checkpoint whose tokenizer has `compact_tools`: a toy model has neither the context nor the
    training for more. A tag that the tokenizer has no special for (some lack `<tool_call>`) is
    written and read as plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [tag for tag in (_START, _END) if tag not in tokenizer.specials]
        if missing:
            raise ConfigError(
                f"the tokenizer lacks {' and '.join(missing)}",
                "a ChatML tokenizer",
                "use a ChatML model",
            )
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._end_id = tokenizer.specials[_END]
        self.stop_token_ids = tuple(
            tokenizer.specials[tag] for tag in (_END, _EOT) if tag in tokenizer.specials
        )
        self._speech = CompletionDecoder(tokenizer, _TAGS)
        self._compact_tools = bool(getattr(tokenizer, "compact_tools", False))
        self._assistant_L = self._ids(_START, "assistant\n")

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        rest = list(messages)
        system = rest.pop(0).content if rest and rest[0].role == "system" else ""
        chunks = []
        if tools:
            chunks.append(self._system(system, tools))
        elif system:
            chunks.append(self._ids(_START, "system\n" + system, _END, "\n"))
        return np.concatenate([*chunks, *self._messages(rest), self._assistant_L])

    def bridge(self, completion_ids: Int32, messages: Sequence[Message]) -> Int32:
        ended = len(completion_ids) > 0 and int(completion_ids[-1]) == self._end_id
        close = self._ids("\n") if ended else self._ids(_END, "\n")
        return np.concatenate([close, *self._messages(messages), self._assistant_L])

    def parse(
        self,
        completion_ids: Int32,
        prompt_ids: Int32 | None = None,
        tools: Sequence[ToolSpec] = NO_TOOLS,
    ) -> Message:
        ids = completion_ids
        while len(ids) and int(ids[-1]) in self.stop_token_ids:
            ids = ids[:-1]
        reasoning, text = split_thoughts(
            self._speech.text(ids), (_THINK, _THINK_END), is_open=False
        )
        parsed = hermes(text, {}, len(ids) < len(completion_ids))
        return Message(
            role="assistant", content=parsed.content, tool_calls=parsed.calls, reasoning=reasoning
        )

    def completion(self, message: Message) -> Int32:
        return self._ids(*self._assistant_parts(message), _END)

    def starts_segment(self, messages: Sequence[Message]) -> bool:
        """Never: this format drops nothing of its past."""
        return False

    def _ids(self, *parts: str) -> Int32:
        """Markers become specials; every other part is plain text."""
        return np.concatenate([self._part(part) for part in parts])

    def _part(self, part: str) -> Int32:
        special = self.tokenizer.specials.get(part) if isinstance(part, _Tag) else None
        return (
            self.tokenizer.encode(part) if special is None else np.array([special], dtype=np.int32)
        )

    def _system(self, system: str, tools: Sequence[ToolSpec]) -> Int32:
        if self._compact_tools:
            return self._ids(
                _START, f"system\n{system}\ntools: {', '.join(map(_signature, tools))}", _END, "\n"
            )
        specs = "\n".join(_tool_json(tool) for tool in tools)
        head = f"{system}\n\n" if system else ""
        return self._ids(
            _START,
            f"system\n{head}# Tools\n\nYou may call these functions; each line is one JSON"
            f" signature.\n<tools>\n{specs}\n</tools>\n\nTo call one, write a JSON object with its"
            " name and arguments between these tags:\n",
            _CALL,
            '\n{"name": <function name>, "arguments": <object of arguments>}\n',
            _CALL_END,
            _END,
            "\n",
        )

    def _messages(self, messages: Sequence[Message]) -> Iterator[Int32]:
        previous = ""
        for index, message in enumerate(messages):
            if message.role == "tool":
                last = index + 1 == len(messages) or messages[index + 1].role != "tool"
                yield self._tool_response(message.content, first=previous != "tool", last=last)
            elif message.role == "assistant":
                yield np.concatenate([self._assistant_L, self.completion(message), self._ids("\n")])
            else:
                yield self._ids(_START, f"{message.role}\n{message.content}", _END, "\n")
            previous = message.role

    def _tool_response(self, content: str, *, first: bool, last: bool) -> Int32:
        head = (_START, "user\n", _RESPONSE) if first else ("\n", _RESPONSE)
        tail = (_RESPONSE_END, _END, "\n") if last else (_RESPONSE_END,)
        return self._ids(*head, f"\n{content}\n", *tail)

    def _assistant_parts(self, message: Message) -> Iterator[str]:
        if message.reasoning:
            yield from (_THINK, f"\n{message.reasoning}\n", _THINK_END, "\n\n")
        if message.content:
            yield message.content
        for index, call in enumerate(message.tool_calls):
            if index or message.content:
                yield "\n"
            call_json = exact_json.dumps(
                {"name": call.name, "arguments": dict(call.arguments)}
            ).decode()
            yield from (_CALL, f"\n{call_json}\n", _CALL_END)


def _signature(tool: ToolSpec) -> str:
    return f"{tool.name}({', '.join(tool.parameters.get('properties', ()))})"


def _tool_json(tool: ToolSpec) -> str:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return exact_json.dumps({"type": "function", "function": function}).decode()
