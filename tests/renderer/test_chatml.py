"""The ChatML renderer: prompts only grow, content never becomes a marker, whatever was sampled
parses.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.errors import ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.schema.columns import _message_values
from prorl.tokenizer import SPECIALS, ByteTokenizer
from prorl.types import Message, ToolCall, ToolSpec

TOKENIZER = ByteTokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)
END = TOKENIZER.specials["<|im_end|>"]

contents = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(SPECIALS))).map("".join)
arguments = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.text(max_size=10), st.integers(-(2**31), 2**31), st.none()),
    max_size=3,
)
EMPTY = st.just("")
calls = st.builds(ToolCall, st.text(max_size=8), arguments, EMPTY, EMPTY, EMPTY)
assistants = st.builds(
    lambda content, calls, reasoning: Message(
        role="assistant",
        content=content.strip(),
        tool_calls=tuple(calls),
        reasoning=reasoning.strip("\n"),
    ),
    contents,
    st.lists(calls, max_size=3),
    contents,
)
tool_messages = st.lists(contents.map(lambda text: Message(role="tool", content=text)), max_size=3)
tools = st.lists(
    st.builds(ToolSpec, st.text(max_size=5), contents, st.just({"type": "object"})), max_size=2
)
ids = st.lists(
    st.one_of(st.integers(0, TOKENIZER.vocab_size - 1), st.integers(256, TOKENIZER.vocab_size - 1)),
    min_size=1,
    max_size=60,
)


def _array(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@settings(max_examples=50)
@given(contents, contents, tools, st.lists(st.tuples(ids, tool_messages), max_size=4))
def test_each_prompt_starts_with_the_earlier_prompt_and_completion(
    system: str, question: str, specs: list[ToolSpec], turns: list[tuple[list[int], list[Message]]]
) -> None:
    prompt = RENDERER.prompt(
        [Message(role="system", content=system), Message(role="user", content=question)], specs
    )
    for sampled, results in turns:
        completion = _array(sampled)
        grown = np.concatenate([prompt, completion, RENDERER.bridge(completion, results)])
        assert grown.dtype == np.int32
        np.testing.assert_array_equal(
            grown[: len(prompt) + len(completion)], np.concatenate([prompt, completion])
        )
        assert TOKENIZER.decode(grown).endswith("<|im_end|>\n<|im_start|>assistant\n")
        prompt = grown


@settings(max_examples=50)
@given(contents, tools, st.lists(st.tuples(assistants, tool_messages), max_size=3))
def test_growing_a_prompt_gives_what_rendering_the_whole_history_gives(
    question: str, specs: list[ToolSpec], turns: list[tuple[Message, list[Message]]]
) -> None:
    history = [Message(role="user", content=question)]
    prompt = RENDERER.prompt(history, specs)
    for assistant, results in turns:
        completion = RENDERER.completion(assistant)
        prompt = np.concatenate([prompt, completion, RENDERER.bridge(completion, results)])
        history += [assistant, *results]
    np.testing.assert_array_equal(prompt, RENDERER.prompt(history, specs))


@settings(max_examples=50)
@given(contents, contents)
def test_content_never_becomes_a_marker(system: str, content: str) -> None:
    blank = [
        Message(role="system", content="s"),
        Message(role="user", content=""),
        Message(role="tool", content=""),
    ]
    full = [
        Message(role="system", content=system or "s"),
        Message(role="user", content=content),
        Message(role="tool", content=content),
    ]
    expected, got = (
        prompt[prompt >= 256] for prompt in (RENDERER.prompt(blank, []), RENDERER.prompt(full, []))
    )
    np.testing.assert_array_equal(expected, got)


def without_texts(message: Message) -> Message:
    return replace(message, tool_calls=tuple(call._replace(text="") for call in message.tool_calls))


@given(assistants)
def test_parse_gives_back_what_completion_wrote(message: Message) -> None:
    assert without_texts(RENDERER.parse(RENDERER.completion(message))) == message


@given(ids)
def test_whatever_was_sampled_parses(sampled: list[int]) -> None:
    message = RENDERER.parse(_array(sampled))
    assert message.role == "assistant"
    assert all(call.error or call.name is not None for call in message.tool_calls)


def _parse(*parts: str | int) -> Message:
    chunks = [TOKENIZER.encode(part) if isinstance(part, str) else _array([part]) for part in parts]
    return RENDERER.parse(np.concatenate(chunks))


CALL, CALL_END = TOKENIZER.specials["<tool_call>"], TOKENIZER.specials["</tool_call>"]
THINK, THINK_END = TOKENIZER.specials["<think>"], TOKENIZER.specials["</think>"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "python", "arguments": {"code": ', "not valid JSON"),
        ('{"name": "python", "arguments": {"x": NaN}}', "not valid JSON"),
        ('{"name": "python"}', "a call is"),
        ('{"name": 1, "arguments": {}}', "a call is"),
        ('["python"]', "a call is"),
        ("", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 400 + "]" * 400 + "}}", "nests too deeply"),
        ("[" * 5000, "not valid JSON"),
    ],
)
def test_a_broken_call_carries_its_error(text: str, error: str) -> None:
    (call,) = _parse(CALL, text, CALL_END, END).tool_calls
    assert error in call.error


@pytest.mark.parametrize("depth", range(240, 256))
def test_a_call_that_is_accepted_fits_into_a_row(depth: int) -> None:
    """However deep a policy nests what it writes, no depth is read and cannot be stored."""
    text = '{"name": "a", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"
    message = _parse(CALL, text, CALL_END, END)
    assert _message_values(message)


def test_calls_in_thoughts_or_in_plain_text_are_no_calls() -> None:
    thought = _parse(
        THINK, CALL, '{"name": "a", "arguments": {}}', CALL_END, THINK_END, "done", END
    )
    assert thought.tool_calls == ()
    assert thought.content == "done"
    assert "<tool_call>" in thought.reasoning
    assert _parse('<tool_call>{"name": "a", "arguments": {}}</tool_call>', END).tool_calls == ()


def test_a_call_that_was_not_closed_still_counts() -> None:
    text = '{"name": "a", "arguments": {}}'
    assert _parse(CALL, text, END).tool_calls == (ToolCall("a", {}, text=text),)
    (cut,) = _parse(CALL, text).tool_calls
    assert "cut off" in cut.error, "nobody ended the turn: more might have followed"


def test_a_completion_that_was_cut_off_is_closed() -> None:
    text = TOKENIZER.decode(
        RENDERER.bridge(TOKENIZER.encode("cut"), [Message(role="tool", content="x")])
    )
    assert text.startswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
    )
    assert TOKENIZER.decode(RENDERER.bridge(_array([END]), [])) == "\n<|im_start|>assistant\n"


class _FewSpecials(ByteTokenizer):
    """A tokenizer as some models have it: the message markers are specials, the call tags are plain
    text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.specials = {text: self.specials[text] for text in ("<|im_start|>", "<|im_end|>")}


@given(st.lists(calls, max_size=3))
def test_tags_without_specials_are_read_as_text(expected_calls: list[ToolCall]) -> None:
    renderer = ChatMLRenderer(_FewSpecials())
    message = Message(role="assistant", content="Well.", tool_calls=tuple(expected_calls))
    spelled = any("tool_call>" in str(call) or "think>" in str(call) for call in expected_calls)
    assert spelled or without_texts(renderer.parse(renderer.completion(message))) == message
    assert renderer.stop_token_ids == (END,)


def test_a_tokenizer_without_message_markers_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.specials = {}
    with pytest.raises(ConfigError, match="im_start"):
        ChatMLRenderer(tokenizer)


class _CompactTokenizer(ByteTokenizer):
    compact_tools = True


def test_a_tokenizer_may_require_its_tools_on_a_single_line() -> None:
    tokenizer = _CompactTokenizer()
    tools = (
        ToolSpec(
            "python", "Runs code.", {"type": "object", "properties": {"code": {"type": "string"}}}
        ),
        ToolSpec("stop", "", {}),
    )
    ids = ChatMLRenderer(tokenizer).prompt(
        (Message(role="system", content="Be brief."), Message(role="user", content="6*7?")), tools
    )
    assert (
        tokenizer.decode(ids) == "<|im_start|>system\nBe brief.\ntools: python(code),"
        " stop()<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    )
