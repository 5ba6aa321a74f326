"""Calls between tags: JSON, XML, or key and value tags.

JSON is Qwen 2.5/3, Granite 4 and Hermes; XML is Qwen3-Coder and 3.5+, Nemotron 3 and MiniMax; key
and value tags are GLM.

    hermes   <tool_call>\\n{"name": "python", "arguments": {"code": "6*7"}}\\n</tool_call>
    xml      <tool_call>\\n<function=python>\\n<parameter=code>\\n6*7\\n</parameter>\\n</function>\\n</tool_call>
    invoke   <minimax:tool_call>\\n<invoke name="python">\\n<parameter name="code">6*7</parameter>\\n</invoke>...
    glm      <tool_call>python\\n<arg_key>code</arg_key>\\n<arg_value>6*7</arg_value>\\n</tool_call>
"""

from __future__ import annotations

import re

from prorl.renderer.grammar.common import (
    Said,
    Tools,
    blocks,
    broken,
    json_call,
    strip_newline,
    typed_call,
)
from prorl.renderer.guard import bare
from prorl.types import ToolCall

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_INVOKE = re.compile(r'<invoke name="?([^">\n]*)"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_INVOKE_PARAMETER = re.compile(
    r'<parameter name="?([^">\n]*)"?>(.*?)</parameter>(?=\s*(?:<parameter name=|\Z))', re.DOTALL
)
_PAIR = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", re.DOTALL
)


def hermes(text: str, tools: Tools, ended: bool) -> Said:
    """One JSON object in each block."""
    return blocks(text, "<tool_call>", "</tool_call>", ended, lambda block: [json_call(block)])


def xml(text: str, tools: Tools, ended: bool) -> Said:
    """Functions in each block, mostly one; values framed by newlines."""
    return blocks(
        text,
        "<tool_call>",
        "</tool_call>",
        ended,
        lambda block: _functions(block, _FUNCTION, _PARAMETER, tools),
    )


def invoke(text: str, tools: Tools, ended: bool) -> Said:
    """MiniMax: several functions in one block; values as they stand."""
    return blocks(
        text,
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        ended,
        lambda block: _functions(block, _INVOKE, _INVOKE_PARAMETER, tools),
    )


def _functions(
    block: str, function: re.Pattern[str], parameter: re.Pattern[str], tools: Tools
) -> list[ToolCall]:
    framed = function is _FUNCTION
    calls = []
    for match in function.finditer(block):
        pairs = parameter.findall(match[2])
        values = {key: strip_newline(value) if framed else value for key, value in pairs}
        if "<parameter" in parameter.sub("", match[2]) or (not pairs and match[2].strip()):
            calls.append(broken("a parameter of the call is not closed", bare(block), match[1]))
        else:
            calls.append(typed_call(match[1], values, block, tools))
    return calls or [broken("the call names no function", bare(block))]


def glm(text: str, tools: Tools, ended: bool) -> Said:
    """A name, then pairs of key and value."""
    return blocks(text, "<tool_call>", "</tool_call>", ended, lambda block: [_pairs(block, tools)])


def _pairs(block: str, tools: Tools) -> ToolCall:
    name, key, tail = block.partition("<arg_key>")
    pairs = _PAIR.findall(key + tail)
    if not name.strip() or (key and not pairs):
        return broken("a call is a name, then pairs of key and value, not", bare(block), name)
    return typed_call(name, dict(pairs), block, tools)
