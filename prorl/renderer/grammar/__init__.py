"""Parses the calls of families: one function each, from a turn's text to content and calls.

| grammar | families | a call |
|---|---|---|
| hermes | Qwen 2.5, Qwen 3, Granite 4, Hermes 3 | `<tool_call>\\n{"name": "python", "arguments": {"code": "6*7"}}\\n</tool_call>` |
| xml | Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 | `<tool_call>\\n<function=python>\\n<parameter=code>\\n6*7\\n</parameter>\\n</function>\\n</tool_call>` |
| invoke | MiniMax M2 | `<minimax:tool_call>\\n<invoke name="python">\\n<parameter name="code">6*7</parameter>\\n</invoke>...` |
| glm | GLM 4.5 and later | `<tool_call>python\\n<arg_key>code</arg_key>\\n<arg_value>6*7</arg_value>\\n</tool_call>` |
| deepseek | DeepSeek V3, R1, V3.1 | `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "6*7"}<｜tool▁call▁end｜>...` |
| bracket | Mistral | `[TOOL_CALLS]python[CALL_ID]a1b2c3d4e[ARGS]{"code": "6*7"}`, `[TOOL_CALLS][{"name": ...}]` |
| listed | Granite 3.3, Phi-4-mini | `<|tool_call|>[{"name": ...}]` |
| section | Kimi K2 | `<|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code": "6*7"}<|tool_call_end|>` |
| harmony | gpt-oss (openai/harmony) | `<|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "6*7"}<|call|>` |
| bare_json | Llama 3 | `{"name": "python", "parameters": {"code": "6*7"}}` |
| gemma | Gemma 4 | `<|tool_call>call:python{code:<|"|>6*7<|"|>}<tool_call|>` |
| plain | models without calls | |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from prorl import exact_json
from prorl.renderer.grammar.common import (
    CUT_OFF,
    MAX_CALLS,
    ParsedText,
    Tools,
    blocks,
    broken,
    clean,
    json_arguments,
    json_call,
    load,
    object_call,
    split_calls,
    strip_newline,
    too_many,
    typed_call,
)
from prorl.renderer.grammar.common import Grammar as Grammar
from prorl.renderer.guard import bare
from prorl.types import Json, ToolCall


def plain(text: str, tools: Tools, ended: bool) -> ParsedText:
    return ParsedText(clean(text))


_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="?([^"<>\n]*)"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_PARAMETER = (
    re.compile(r"<parameter=([^<>\n]*)>"),
    re.compile(r"</parameter>(?=\s*(?:<parameter=|\Z))"),
)
_INVOKE_PARAMETER = (
    re.compile(r'<parameter name="?([^"<>\n]*)"?>'),
    re.compile(r"</parameter>(?=\s*(?:<parameter name=|\Z))"),
)
"""The patterns that open a parameter, and close one: a closer that another may follow. Each is
looked up once in a call, since a lazy `.*?` from each opener to a closer that is not there takes
seconds of what a policy writes that repeats itself.
"""


def hermes(text: str, tools: Tools, ended: bool) -> ParsedText:
    """One JSON object in each block."""
    return blocks(text, "<tool_call>", "</tool_call>", ended, lambda block: [json_call(block)])


def xml(text: str, tools: Tools, ended: bool) -> ParsedText:
    """Functions in each block, mostly one; values framed by newlines."""
    return blocks(
        text,
        "<tool_call>",
        "</tool_call>",
        ended,
        lambda block: _functions(block, _FUNCTION, _PARAMETER, tools),
    )


def invoke(text: str, tools: Tools, ended: bool) -> ParsedText:
    """MiniMax: several functions in one block; values as they stand."""
    return blocks(
        text,
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        ended,
        lambda block: _functions(block, _INVOKE, _INVOKE_PARAMETER, tools),
    )


def _functions(
    block: str,
    function: re.Pattern[str],
    parameter: tuple[re.Pattern[str], re.Pattern[str]],
    tools: Tools,
) -> list[ToolCall]:
    framed, matches = function is _FUNCTION, list(islice(function.finditer(block), MAX_CALLS + 1))
    whole = bare(block)
    calls = []
    for match in matches[:MAX_CALLS]:
        text = whole if len(matches) == 1 else bare(match[0])
        pairs, rest = _parameters(match[2], *parameter)
        values = {key: strip_newline(value) if framed else value for key, value in pairs}
        if "<parameter" in rest or (not pairs and match[2].strip()):
            calls.append(broken("a parameter of the call is not closed", text, match[1]))
        else:
            calls.append(typed_call(match[1], values, text, tools))
    if len(matches) > MAX_CALLS:
        calls += too_many(matches[-1][0])
    return calls or [broken("the call names no function", whole)]


def _parameters(
    text: str, opener: re.Pattern[str], closer: re.Pattern[str]
) -> tuple[list[tuple[str, str]], str]:
    """Names and values of a call's parameters, and the text outside of them."""
    ends = [match.span() for match in closer.finditer(text)]
    pairs, rest, at, number = list[tuple[str, str]](), list[str](), 0, 0
    while (opened := opener.search(text, at)) is not None:
        while number < len(ends) and ends[number][0] < opened.end():
            number += 1
        if number == len(ends):
            break
        pairs.append((opened[1], text[opened.end() : ends[number][0]]))
        rest.append(text[at : opened.start()])
        at = ends[number][1]
    return pairs, "".join((*rest, text[at:]))


def glm(text: str, tools: Tools, ended: bool) -> ParsedText:
    """A name, then pairs of key and value."""
    return blocks(text, "<tool_call>", "</tool_call>", ended, lambda block: [_pairs(block, tools)])


def _pairs(block: str, tools: Tools) -> ToolCall:
    name, *pieces = block.split("<arg_key>")
    pairs = dict[str, str]()
    for piece in pieces:
        key, _, value = piece.partition("</arg_key>")
        value = value.lstrip()
        if value.startswith("<arg_value>"):
            pairs[key] = value.removeprefix("<arg_value>").partition("</arg_value>")[0]
    if not name.strip() or (pieces and not pairs):
        return broken("a call is a name, then pairs of key and value, not", bare(block), name)
    return typed_call(name, pairs, block, tools)


_PYTHON_TAG = "<|python_tag|>"


def deepseek(text: str, tools: Tools, ended: bool) -> ParsedText:
    """V3 and R1 fence the arguments as Markdown; V3.1 does not."""
    content, _, section = text.partition("<｜tool▁calls▁begin｜>")
    calls = []
    inside = section.partition("<｜tool▁calls▁end｜>")[0]
    pieces, more = split_calls(inside, "<｜tool▁call▁begin｜>")
    for call, is_cut in _pieces(pieces, "<｜tool▁call▁end｜>", ended or bool(more)):
        head, sep, body = call.partition("<｜tool▁sep｜>")
        name, fence, fenced = body.partition("```")
        name = name.strip()
        if is_cut:
            calls.append(broken(CUT_OFF, bare(call)))
        elif not sep:
            calls.append(broken("a call has a name and arguments, not", bare(call)))
        elif head.strip() == "function" and fence and name and "\n" not in name:
            text = fenced.removeprefix("json").strip().removesuffix("```")
            calls.append(json_arguments(name, text.strip()))
        else:
            calls.append(json_arguments(head, body))
    return ParsedText(clean(content), (*calls, *more))


def _pieces(pieces: list[str], closer: str, ended: bool) -> Iterator[tuple[str, bool]]:
    """Yields the text in each call, and whether the turn was cut off in it."""
    for number, piece in enumerate(pieces[1:], 2):
        inside, closed, _ = piece.partition(closer)
        yield inside, not (ended or closed) and number == len(pieces)


def section(text: str, tools: Tools, ended: bool) -> ParsedText:
    """Kimi K2: the id holds the name and must come back in the result."""
    content, _, inside = text.partition("<|tool_calls_section_begin|>")
    calls = []
    inside = inside.partition("<|tool_calls_section_end|>")[0]
    pieces, more = split_calls(inside, "<|tool_call_begin|>")
    for call, is_cut in _pieces(pieces, "<|tool_call_end|>", ended or bool(more)):
        id, sep, body = call.partition("<|tool_call_argument_begin|>")
        id = bare(id).strip()
        name = id.removeprefix("functions.").rpartition(":")[0] or id
        if sep or is_cut:
            calls.append(json_arguments(name, body, id, is_cut=is_cut))
        else:
            calls.append(broken("a call has an id and arguments, not", bare(call), name, id))
    return ParsedText(clean(content), (*calls, *more))


def bracket(text: str, tools: Tools, ended: bool) -> ParsedText:
    """Mistral: a JSON list (v3), or name, id and arguments (v11), or name and arguments (v13).

    Nothing closes a call but its JSON.
    """
    (content, *pieces), more = split_calls(text, "[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for number, piece in enumerate(pieces, 1):
        head, has_arguments, body = piece.partition("[ARGS]")
        name, _, id = head.partition("[CALL_ID]")
        is_cut = not (ended or more or body.strip()) and number == len(pieces)
        calls += (
            [json_arguments(name, body, id, is_cut=is_cut)] if has_arguments else _listed(piece)
        )
    return ParsedText(clean(content), (*calls, *more))


def listed(text: str, tools: Tools, ended: bool) -> ParsedText:
    """Granite 3.3 and Phi-4-mini: a marker and a JSON list."""
    (content, *pieces), more = split_calls(text, "<|tool_call|>")
    calls = [_listed(piece.partition("<|/tool_call|>")[0]) for piece in pieces]
    return ParsedText(clean(content), (*(call for several in calls for call in several), *more))


def _listed(text: str) -> list[ToolCall]:
    text = bare(text)
    try:
        value = load(text)
    except ValueError as cause:
        return [broken(f"the calls are not valid JSON ({cause})", text)]
    if not isinstance(value, list) or not value:
        return [broken("calls are a JSON list of objects, not", text)]
    if len(value) == 1:
        return [object_call(value[0], text)]
    calls = [object_call(item, exact_json.dumps(item).decode()) for item in value[:MAX_CALLS]]
    return calls if len(value) <= MAX_CALLS else [*calls, *too_many(text)]


def bare_json(text: str, tools: Tools, ended: bool) -> ParsedText:
    """Llama 3's calls: the whole turn is one object.

    It is a call only if it names a declared tool or `<|python_tag|>` says so.
    """
    tagged = text.lstrip().startswith(_PYTHON_TAG)
    body = text.replace(_PYTHON_TAG, "", 1).strip() if tagged else text.strip()
    if not body.startswith("{"):
        return ParsedText(clean(text))
    try:
        value = load(bare(body))
    except ValueError as cause:
        if not tagged:
            return ParsedText(clean(text))
        return ParsedText("", (broken(f"the call is not valid JSON ({cause})", bare(body)),))
    call = object_call(value, bare(body))
    return ParsedText("", (call,)) if tagged or call.name in tools else ParsedText(clean(text))


_ADDRESSEE = re.compile(r"\bto=(?:functions\.)?(\S+)")
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")


def harmony(text: str, tools: Tools, ended: bool) -> ParsedText:
    """A turn is several channel messages: `analysis` is thought, `commentary` without an addressee is
    said aloud, `final` is the answer. The addressee may stand before or after the channel. The
    generation prompt ends in `<|start|>assistant`, so the first message has no start of its own.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    pieces, more = split_calls(text, "<|start|>")
    for number, piece in enumerate(pieces, 1):
        head, has_body, body = piece.partition("<|message|>")
        if not has_body:
            content += [piece.removeprefix("assistant")] if piece.strip() != "assistant" else []
            continue
        body, *closed = _MESSAGE_END.split(body, maxsplit=1)
        is_cut = not (ended or closed or more) and number == len(pieces)
        head = head.replace("<|constrain|>", " ").replace("<|channel|>", " <|channel|>")
        to = _ADDRESSEE.search(head)
        channel = head.partition("<|channel|>")[2].split()[:1]
        if to and channel != ["analysis"]:
            calls.append(json_arguments(to[1], body, is_cut=is_cut))
        elif channel == ["analysis"]:
            reasoning.append(bare(body))
        else:
            content.append(body)
    return ParsedText(clean("\n".join(content)), (*calls, *more), "\n".join(reasoning))


_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:([^{\s]*)\s*(?=\{)")
_GEMMA_WORD = re.compile(r"[^,{}\[\]:]*")
_GEMMA_WORDS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


def gemma(text: str, tools: Tools, ended: bool) -> ParsedText:
    """One call in each block; the marker that asks for results ends the turn.

    Values are JSON with strings between `<|"|>` and bare keys, but for an object's inside a value,
    which are fenced like strings.
    """
    cleaned = text.replace("<|tool_response>", "")
    return blocks(
        cleaned, "<|tool_call>", "<tool_call|>", ended, lambda block: [_gemma_call(block)]
    )


def _gemma_call(block: str) -> ToolCall:
    head = _GEMMA_HEAD.match(block)
    if head is None:
        return broken("a call is call:name{...}, not", bare(block))
    try:
        value, end = _gemma_value(block, head.end(), 0)
    except ValueError as cause:
        return broken(str(cause), bare(block), head[1])
    if block[end:].strip() or not isinstance(value, dict):
        return broken("a call is call:name{...}, not", bare(block), head[1])
    return ToolCall(bare(head[1]), value, "", "", bare(block))


def _gemma_value(text: str, at: int, depth: int) -> tuple[Json, int]:
    """The value at a place, and the place behind it. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("the call nests too deeply")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise ValueError("a string is not closed")
        return bare(text[at + len(_QUOTE) : end]), end + len(_QUOTE)
    if text.startswith("{", at):
        return _gemma_object(text, at + 1, depth)
    if text.startswith("[", at):
        return _gemma_list(text, at + 1, depth)
    match = _GEMMA_WORD.match(text, at)
    assert match is not None
    return _gemma_word(match[0]), match.end()


def _gemma_object(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: dict[str, Json] = {}
    while not text.startswith("}", at):
        if text.startswith(_QUOTE, at):
            key, at = _gemma_value(text, at, depth)
        else:
            colon = text.find(":", at)
            if colon < 0:
                raise ValueError("a key has no value")
            key, at = bare(text[at:colon]), colon
        if not text.startswith(":", at):
            raise ValueError("a key has no value")
        values[str(key)], at = _gemma_value(text, at + 1, depth + 1)
        at = _gemma_next(text, at, "}")
    return values, at + 1


def _gemma_list(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: list[Json] = []
    while not text.startswith("]", at):
        value, at = _gemma_value(text, at, depth + 1)
        values.append(value)
        at = _gemma_next(text, at, "]")
    return values, at + 1


def _gemma_next(text: str, at: int, closer: str) -> int:
    if text.startswith(",", at):
        return at + 1
    if text.startswith(closer, at):
        return at
    raise ValueError(f"expected , or {closer}")


def _gemma_word(word: str) -> Json:
    word = bare(word).strip()
    if word in _GEMMA_WORDS:
        return _GEMMA_WORDS[word]
    try:
        return int(word)
    except ValueError:
        number = float(word)  # raises ValueError with the word in it
        if number - number != 0:
            raise ValueError(f"{word} is no number") from None
        return number
