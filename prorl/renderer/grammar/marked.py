"""Calls between control tokens of a family's own; and Llama's, which have none.

DeepSeek, Kimi K2, Mistral, Granite 3.3 and Phi-4-mini have such tokens.

    deepseek   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "6*7"}<｜tool▁call▁end｜>...
    section    <|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code": "6*7"}<|tool_call_end|>
    bracket    [TOOL_CALLS]python[CALL_ID]a1b2c3d4e[ARGS]{"code": "6*7"}    [TOOL_CALLS][{"name": ...}]
    bare_json  {"name": "python", "parameters": {"code": "6*7"}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prorl.renderer.grammar.common import (
    CUT_OFF,
    Said,
    Tools,
    broken,
    clean,
    json_arguments,
    load,
    object_call,
)
from prorl.renderer.guard import bare
from prorl.types import ToolCall

_V3_BODY = re.compile(r"\s*([^\n`]+?)\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


def deepseek(text: str, tools: Tools, ended: bool) -> Said:
    """V3 and R1 fence the arguments as Markdown; V3.1 does not."""
    content, _, section = text.partition("<｜tool▁calls▁begin｜>")
    calls = []
    inside = section.partition("<｜tool▁calls▁end｜>")[0]
    for call, is_cut in _pieces(inside, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ended):
        head, sep, body = call.partition("<｜tool▁sep｜>")
        fenced = _V3_BODY.match(body) if head.strip() == "function" else None
        if is_cut:
            calls.append(broken(CUT_OFF, bare(call)))
        elif not sep:
            calls.append(broken("a call has a name and arguments, not", bare(call)))
        elif fenced:
            calls.append(json_arguments(fenced[1], fenced[2]))
        else:
            calls.append(json_arguments(head, body))
    return Said(clean(content), tuple(calls))


def _pieces(text: str, opener: str, closer: str, ended: bool) -> Iterator[tuple[str, bool]]:
    """What stands in each call, and whether the turn was cut off in it."""
    pieces = text.split(opener)[1:]
    for number, piece in enumerate(pieces, 1):
        inside, closed, _ = piece.partition(closer)
        yield inside, not (ended or closed) and number == len(pieces)


def section(text: str, tools: Tools, ended: bool) -> Said:
    """Kimi K2: the id holds the name and must come back in the result."""
    content, _, inside = text.partition("<|tool_calls_section_begin|>")
    calls = []
    inside = inside.partition("<|tool_calls_section_end|>")[0]
    for call, is_cut in _pieces(inside, "<|tool_call_begin|>", "<|tool_call_end|>", ended):
        id, sep, body = call.partition("<|tool_call_argument_begin|>")
        id = bare(id).strip()
        name = id.removeprefix("functions.").rpartition(":")[0] or id
        if sep or is_cut:
            calls.append(json_arguments(name, body, id, is_cut=is_cut))
        else:
            calls.append(broken("a call has an id and arguments, not", bare(call), name, id))
    return Said(clean(content), tuple(calls))


def bracket(text: str, tools: Tools, ended: bool) -> Said:
    """Mistral: a JSON list (v3), or name, id and arguments (v11), or name and arguments (v13).

    Nothing closes a call but its JSON.
    """
    content, *found = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for number, piece in enumerate(found, 1):
        head, has_arguments, body = piece.partition("[ARGS]")
        name, _, id = head.partition("[CALL_ID]")
        is_cut = not (ended or body.strip()) and number == len(found)
        calls += (
            [json_arguments(name, body, id, is_cut=is_cut)] if has_arguments else _listed(piece)
        )
    return Said(clean(content), tuple(calls))


def listed(text: str, tools: Tools, ended: bool) -> Said:
    """Granite 3.3 and Phi-4-mini: a marker and a JSON list."""
    content, *found = text.split("<|tool_call|>")
    calls = [_listed(piece.partition("<|/tool_call|>")[0]) for piece in found]
    return Said(clean(content), tuple(call for several in calls for call in several))


def _listed(text: str) -> list[ToolCall]:
    text = bare(text)
    try:
        value = load(text)
    except ValueError as cause:
        return [broken(f"the calls are not valid JSON ({cause})", text)]
    if not isinstance(value, list) or not value:
        return [broken("calls are a JSON list of objects, not", text)]
    return [object_call(item, text) for item in value]


def bare_json(text: str, tools: Tools, ended: bool) -> Said:
    """Llama 3's calls: the whole turn is one object.

    It is a call only if it names a declared tool or `<|python_tag|>` says so.
    """
    tagged = text.lstrip().startswith(_PYTHON_TAG)
    body = text.replace(_PYTHON_TAG, "", 1).strip() if tagged else text.strip()
    if not body.startswith("{"):
        return Said(clean(text))
    try:
        value = load(bare(body))
    except ValueError as cause:
        if not tagged:
            return Said(clean(text))
        return Said("", (broken(f"the call is not valid JSON ({cause})", bare(body)),))
    call = object_call(value, bare(body))
    return Said("", (call,)) if tagged or call.name in tools else Said(clean(text))
