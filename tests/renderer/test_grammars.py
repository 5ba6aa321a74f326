"""Tests of the grammars of families: what is read of well-formed, broken and hostile text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.renderer import grammar
from prorl.renderer.family import FAMILIES, Family
from prorl.renderer.grammar import Grammar
from prorl.renderer.grammar.common import MAX_CALLS, coerce
from prorl.renderer.guard import split_thoughts
from prorl.types import Json, ToolSpec
from tests.growth import Repeated, is_quadratic

TOOLS = {
    "look": ToolSpec(
        "look",
        "",
        {
            "properties": {
                "word": {"type": "string"},
                "n": {"type": "integer"},
                "on": {"type": "boolean"},
                "items": {"type": "array"},
                "any": {},
                "both": {"type": ["string", "null"]},
            }
        },
    )
}
WELL_FORMED: list[tuple[Grammar, str, str, str]] = [
    (grammar.hermes, '<tool_call>\n{"name": "look", "arguments": {"word": "a", "n": 1}}\n</tool_call>', "", ""),
    (grammar.xml, "<tool_call>\n<function=look>\n<parameter=word>\na\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", "", ""),
    (grammar.invoke, '<minimax:tool_call>\n<invoke name="look">\n<parameter name="word">a</parameter>\n<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>', "", ""),
    (grammar.glm, "<tool_call>look\n<arg_key>word</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", ""),
    (grammar.deepseek, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"word": "a", "n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", ""),
    (grammar.deepseek, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"word": "a", "n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", ""),
    (grammar.bracket, '[TOOL_CALLS][{"name": "look", "arguments": {"word": "a", "n": 1}, "id": "abc123def"}]', "abc123def", ""),
    (grammar.bracket, '[TOOL_CALLS]look[CALL_ID]abc123def[ARGS]{"word": "a", "n": 1}', "abc123def", ""),
    (grammar.bracket, '[TOOL_CALLS]look[ARGS]{"word": "a", "n": 1}', "", ""),
    (grammar.listed, '<|tool_call|>[{"name": "look", "arguments": {"word": "a", "n": 1}}]', "", ""),
    (grammar.section, '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{"word": "a", "n": 1}<|tool_call_end|><|tool_calls_section_end|>', "functions.look:3", ""),
    (grammar.harmony, '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"word": "a", "n": 1}<|call|>', "", "hm"),
    (grammar.harmony, ' to=functions.look<|channel|>commentary<|message|>{"word": "a", "n": 1}<|call|>', "", ""),
    (grammar.bare_json, '{"name": "look", "parameters": {"word": "a", "n": 1}}', "", ""),
    (grammar.bare_json, '<|python_tag|>{"name": "look", "arguments": {"word": "a", "n": 1}}', "", ""),
    (grammar.gemma, '<|tool_call>call:look{n:1,word:<|"|>a<|"|>}<tool_call|><|tool_response>', "", ""),
]  # fmt: skip
BROKEN: list[tuple[Grammar, str, str]] = [
    (grammar.hermes, '<tool_call>{"name": "look", "argu', "not valid JSON"),
    (grammar.xml, "<tool_call>\nlook</tool_call>", "names no function"),
    (grammar.xml, "<tool_call><function=look><parameter=n>\nx\n</parameter></function></tool_call>", "n: expected integer"),
    (grammar.xml, "<tool_call><function=look><parameter=word>a</function></tool_call>", "is not closed"),
    (grammar.glm, "<tool_call></tool_call>", "a call is a name"),
    (grammar.deepseek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁call▁end｜>", "a name and arguments"),
    (grammar.bracket, "[TOOL_CALLS]look[ARGS]{", "not valid JSON"),
    (grammar.bracket, "[TOOL_CALLS]{}", "a JSON list"),
    (grammar.section, "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0", "an id and arguments"),
    (grammar.harmony, " to=functions.look<|channel|>commentary<|message|>[1]<|call|>", "a JSON object"),
    (grammar.bare_json, "<|python_tag|>{", "not valid JSON"),
    (grammar.gemma, '<|tool_call>call:look{word:<|"|>a<tool_call|>', "not closed"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "id", "reasoning"), WELL_FORMED)
def test_a_call_is_read(read: Grammar, text: str, id: str, reasoning: str) -> None:
    turn = read(text, TOOLS, True)
    (call,) = turn.calls
    assert (call.name, call.arguments, call.error, call.id) == (
        "look",
        {"word": "a", "n": 1},
        "",
        id,
    )
    assert (turn.content, turn.reasoning) == ("", reasoning)
    assert call.text


@pytest.mark.parametrize(("read", "text", "id", "reasoning"), WELL_FORMED)
def test_no_beginning_of_a_call_is_another_call(
    read: Grammar, text: str, id: str, reasoning: str
) -> None:
    """A turn may be cut off anywhere; what is left of a call must not run as one."""
    whole = read(text, TOOLS, True).calls[0].arguments
    for end in range(len(text)):
        calls = read(text[:end], TOOLS, False).calls
        assert all(call.error or call.arguments == whole for call in calls), text[:end]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=look><parameter=word>a</parameter><parameter=n>1</function></tool_call>",
        "<tool_call><function=look><parameter=word>a</parameter><parameter=n>1",
    ],
)
def test_an_unclosed_parameter_is_kept(text: str) -> None:
    """An edit without its new text deletes the old one."""
    (call,) = grammar.xml(text, TOOLS, True).calls
    assert "not closed" in call.error


@pytest.mark.parametrize(("read", "text", "error"), BROKEN)
def test_a_broken_call_says_what_is_wrong(read: Grammar, text: str, error: str) -> None:
    (call,) = read(text, TOOLS, True).calls
    assert error in call.error


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=25)
@given(data=st.data())
def test_nothing_raises(family: Family, data: st.DataObject) -> None:
    read = family.grammar
    pieces = [*family.markers, *family.stops, "look", "{", "}", '"', ":", ",", "[", "]", "1", "\n", "to=", "call:"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12)))
    turn = read(text, TOOLS, True)
    assert all(isinstance(call.name, str) for call in turn.calls)


def test_several_calls_and_text_beside_them() -> None:
    call_text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    turn = grammar.hermes(f"Let me see.\n{call_text}\n{call_text}", TOOLS, True)
    assert (turn.content, len(turn.calls)) == ("Let me see.", 2)


def test_an_answer_that_is_json_is_a_call_only_of_a_declared_tool() -> None:
    answer = '{"name": "Ada", "parameters": {"born": 1815}}'
    assert grammar.bare_json(answer, TOOLS, True).content == answer
    assert grammar.bare_json(answer, TOOLS, True).calls == ()


def test_what_harmony_says_aloud_is_content() -> None:
    text = (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>42<|return|>"
    )
    assert grammar.harmony(text, TOOLS, True).content == "I will look.\n42"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ("1", {"type": "integer"}, 1),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("none", {"type": ["string", "null"]}, "none"),
        ("1", {"anyOf": [{"type": "string"}, {"type": "object"}]}, "1"),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
        ("[1]", {}, [1]),
        ("a b", {}, "a b"),
        ("1", None, "1"),
        ("1e22", {"type": "number"}, 1e22),
    ],
)
def test_types_come_from_the_schema(text: str, schema: Json, value: Json) -> None:
    assert coerce(text, schema) == value
    assert type(coerce(text, schema)) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"), [("x", "integer"), ("true", "integer"), ("NaN", "number")]
)
def test_a_value_of_another_type_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"expected {kind}"):
        coerce(text, {"type": kind})


def test_a_call_in_a_thought_is_ignored_and_a_call_behind_an_unclosed_thought_counts() -> None:
    think = ("<think>", "</think>")
    call = "<tool_call>x</tool_call>"
    closed = split_thoughts(
        f"<think>a{call}</think>b", think, is_open=False, call_opener="<tool_call>"
    )
    assert closed == (f"a{call}", "b")
    unclosed = split_thoughts(f"<think>a{call}", think, is_open=False, call_opener="<tool_call>")
    assert unclosed == ("a", call)
    assert split_thoughts(f"<think>a{call}", think, is_open=False) == (f"a{call}", "")


PREFIXES = {
    "xml": "<tool_call>\n<function=look>\n",
    "invoke": '<minimax:tool_call>\n<invoke name="look">\n',
    "glm": "<tool_call>look\n",
    "gemma": "<|tool_call>call:look{",
    "hermes": '<tool_call>{"name": "look", "arguments": ',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n",
    "section": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3",
    "harmony": " to=functions.look<|channel|>commentary<|message|>",
    "bracket": "[TOOL_CALLS]",
    "listed": "<|tool_call|>[",
    "bare_json": '{"name": "look", "arguments": {',
    "plain": "",
}
NUM_CHARS = 200_000


def repeated(name: str) -> Iterator[Repeated]:
    """Yields what the grammar looks for, again and again, bare and in the middle of a call."""
    read = getattr(grammar, name)
    marks = {" ", "\n", "a", "1", "<", '"', "<parameter=", "<parameter name=", "<function="}
    samples = [(row[0], row[1]) for row in WELL_FORMED] + [(row[0], row[1]) for row in BROKEN]
    for reader, text in samples:
        if reader is read:
            marks |= {text, *re.findall(r"</?[^<>\s]*>|\[[A-Z_]*\]|```|[{}\[\]:,]|to=\S*", text)}
    ordered = sorted(marks)
    draw = random.Random(name)
    pairs = draw.sample([mark + other for mark in ordered for other in ordered], 8)
    fillers = [(mark, draw.choice(" \na<")) for mark in ordered]
    for prefix in ("", PREFIXES[name]):
        for mark in (*ordered, *pairs):
            yield Repeated(prefix, mark)
        for mark, filler in fillers:
            yield Repeated(prefix + mark, filler)


@pytest.mark.parametrize("name", PREFIXES)
def test_a_grammar_reads_anything_in_linear_time(name: str) -> None:
    """A text that a quadratic grammar reads for seconds: `str.find` at each letter, too."""

    def read(text: str) -> object:
        return getattr(grammar, name)(text, TOOLS, True)

    for text in repeated(name):
        assert not is_quadratic(read, text.of, NUM_CHARS), (text.before, text.unit)


@pytest.mark.parametrize("unit", ["<think></think>", "<think>", "</think>", "<think>a</think> "])
@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_are_split_in_linear_time(unit: str, is_open: bool) -> None:
    def split(text: str) -> object:
        markers = ("<think>", "</think>")
        return split_thoughts(text, markers, is_open=is_open, call_opener="<tool_call>")

    assert not is_quadratic(split, Repeated("", unit).of, NUM_CHARS)


@pytest.mark.parametrize("name", [name for name in PREFIXES if name not in ("plain", "bare_json")])
def test_a_turn_has_a_bounded_number_of_calls(name: str) -> None:
    text = next(text for reader, text, *_ in WELL_FORMED if reader is getattr(grammar, name))
    joint = "<|start|>assistant" if name == "harmony" else ""
    turn = getattr(grammar, name)(joint.join([text] * 1000), TOOLS, True)
    assert len(turn.calls) <= MAX_CALLS + 1
    if len(turn.calls) > 1:  # where a turn has one section of calls, the others are no calls
        assert "at most 256 calls" in turn.calls[-1].error
