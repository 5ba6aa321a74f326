"""Gemma 4: `<|tool_call>call:python{code:<|"|>6*7<|"|>}<tool_call|>`.

Values are JSON with strings between `<|"|>` and bare keys, but for an object's inside a value,
which are fenced like strings.
"""

from __future__ import annotations

import re

from prorl.renderer.grammar.common import Said, Tools, blocks, broken
from prorl.renderer.guard import bare
from prorl.types import Json, ToolCall

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:([^{\s]*)\s*(?=\{)")
_WORD = re.compile(r"[^,{}\[\]:]*")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


def gemma(text: str, tools: Tools, ended: bool) -> Said:
    """One call in each block; the marker that asks for results ends the turn."""
    said = text.replace("<|tool_response>", "")
    return blocks(said, "<|tool_call>", "<tool_call|>", ended, lambda block: [_call(block)])


def _call(block: str) -> ToolCall:
    head = _HEAD.match(block)
    if head is None:
        return broken("a call is call:name{...}, not", bare(block))
    try:
        value, end = _value(block, head.end(), 0)
    except ValueError as cause:
        return broken(str(cause), bare(block), head[1])
    if block[end:].strip() or not isinstance(value, dict):
        return broken("a call is call:name{...}, not", bare(block), head[1])
    return ToolCall(bare(head[1]), value, "", "", bare(block))


def _value(text: str, at: int, depth: int) -> tuple[Json, int]:
    """The value at a place, and the place behind it. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("the call nests too deeply")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise ValueError("a string is not closed")
        return bare(text[at + len(_QUOTE) : end]), end + len(_QUOTE)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    match = _WORD.match(text, at)
    assert match is not None
    return _word(match[0]), match.end()


def _object(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: dict[str, Json] = {}
    while not text.startswith("}", at):
        if text.startswith(_QUOTE, at):
            key, at = _value(text, at, depth)
        else:
            colon = text.find(":", at)
            if colon < 0:
                raise ValueError("a key has no value")
            key, at = bare(text[at:colon]), colon
        if not text.startswith(":", at):
            raise ValueError("a key has no value")
        values[str(key)], at = _value(text, at + 1, depth + 1)
        at = _next(text, at, "}")
    return values, at + 1


def _list(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: list[Json] = []
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _next(text, at, "]")
    return values, at + 1


def _next(text: str, at: int, closer: str) -> int:
    if text.startswith(",", at):
        return at + 1
    if text.startswith(closer, at):
        return at
    raise ValueError(f"expected , or {closer}")


def _word(word: str) -> Json:
    word = bare(word).strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return int(word)
    except ValueError:
        number = float(word)  # raises ValueError with the word in it
        if number - number != 0:
            raise ValueError(f"{word} is no number") from None
        return number
