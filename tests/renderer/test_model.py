"""`TemplateRenderer` on a small template of our own: what any machine can test."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.config.renderer import RendererSpec
from prorl.errors import ConfigError, TaskError
from prorl.renderer import describe, make_renderer
from prorl.renderer.model import TemplateRenderer, TurnKind, Verdict
from prorl.tokenizer import SPECIALS
from prorl.types import Json, Message, ToolCall
from tests.renderer.small_model import LOOK, TEMPLATE, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(directory: Path) -> TemplateRenderer:
    return _make(directory)


def _make(
    directory: Path, on_history_rewrite: Literal["append", "segment"] = "append", **variables: Json
) -> TemplateRenderer:
    spec = RendererSpec(
        model=str(directory), variables=variables, on_history_rewrite=on_history_rewrite
    )
    renderer = make_renderer(spec)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


QUESTION = (Message(role="system", content="Be brief."), Message(role="user", content="6*7?"))
CALL = Message(
    role="assistant",
    content="",
    reasoning="Let me see.",
    tool_calls=(ToolCall("look", {"word": "six", "n": 7}),),
)
RESULT = Message(role="tool", content="42", name="look")
MORE = Message(role="user", content="And 7*7?")


def test_the_first_prompt_is_the_templates_own(renderer: TemplateRenderer) -> None:
    text = renderer.tokenizer.decode(renderer.prompt(QUESTION, (LOOK,)))
    assert text == (
        "<|im_start|>system\nBe brief.\n\nTools, one a line:\n"
        '{"name": "look", "description": "Looks up.", "parameters": {"type": "object", "properties":'
        ' {"word": {"type": "string"}, "n": {"type": "integer"}}}}<|im_end|>\n'
        "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bridge_is_what_the_template_writes_behind_the_turn(renderer: TemplateRenderer) -> None:
    prompt, completion = renderer.prompt(QUESTION, ()), renderer.completion(CALL)
    results = (RESULT, Message(role="tool", content="seven", name="look"))
    grown = np.concatenate([prompt, completion, renderer.bridge(completion, results)])
    text = renderer.tokenizer.decode(grown)
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n"
        "<tool_response>\nseven\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(grown, renderer.prompt((*QUESTION, CALL, *results), ()))


def test_a_call_comes_back_from_what_the_template_writes_of_it(renderer: TemplateRenderer) -> None:
    message = renderer.parse(renderer.completion(CALL), None, (LOOK,))
    (call,) = message.tool_calls
    assert (call.name, call.arguments, call.error) == ("look", {"word": "six", "n": 7}, "")
    assert call.text.strip() == '{"name": "look", "arguments": {"word": "six", "n": 7}}'
    assert (message.reasoning, message.content) == ("Let me see.", "")


def test_a_turn_that_was_cut_off_is_ended_and_its_thought_closed(
    renderer: TemplateRenderer,
) -> None:
    ids = np.concatenate([_special(renderer, "<think>"), renderer.tokenizer.encode("\nhm")])
    text = renderer.tokenizer.decode(renderer.bridge(ids, (MORE,)))
    assert text.startswith("</think><|im_end|>\n<|im_start|>user\nAnd 7*7?")
    plain = renderer.tokenizer.decode(renderer.bridge(renderer.tokenizer.encode("hm"), (MORE,)))
    assert plain.startswith("<|im_end|>\n<|im_start|>user")


def _special(renderer: TemplateRenderer, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([renderer.tokenizer.specials[text]], dtype=np.int32)


texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(SPECIALS),
        st.sampled_from([special[:-3] for special in SPECIALS]),
        st.sampled_from([special[3:] for special in SPECIALS]),
        st.sampled_from(["\ufdd0", "\ufdd1", "\ufdd2"]),
    ),
    max_size=6,
).map("".join)


@given(texts, texts, texts)
def test_content_never_becomes_a_marker(
    renderer: TemplateRenderer, system: str, question: str, output: str
) -> None:
    def specials(system: str, question: str, output: str) -> list[int]:
        call = CALL.tool_calls[0]._replace(arguments={output: question})
        messages = (
            Message(role="system", content=system),
            Message(role="user", content=question),
            Message(role="assistant", content="c" + output, tool_calls=(call,), reasoning="r"),
            Message(role="tool", content=output, name=output),
        )
        spec = LOOK._replace(description=question, parameters={"type": "object", output: system})
        ids = renderer.prompt(messages, (spec,))
        bridge = renderer.bridge(_special(renderer, "<|im_end|>"), messages[3:])
        first = min(renderer.tokenizer.specials.values())
        return [int(i) for i in (*ids, *bridge) if first <= i]

    assert specials(system, question, output) == specials("s", "q", "o")


@given(st.lists(st.integers(0, 266), max_size=40))
def test_whatever_was_sampled_parses_and_is_bridged(
    renderer: TemplateRenderer, ids: list[int]
) -> None:
    sampled = np.array(ids, dtype=np.int32)
    assert renderer.parse(sampled, None, (LOOK,)).role == "assistant"
    end = renderer.tokenizer.decode(renderer.bridge(sampled, (RESULT,)))
    assert end.endswith("\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_the_proof_says_what_the_template_does_to_its_past(directory: Path) -> None:
    proof = _make(directory).proof
    assert proof is not None
    assert proof.thinks
    assert not proof.tools
    verdicts = {kind: finding.verdict for kind, finding in proof.findings.items()}
    assert {k for k, v in verdicts.items() if v is not Verdict.EXACT} == {
        TurnKind.USER,
        TurnKind.USER_AFTER_CALL,
    }
    assert verdicts[TurnKind.USER] is Verdict.DROPS_THOUGHTS
    silent = _make(directory, enable_thinking=False).proof
    assert silent is not None
    assert not silent.thinks
    assert silent.worst(*TurnKind) is Verdict.DROPS_THOUGHTS


def test_the_run_chooses_what_a_new_user_message_does(directory: Path) -> None:
    assert not _make(directory).starts_segment((MORE,))
    segmenting = _make(directory, on_history_rewrite="segment")
    assert segmenting.starts_segment((MORE,))
    assert not segmenting.starts_segment((RESULT,))


def test_a_thought_opened_by_the_prompt_is_read_as_a_thought(tmp_path: Path) -> None:
    template = TEMPLATE.replace(
        "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\n' }}",
        "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\n<think>\n' }}",
    )
    assert template != TEMPLATE
    renderer = _make(write_model(tmp_path, template))
    ids = np.concatenate(
        [
            renderer.tokenizer.encode("hm"),
            _special(renderer, "</think>"),
            renderer.tokenizer.encode("\n\n42"),
        ]
    )
    message = renderer.parse(ids, renderer.prompt(QUESTION, ()))
    assert (message.reasoning, message.content) == ("hm", "42")
    answer = renderer.parse(ids[3:], renderer.tokenizer.encode("x"))
    assert (answer.reasoning, answer.content) == ("", "42")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 +", "unexpected|expected"),
        ("", "no chat template"),
        ("{{ messages }}", "no known family"),
        ("<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}", "nothing shows"),
        (TEMPLATE.replace("<|im_end|>", "<|eot|>"), "end a turn|does not know|nothing shows"),
        (TEMPLATE + "<|im_start|><|other|>", "<|other|>, which the tokenizer does not know"),
    ],
)
def test_a_model_that_cannot_be_proved_is_refused(
    tmp_path: Path, template: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error.replace("<|other|>", r"<\|other\|>")):
        _make(write_model(tmp_path, template))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "small")
    (directory / "config.json").write_text('{"vocab_size": 200}')
    with pytest.raises(ConfigError, match="says vocab_size 200"):
        _make(directory)
    foreign = write_model(tmp_path / "foreign", specials=("<|im_start|>", "<s>"))
    with pytest.raises(ConfigError, match="which end a turn"):
        _make(foreign)


def test_a_variable_that_the_template_does_not_read_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'enable_thinking'"):
        _make(directory, enable_thinkin=False)


def test_tools_are_refused_where_the_template_shows_no_results(tmp_path: Path) -> None:
    template = TEMPLATE.replace("m.role == 'tool'", "m.role == 'nobody'")
    renderer = _make(write_model(tmp_path, template))
    assert len(renderer.prompt(QUESTION, ()))
    with pytest.raises(TaskError, match="a task with tools"):
        renderer.prompt(QUESTION, (LOOK,))


def test_tools_that_the_template_does_not_show_are_offered_on_request_only(tmp_path: Path) -> None:
    directory = write_model(tmp_path, TEMPLATE.replace("{%- if tools %}", "{%- if false %}"))
    with pytest.raises(TaskError, match="does not say what tools there are"):
        _make(directory).prompt(QUESTION, (LOOK,))
    permissive = make_renderer(RendererSpec(model=str(directory), allow_unrendered_tools=True))
    assert len(permissive.prompt(QUESTION, (LOOK,)))


def test_what_a_run_keeps_of_its_renderer(directory: Path, renderer: TemplateRenderer) -> None:
    facts = describe(renderer, RendererSpec(model=str(directory)))
    assert facts["family"] == "hermes"
    assert facts["template_sha256"] == renderer.template.sha256
    assert len(facts["tokenizer_sha256"]) == 64
    assert facts["proof"]["user"] == "drops thoughts"
