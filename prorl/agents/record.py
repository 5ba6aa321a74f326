"""The record that an attempt writes while it runs.

That is growing sequences of exact ids, with their spans, and turns and messages.

    record.sequence                      the first, and native's only one
    record.begin(Lineage.SUBAGENT)       a conversation of its own
    record.fork(0, 900, turn=3)          goes on behind the first 900 ids of another, which are
                                         context in it: what was sampled trains in one sequence

Invariants: ids are appended and never changed, so a view that was handed out stays true; spans tile
the ids; each sampled id has one logprob; where the weights changed inside a turn the span is split
at that very id. Ids never become Python lists.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prorl.types import (
    UNKNOWN_VERSION,
    Completion,
    EndpointCounts,
    Lineage,
    Message,
    PolicyVersion,
    Sequence,
    SpanKind,
    Turn,
)

if TYPE_CHECKING:
    from prorl.types import Float32, Int16, Int32

_FIRST_CAPACITY = 4096


class SequenceRecord:
    def __init__(self, segment: int = 0, lineage: Lineage = Lineage.MAIN, parent: int = -1) -> None:
        self.segment, self.lineage, self.parent = segment, lineage, parent
        self._ids_L: Int32 = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._length = 0
        self._logprobs: list[Float32] = []
        self._ends: list[int] = []
        self._kinds: list[int] = []
        self._versions: list[int] = []
        self._turns: list[int] = []
        self._temperatures: list[float] = []
        self._routing: list[Int16] = []
        self.last_context: Int32 = self._ids_L[:0]
        """The ids that `append_context` appended last."""

    def __len__(self) -> int:
        return self._length

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self._logprobs))

    @property
    def num_routed(self) -> int:
        """Ids from the first on whose experts are known."""
        return sum(map(len, self._routing))

    @property
    def ids_L(self) -> Int32:
        """Read-only view of all ids so far."""
        view = self._ids_L[: self._length]
        view.flags.writeable = False
        return view

    def append_context(self, ids: Int32, turn: int) -> None:
        self._append(ids)
        self.last_context = ids
        self._span(self._length, SpanKind.CONTEXT, -1, turn, 0.0)

    def append_sampled(self, completion: Completion, turn: int, temperature: float) -> None:
        """Append what a model sampled, split where its version changes."""
        start = self._length
        self._append(completion.token_ids_C)
        self._logprobs.append(completion.logprobs_C)
        if completion.routed_experts is not None:
            self._routing.append(completion.routed_experts)
        for end, version in zip(completion.version_ends, completion.versions, strict=True):
            # Tokens that no known weights sampled would be trained with a ratio that is a guess.
            kind = SpanKind.SAMPLED if version == UNKNOWN_VERSION else SpanKind.TRAINED
            self._span(start + end, kind, version, turn, temperature)

    def untrain(self, turn: int | None = None) -> None:
        """Keeps the tokens of this turn, or of all turns, and excludes them from training."""
        for index, kind in enumerate(self._kinds):
            if kind == SpanKind.TRAINED and turn in (None, self._turns[index]):
                self._kinds[index] = SpanKind.SAMPLED

    @property
    def trains(self) -> bool:
        return SpanKind.TRAINED in self._kinds

    def sequence(self, weight: float) -> Sequence:
        return Sequence(
            segment=self.segment,
            lineage=self.lineage,
            parent=self.parent,
            weight=weight,
            token_ids_L=self.ids_L.copy(),
            logprobs_C=np.concatenate([np.empty(0, dtype=np.float32), *self._logprobs]),
            span_end_S=np.array(self._ends, dtype=np.int32),
            span_kind_S=np.array(self._kinds, dtype=np.uint8),
            span_version_S=np.array(self._versions, dtype=np.int32),
            span_turn_S=np.array(self._turns, dtype=np.int32),
            span_temperature_S=np.array(self._temperatures, dtype=np.float32),
            routed_experts=np.concatenate(self._routing) if self._routing else None,
        )

    def _append(self, ids: Int32) -> None:
        end = self._length + len(ids)
        if end > len(self._ids_L):
            # A larger buffer instead of a resize in place: views that a backend still holds keep
            # the old one.
            grown = np.empty(max(end, 2 * len(self._ids_L)), dtype=np.int32)
            grown[: self._length] = self._ids_L[: self._length]
            self._ids_L = grown
        self._ids_L[self._length : end] = ids
        self._length = end

    def _span(self, end: int, kind: SpanKind, version: int, turn: int, temperature: float) -> None:
        if end == (self._ends[-1] if self._ends else 0):
            return
        last = (self._kinds[-1], self._versions[-1], self._turns[-1]) if self._ends else None
        if last == (kind, version, turn):
            self._ends[-1] = end
            return
        self._ends.append(end)
        self._kinds.append(int(kind))
        self._versions.append(version)
        self._turns.append(turn)
        self._temperatures.append(temperature)


class AttemptRecord:
    """Collects all that an attempt leaves: sequences, turns, messages and counts."""

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self.restart(messages)

    def restart(self, messages: tuple[Message, ...]) -> None:
        """Begin an empty record: the agent starts anew."""
        self._sequences = [SequenceRecord()]
        self.turns: list[Turn] = []
        self.messages: list[Message] = list(messages)
        self.final = ""
        """The last text of the policy, for the artifact."""
        self.llm_s = 0.0
        self.tool_s = 0.0
        self.endpoint_counts = EndpointCounts()

    @property
    def sequence(self) -> SequenceRecord:
        """The sequence that began last."""
        return self._sequences[-1]

    def begin(self, lineage: Lineage, parent: int = -1) -> SequenceRecord:
        """Returns a new sequence beside those that grow; the first call gives the empty one."""
        if self._sequences[0].num_sampled or len(self._sequences[0]):
            self._sequences.append(SequenceRecord(len(self._sequences), lineage, parent))
        else:
            self._sequences[0].lineage = lineage
        return self.sequence

    def fork(self, segment: int, length: int, turn: int) -> SequenceRecord:
        """Returns a new sequence that begins with the first `length` ids of another.

        They are context in it, also those that were sampled: so they train once.
        """
        source = self._sequences[segment]
        forked = SequenceRecord(len(self._sequences), source.lineage, segment)
        forked.append_context(source.ids_L[:length], turn)
        self._sequences.append(forked)
        return forked

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Returns the sequences up to the last with a sampled id; the weights of those that train
        sum to 1.
        """
        records = self._sequences[:1]
        for index, record in enumerate(self._sequences):
            if record.num_sampled:
                records = self._sequences[: index + 1]
        weight = 1.0 / max(sum(record.trains for record in records), 1)
        return tuple(record.sequence(weight if record.trains else 0.0) for record in records)

    def add_turn(
        self,
        completion: Completion,
        prompt_tokens: int,
        temperature: float,
        llm_s: float,
        segment: int,
        turn: int,
    ) -> None:
        """Add the turn of a model call, whose ids the sequence of that segment has already."""
        self.llm_s += llm_s
        insort(
            self.turns,
            Turn(
                turn=turn,
                segment=segment,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(completion.token_ids_C),
                cached_tokens=completion.cached_tokens,
                finish_reason=completion.finish_reason,
                temperature=temperature,
                policy_version=int(completion.versions[0]) if completion.versions else -1,
                backend=completion.backend,
                llm_s=llm_s,
                tool_s=0.0,
                tool_calls=0,
            ),
            key=lambda turn: turn.turn,
        )

    def add_tool_calls(self, tool_s: float, num_calls: int) -> None:
        """Add tool calls and their seconds to the last turn, if there is one."""
        self.tool_s += tool_s
        for last in self.turns[-1:]:
            calls = last.tool_calls + num_calls
            self.turns[-1] = replace(last, tool_s=last.tool_s + tool_s, tool_calls=calls)


def join(parts: list[Completion]) -> Completion:
    """One completion from the pieces of a turn that weight updates interrupted."""
    if len(parts) == 1:
        return parts[0]
    ends: list[int] = []
    versions: list[PolicyVersion] = []
    start = 0
    routed_experts = [part.routed_experts for part in parts if part.routed_experts is not None]
    for part in parts:
        ends += [start + end for end in part.version_ends]
        versions += part.versions
        start += len(part.token_ids_C)
    return Completion(
        token_ids_C=np.concatenate([part.token_ids_C for part in parts]),
        logprobs_C=np.concatenate([part.logprobs_C for part in parts]),
        finish_reason=parts[-1].finish_reason,
        version_ends=tuple(ends),
        versions=tuple(versions),
        cached_tokens=parts[0].cached_tokens,
        llm_s=sum(part.llm_s for part in parts),
        backend=parts[-1].backend,
        routed_experts=np.concatenate(routed_experts) if routed_experts else None,
    )
