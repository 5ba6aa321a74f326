"""`TemplateRenderer`: messages <-> ids as a checkpoint's own chat template has it.

    prompt   the template, executed: the official ids, whatever the family
    bridge   what the template writes behind a dummy turn: [user, dummy, new messages], cut behind
             the dummy's stop token
    parse    the family's grammar

Invariants: ids that exist are never rendered again (`bridge` gives only what follows them); content
can never spell a marker (`prorl.renderer.guard`); `parse` never raises, whatever was sampled.
Whether a bridge equals the template's own next prompt is proved per kind of turn when the renderer
is made (`prorl.renderer.proof`). It does not promise that `completion` gives the ids that a model
sampled for the same message: only the sampled ids are the truth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.errors import ConfigError, TaskError
from prorl.renderer.family import Family
from prorl.renderer.guard import MARK, OPEN, CompletionDecoder, Guard, split_thoughts
from prorl.renderer.template import ChatTemplate, TemplateFault, made_up_id, tool_values
from prorl.types import Json, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32

_USER = Message(role="user", content="u")
_PROMPT_END = 8
"""Ids at a prompt's end that say whether a thought is open."""
NO_TOOLS: tuple[ToolSpec, ...] = ()
SEGMENT = "segment"
"""`RendererSpec.on_history_rewrite` that starts a new segment."""


class Verdict(StrEnum):
    """The relation of the template's next prompt to what we append, from best to worst."""

    EXACT = "exact"
    """The template writes the same."""
    DROPS_THOUGHTS = "drops thoughts"
    """It writes the same tail, and takes earlier thoughts out of the past, or empty ones."""
    REWRITES = "rewrites"
    """It writes the same tail, and changes the past in another way."""
    DIFFERS = "differs"
    """Its next prompt does not even end in what we append."""
    REFUSES = "refuses"
    """It raises, or leaves the new messages out."""


class TurnKind(StrEnum):
    USER = "user"
    """A user message after an answer."""
    RESULT = "result"
    """A result after a call."""
    RESULTS = "results"
    """Two results after two calls."""
    TEXT_AND_CALL = "text and call"
    """A result after a call that something was said before."""
    SECOND_CALL = "second call"
    """A result after a second call."""
    USER_AFTER_CALL = "user after call"
    """A user message after a call, its result and an answer."""


class Finding(NamedTuple):
    verdict: Verdict
    why: str = ""


class Proof(NamedTuple):
    findings: dict[TurnKind, Finding]
    thinks: bool
    """Its turns hold thoughts, in this run's mode."""
    calls: str
    """Empty where a call comes back from what the template writes of it; else what is wrong."""
    shows_tools: bool
    """A first prompt says what tools there are; else the env's own messages have to."""
    no_system: str = ""
    """The reason why a first prompt cannot begin with a system message; empty where it can."""

    @property
    def tools(self) -> str:
        """Empty where tools can be offered, else why not."""
        result = self.findings[TurnKind.RESULT]
        if result.verdict is Verdict.REFUSES:
            return result.why or "the template does not show results of tools"
        if result.verdict is Verdict.DIFFERS:
            return "nothing shows how a result follows a call"
        return self.calls

    def worst(self, *kinds: TurnKind) -> Verdict:
        return max((self.findings[kind].verdict for kind in kinds), key=list(Verdict).index)

    def summary(self) -> tuple[str, str]:
        """Returns how such a model is run, and why.

        `exact`, `append or segment`, `segment` at user messages, or `no tools`.
        """
        if self.tools:
            return "no tools", self.tools
        verdict = self.worst(TurnKind.USER, TurnKind.USER_AFTER_CALL)
        others = ", ".join(
            f"{kind}: {finding.verdict}"
            for kind, finding in self.findings.items()
            if finding.verdict is not Verdict.EXACT
        )
        if verdict is Verdict.EXACT:
            return "exact", others
        return ("append or segment" if verdict is Verdict.DROPS_THOUGHTS else "segment"), others


class TemplateRenderer:
    """Implements `prorl.protocols.Renderer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        family: Family,
        *,
        tool_template: ChatTemplate | None = None,
        stop_ids: Sequence[int] = (),
        on_history_rewrite: str = "append",
        allow_unrendered_tools: bool = False,
    ) -> None:
        self.tokenizer, self.template, self.family = tokenizer, template, family
        self.tool_template = tool_template or template
        self.vocab_size = tokenizer.vocab_size
        self.proof: Proof | None = None
        self._on_rewrite, self._unshown_tools = on_history_rewrite, allow_unrendered_tools
        self.stop_token_ids = tuple(dict.fromkeys([*_stop_ids(tokenizer, family), *stop_ids]))
        self._guard = Guard(tokenizer)
        self._speech = CompletionDecoder(tokenizer, (*family.markers, *(family.thoughts or ())))
        ends = (*family.stops, *family.closers)
        self.ends = re.compile(f"(?<!{OPEN})(?:{'|'.join(map(re.escape, ends))})")
        self._end_ids = {
            text: tokenizer.specials[text] for text in ends if text in tokenizer.specials
        }
        self.opens_thoughts = self._is_open(self.prompt([_USER], ()))

    # ---- messages to ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        """Ids of a first prompt, ending where the assistant starts to speak.

        Raises TaskError where the template refuses such a conversation.
        """
        return self._guard.encode(self.prompt_text(messages, tools))

    def encode(self, text: str) -> Int32:
        """Ids of rendered text: added tokens are recognised but where they are fenced."""
        return self._guard.encode(text)

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The prompt as text, with fences. Raises TaskError."""
        if tools and (problem := self._tool_problem()):
            raise TaskError(
                f"a task with tools for {self.template.where}: {problem[0]}", *problem[1:]
            )
        template = self.tool_template if tools else self.template
        values = self._guard.fence(self.family.dialect.messages(messages))
        fenced_tools = self._guard.fence(tool_values(tools)) or None
        return self._rendered(template, "the prompt", values, fenced_tools)

    def _rendered(
        self, template: ChatTemplate, label: str, values: Json, tools: Json | None
    ) -> str:
        """A text that ends where the assistant starts. Raises TaskError where that is refused."""
        try:
            return template.render(values, tools, add_generation_prompt=True)
        except TemplateFault as fault:
            raise TaskError(
                f"{template.where} refuses {label}: {fault}",
                f"messages that family {self.family.name} can hold",
            ) from fault

    def bridge(self, completion_ids: Int32, messages: Sequence[Message]) -> Int32:
        """Ids to append after a completion: the new messages, then the assistant's start.

        Before them the completion's end, if it was cut off. Raises TaskError where the template
        refuses such messages.
        """
        end, tail = self.tail(messages)
        tail_ids = self._guard.encode(tail)
        end_id = self._end_ids[end]
        last = int(completion_ids[-1]) if len(completion_ids) else -1
        if self.family.next_role_stops:
            return tail_ids[1:] if last == end_id else tail_ids
        if last == end_id or (self.family.any_end_closes and last in self._end_ids.values()):
            return tail_ids
        parts = [np.array([end_id], dtype=np.int32), tail_ids]
        if last not in self.stop_token_ids and self._ends_in_thought(completion_ids):
            assert self.family.thoughts is not None
            parts.insert(0, self._guard.encode(self.family.thoughts[1]))
        return np.concatenate(parts)

    def _tool_problem(self) -> tuple[str, str, str] | None:
        """Returns why tools cannot be offered, what was expected, how to mend it."""
        if self.proof is None:
            return None
        if self.proof.tools:
            expected = "a model whose template shows calls and results"
            return self.proof.tools, expected, "use another model, or an env without tools"
        if not self.proof.shows_tools and not self._unshown_tools:
            mend = "describe them in the env's messages and set renderer.allow_unrendered_tools"
            return (
                "its template does not say what tools there are",
                "a template that shows tools",
                mend,
            )
        return None

    def tail(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The token that ends the turn before new messages, and the text behind it.

        Where the next role's token is the end, the text has it, too. Raises TaskError.
        """
        values = self.family.dialect.messages([_USER, self._dummy(messages), *messages])
        fenced = [*values[:2], *self._guard.fence(values[2:])]
        has_results = any(message.role == "tool" for message in messages)
        template = self.tool_template if has_results else self.template
        text = self._rendered(template, "new messages", fenced, self._no_tools(template))
        if MARK not in text:
            raise TaskError(
                f"{template.where} does not show"
                f" {'tool calls' if has_results else 'what the assistant said'}",
                "a template that shows whole turns of the assistant",
            )
        after = text.rpartition(MARK)[2]
        end = self.ends.search(after)
        if end is None or end[0] not in self._end_ids:
            raise TaskError(
                f"{template.where} ends no turn before new messages",
                f"one of {' '.join(self._end_ids)} behind what the assistant said",
            )
        return end[0], after[end.start() if self.family.next_role_stops else end.end() :]

    def _dummy(self, messages: Sequence[Message]) -> Message:
        """An assistant's turn that the new messages can follow, with the mark as its last words."""
        results = [message for message in messages if message.role == "tool"]
        calls = [
            ToolCall(
                self._guard.fence_text(result.name or "tool"),
                {"s": MARK},
                id=self._guard.fence_text(result.call_id or made_up_id(index)),
            )
            for index, result in enumerate(results)
        ]
        while 0 < len(calls) < self.family.fewest_calls:
            calls.append(calls[0]._replace(id=made_up_id(len(calls))))
        content = MARK if not calls or not self.family.shows_calls else ""
        return Message(role="assistant", content=content, tool_calls=tuple(calls))

    def _no_tools(self, template: ChatTemplate) -> list[Mapping[str, Json]] | None:
        """Returns the tools that stand in where tools do not matter: a template for tools has
        some.
        """
        return None if template is self.template else []

    def starts_segment(self, messages: Sequence[Message]) -> bool:
        """Returns whether these new messages begin a new segment.

        They do where the template would rewrite its past and the run wants it so, or where nothing
        shows how they could be appended.
        """
        if self.proof is None or all(message.role == "tool" for message in messages):
            return False
        verdict = self.proof.worst(TurnKind.USER, TurnKind.USER_AFTER_CALL)
        if verdict is Verdict.DROPS_THOUGHTS:
            return self._on_rewrite == SEGMENT
        return verdict is not Verdict.EXACT

    def facts(self) -> dict[str, Json]:
        """Returns the facts of the renderer for a run's manifest: family, template's hash, what was
        proved.
        """
        proof = self.proof
        findings = proof.findings.items() if proof else ()
        stops = {id: text for text, id in self.tokenizer.specials.items()}
        return {
            "family": self.family.name,
            "template_sha256": self.template.sha256,
            "switches": list(self.template.switches),
            "stop_tokens": [stops.get(id, str(id)) for id in self.stop_token_ids],
            "thinks": bool(proof and proof.thinks),
            "how": proof.summary()[0] if proof else "",
            "no_system": proof.no_system if proof else "",
            "no_tools": (self._tool_problem() or ("",))[0],
            "proof": {kind.value: finding.verdict.value for kind, finding in findings},
        }

    # ---- ids to messages

    def parse(
        self,
        completion_ids: Int32,
        prompt_ids: Int32 | None = None,
        tools: Sequence[ToolSpec] = NO_TOOLS,
    ) -> Message:
        """The assistant message that was sampled: content, thoughts and calls apart.

        Broken calls have their error; so has one that is not closed where no stop token ends the
        turn, which was cut off then.
        """
        stops = np.flatnonzero(np.isin(completion_ids, self.stop_token_ids))
        is_ended = len(stops) > 0
        ids = completion_ids[: stops[0]] if is_ended else completion_ids
        is_open = self.opens_thoughts if prompt_ids is None else self._is_open(prompt_ids)
        reasoning, text = self._split(self._speech.text(ids), is_open, is_ended)
        parsed = self.family.grammar(text, {tool.name: tool for tool in tools}, is_ended)
        return Message(
            role="assistant",
            content=parsed.content,
            tool_calls=parsed.calls,
            reasoning=reasoning or parsed.reasoning,
        )

    def _split(self, text: str, is_open: bool, is_ended: bool) -> tuple[str, str]:
        """Thoughts, and the rest; `is_open`: the prompt began one, `is_ended`: the model ended."""
        if self.family.thoughts is None:
            return "", text
        opener = self.family.markers[0] if is_ended and self.family.markers else ""
        return split_thoughts(text, self.family.thoughts, is_open=is_open, call_opener=opener)

    def _is_open(self, prompt_ids: Int32) -> bool:
        """Returns whether a prompt ends in the beginning of a thought."""
        if self.family.thoughts is None:
            return False
        end = self._speech.text(prompt_ids[-_PROMPT_END:]).rstrip()
        return end.endswith(self.family.thoughts[0].rstrip())

    def _ends_in_thought(self, completion_ids: Int32) -> bool:
        if self.family.thoughts is None:
            return False
        opener, closer = self.family.thoughts
        text = self._speech.text(completion_ids)
        opened, closed = text.rfind(opener), text.rfind(closer)
        return opened > closed or (self.opens_thoughts and opened == closed == -1)

    # ---- what a model would say

    def completion(self, message: Message) -> Int32:
        """Returns the ids that a model would sample to say this assistant message, end marker
        included.

        For oracles and warm starts. Raises ConfigError where the template writes no such message.
        """
        return self._guard.encode(self.completion_text(message))

    def completion_text(self, message: Message) -> str:
        """The text of sampled ids, with fences. Raises ConfigError."""
        values = self._guard.fence(self.family.dialect.messages([_USER, message]))
        template = self.tool_template if message.tool_calls else self.template
        try:
            tools = self._no_tools(template)
            before = template.render(values[:1], tools, add_generation_prompt=True)
            after = template.render(values, tools)
        except TemplateFault as fault:
            raise self._silent(str(fault)) from fault
        written = self.written_turn(before, after)
        if written is None or (message.tool_calls and not self.family.shows_calls):
            raise self._silent("it rewrites or leaves out what the assistant says")
        if (end := self.last_end(written)) and not self.family.next_role_stops:
            return written[:end]
        family = self.family
        closing = family.call_end if message.tool_calls else family.answer_end
        return written + (closing or family.stops[0])

    def last_end(self, written: str) -> int:
        """Returns the place in the template's text behind which a turn's own end stands; 0 for
        none.
        """
        ends = [match.end() for match in self.ends.finditer(written)]
        return (ends[-1] if self.family.any_end_closes else ends[0]) if ends else 0

    def written_turn(self, before: str, after: str) -> str | None:
        """Returns the assistant's turn in `after`, whose prompt was `before`; None for another
        prompt.

        A thought that the prompt opens and the history lacks is closed first.
        """
        if after.startswith(before):
            return after[len(before) :]
        if self.family.thoughts is None:
            return None
        start = before.rstrip()
        for marker in reversed(self.family.thoughts):
            start = start.removesuffix(marker.strip()).rstrip()
        if not after.startswith(start):
            return None
        is_open = before.rstrip().endswith(self.family.thoughts[0].rstrip())
        written = after[len(start) :]
        return self.family.thoughts[1] + written if is_open else written

    def _silent(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.template.where} cannot write this assistant message: {why}",
            "a family whose history shows what was said",
            "scripted policies need another model's directory",
        )


def _stop_ids(tokenizer: Tokenizer, family: Family) -> list[int]:
    """Ids of the family's ends of a turn that the tokenizer has. Raises ConfigError for none."""
    ids = [tokenizer.specials[text] for text in family.stops if text in tokenizer.specials]
    if not ids:
        raise ConfigError(
            f"the tokenizer has none of {' '.join(family.stops)}, which end a turn of family"
            f" {family.name}",
            "the tokenizer of the model whose template this is",
            "name the directory of one model",
        )
    return ids
