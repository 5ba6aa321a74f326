"""Proves properties of a model when its renderer is made: per kind of turn, whether what `bridge`
appends is what the template itself would write.

For each case: the template's prompt of the next turn = its prompt of this turn + what the assistant
said + the bridge, text for text. Twenty renders of a few lines, a few milliseconds.

A model is refused where appending would be a guess: a user message that has no place behind an
answer, a marker of the template that the tokenizer does not know, ids of a rendered text that
differ from the tokenizer file's own. Tools are refused where the template does not show their
results.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from prorl.errors import ConfigError, UserError
from prorl.renderer.grammar import plain
from prorl.renderer.guard import bare
from prorl.renderer.model import Finding, Proof, TemplateRenderer, TurnKind, Verdict
from prorl.renderer.template import made_up_id, tool_values
from prorl.tokenizer import HFTokenizer
from prorl.types import Message, ToolCall, ToolSpec

TOOL = ToolSpec(
    "look",
    "Looks a zword up.",
    {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "what to look up"}},
        "required": ["word"],
    },
)
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,60}｜>|\[/?[A-Z]+(?:_[A-Z]+)+\]")


class Case(NamedTuple):
    kind: TurnKind
    past: tuple[Message, ...]
    new: tuple[Message, ...]


_THOUGHT = "zthought"
_SYSTEM = Message(role="system", content="zsystem")
_QUESTION = Message(role="user", content="zquestion")
_MORE = (Message(role="user", content="zmore"),)


def cases(*, thinks: bool, system: bool = True) -> tuple[Case, ...]:
    """Returns the cases to prove, with a thought in each turn or with none."""
    thoughts = _THOUGHT if thinks else ""
    start = (_SYSTEM, _QUESTION) if system else (_QUESTION,)
    answer = Message(role="assistant", content="zanswer", reasoning=thoughts)

    def call(first: int, count: int = 1, text: str = "") -> Message:
        numbers = range(first, first + count)
        calls = tuple(ToolCall("look", {"word": f"w{n}"}, id=made_up_id(n)) for n in numbers)
        return Message(role="assistant", content=text, tool_calls=calls, reasoning=thoughts)

    called = (*start, call(0), _result(0))
    return (
        Case(TurnKind.USER, (*start, answer), _MORE),
        Case(TurnKind.RESULT, (*start, call(0)), (_result(0),)),
        Case(TurnKind.RESULTS, (*start, call(0, 2)), (_result(0), _result(1))),
        Case(TurnKind.TEXT_AND_CALL, (*start, call(0, text="zsays")), (_result(0),)),
        Case(TurnKind.SECOND_CALL, (*called, call(1)), (_result(1),)),
        Case(TurnKind.USER_AFTER_CALL, (*called, answer), _MORE),
    )


def _result(number: int) -> Message:
    return Message(role="tool", content=f"zresult{number}", name="look", call_id=made_up_id(number))


def prove(renderer: TemplateRenderer) -> Proof:
    """Everything that is proved; raises nothing."""
    thinks = _thinks(renderer)
    values = renderer.family.dialect.messages((_SYSTEM, _QUESTION))
    takes_system = renderer.template.try_render(values, add_generation_prompt=True) is not None
    proved = cases(thinks=thinks, system=takes_system)
    return Proof(
        {case.kind: prove_case(renderer, case) for case in proved},
        thinks,
        _calls(renderer),
        _shows_tools(renderer),
        "" if takes_system else _no_system(renderer),
    )


def _no_system(renderer: TemplateRenderer) -> str:
    try:
        renderer.prompt_text((_SYSTEM, _QUESTION), ())
    except UserError as error:
        return error.problem
    return ""


def _thinks(renderer: TemplateRenderer) -> bool:
    """Returns whether a turn begins in a thought, or shows one that the prompt had not closed."""
    if renderer.opens_thoughts:
        return True
    answer = Message(role="assistant", content="zanswer", reasoning=_THOUGHT)
    values = renderer.family.dialect.messages((_QUESTION, answer))
    before = renderer.template.try_render(values[:1], add_generation_prompt=True)
    after = renderer.template.try_render(values)
    if before is None or after is None or not after.startswith(before):
        return False
    return _THOUGHT in after[len(before) :]


def _shows_tools(renderer: TemplateRenderer) -> bool:
    try:
        return TOOL.description in renderer.prompt_text((_QUESTION,), (TOOL,))
    except UserError:
        return False


def _calls(renderer: TemplateRenderer) -> str:
    """Empty where a call that the template writes is read back as the same."""
    call = ToolCall("look", {"word": "w0"}, id=made_up_id(0))
    message = Message(role="assistant", content="", tool_calls=(call,))
    if renderer.family.grammar is plain:
        return f"how family {renderer.family.name} writes calls is not known"
    if not renderer.family.shows_calls:
        return ""
    try:
        calls = renderer.parse(renderer.completion(message), None, (TOOL,)).tool_calls
    except UserError as error:
        return error.problem
    if [(c.name, dict(c.arguments)) for c in calls] != [("look", {"word": "w0"})]:
        return f"a call of family {renderer.family.name} is not read back as it was written"
    return ""


def prove_case(renderer: TemplateRenderer, case: Case) -> Finding:
    try:
        text = bare(renderer.prompt_text((*case.past, *case.new), (TOOL,)))
        before = bare(renderer.prompt_text(case.past[:-1], (TOOL,)))
        end, tail = renderer.tail(case.new)
    except UserError as error:
        return Finding(Verdict.REFUSES, error.problem)
    if not all(message.content in text for message in case.new):
        return Finding(Verdict.REFUSES)
    tail = bare(tail)
    if not text.endswith(tail):
        return Finding(Verdict.DIFFERS)
    appended = _appended(renderer, case, before, end, tail)
    if text == appended:
        return Finding(Verdict.EXACT)
    if appended is not None and _without_thoughts(renderer, text) == _without_thoughts(
        renderer, appended
    ):
        return Finding(Verdict.DROPS_THOUGHTS)
    return Finding(Verdict.REWRITES)


def _appended(
    renderer: TemplateRenderer, case: Case, before: str, end: str, tail: str
) -> str | None:
    """This turn's prompt, what the template writes for the turn, and the bridge."""
    values = renderer.family.dialect.messages(case.past)
    turn = renderer.tool_template.try_render(values, tool_values((TOOL,)))
    written = None if turn is None else renderer.written_turn(before, turn)
    if written is None:
        return None
    if renderer.family.next_role_stops:
        return before + written.rstrip("\n") + tail
    last = renderer.last_end(written)
    return before + (written[:last] if last else written + end) + tail


def _without_thoughts(renderer: TemplateRenderer, text: str) -> str:
    if renderer.family.thoughts is None:
        return text
    opener, closer = (re.escape(marker.rstrip()) for marker in renderer.family.thoughts)
    text = re.sub(rf"{opener}(?:(?!{opener}).)*?{closer}\s*", "", text, flags=re.DOTALL)
    return re.sub(rf"(?:{opener}|{closer})\s*", "", text)


def check(renderer: TemplateRenderer, where: str) -> Proof:
    """Prove a renderer and its tokenizer. Raises ConfigError with what is missing."""
    check_tokenizer(renderer, where)
    proof = prove(renderer)
    user = proof.findings[TurnKind.USER]
    if proof.tools and user.verdict in (Verdict.REFUSES, Verdict.DIFFERS):
        raise ConfigError(
            f"{where}: nothing shows what follows an answer ({user.why or user.verdict}) or a call"
            f" ({proof.tools})",
            "a template whose next prompt ends in the new message's own text",
            "take the model's own chat template, or register a renderer of your own",
        )
    return proof


def check_tokenizer(renderer: TemplateRenderer, where: str) -> None:
    """Raise ConfigError where the tokenizer is not the template's."""
    text = _all_cases(renderer)
    tokenizer = renderer.tokenizer
    foreign = sorted(set(_MARKER.findall(text)) - set(tokenizer.specials))
    if foreign:
        raise ConfigError(
            f"{where}: the template writes {foreign[0]}, which the tokenizer does not know",
            "tokenizer and chat template of one model",
            "fetch tokenizer.json and the chat template from the model's repository",
        )
    if isinstance(tokenizer, HFTokenizer) and not np.array_equal(
        renderer.encode(text), tokenizer.encode_whole(text)
    ):
        raise ConfigError(
            f"{where}: its tokenizer encodes text beside added tokens in a way of its own",
            "a tokenizer whose added tokens cut the text",
            "register a renderer of your own (entry point group prorl.renderers)",
        )


def _all_cases(renderer: TemplateRenderer) -> str:
    """Returns the text that the template writes of every case that it does not refuse."""
    conversations = [
        renderer.family.dialect.messages((*case.past, *case.new)) for case in cases(thinks=True)
    ]
    template = renderer.tool_template
    written = (
        template.try_render(conversation, add_generation_prompt=True)
        for conversation in conversations
    )
    return "".join(text or "" for text in written)
