"""gpt-oss: a turn is several channel messages (openai/harmony).

    <|channel|>analysis<|message|>6 times 7 ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "6*7"}<|call|>
    <|start|>assistant<|channel|>final<|message|>42<|return|>

`analysis` is thought, `commentary` without an addressee is said aloud, `final` is the answer. The
addressee may stand before or after the channel. The generation prompt ends in `<|start|>assistant`,
so the first message has no start of its own.
"""

from __future__ import annotations

import re

from prorl.renderer.grammar.common import Said, Tools, clean, json_arguments
from prorl.renderer.guard import bare
from prorl.types import ToolCall

_TO = re.compile(r"\bto=(?:functions\.)?(\S+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")


def harmony(text: str, tools: Tools, ended: bool) -> Said:
    """Thoughts, calls and what is said, by channel."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    pieces = text.split("<|start|>")
    for number, piece in enumerate(pieces, 1):
        head, has_body, body = piece.partition("<|message|>")
        if not has_body:
            content += [piece.removeprefix("assistant")] if piece.strip() != "assistant" else []
            continue
        body, *closed = _END.split(body, maxsplit=1)
        is_cut = not (ended or closed) and number == len(pieces)
        head = head.replace("<|constrain|>", " ").replace("<|channel|>", " <|channel|>")
        to = _TO.search(head)
        channel = head.partition("<|channel|>")[2].split()[:1]
        if to and channel != ["analysis"]:
            calls.append(json_arguments(to[1], body, is_cut=is_cut))
        elif channel == ["analysis"]:
            reasoning.append(bare(body))
        else:
            content.append(body)
    return Said(clean("\n".join(content)), tuple(calls), "\n".join(reasoning))
