"""`AttemptJournal`: what the earlier workers of an attempt have recorded, and where this one
records.

An agent asks it before each model call and each tool call. What an earlier incarnation has recorded
is given again; what happens now is in a file of the node before the next thing happens:

    context ids, completion -> CALL    before its tool calls run
    a call's text, or the   -> ANSWER  before the next call, or the next model call
    env's, and its state
    end, artifact           -> END     before the sandbox is stopped

Without a sink nothing is kept; an agent works the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from prorl.errors import RolloutError
from prorl.journal.records import (
    AttemptEnd,
    FrameKind,
    JournalRecord,
    RecordedCall,
    ToolAnswer,
    answer_body,
    call_body,
    ended_body,
)
from prorl.types import FailureCode, FinishReason

if TYPE_CHECKING:
    from prorl.types import Int32

Sink = Callable[[FrameKind, bytes], None]
"""Writes one record; never raises."""

UNKNOWN = (
    "[this call may have run: the worker that made it died before it heard the result, which is"
    " not known]"
)
"""The text that the policy reads as the result of such a call."""


class CallId(NamedTuple):
    resumes: int
    turn: int
    number: int
    """The number of the call in its turn."""


@runtime_checkable
class SupportsCallIds(Protocol):
    """A sandbox that remembers calls by their ids."""

    def mark(self, call: CallId | None) -> None:
        """Notes the tool call that the next questions belong to; None: to none."""


class AttemptJournal:
    """The journal of one attempt under one of its workers. Belongs to the event loop."""

    def __init__(
        self, sink: Sink | None = None, *, on_lost_tool_call: str = "report", resumes: int = 0
    ) -> None:
        self._sink, self.on_lost_tool_call, self.resumes = sink, on_lost_tool_call, resumes
        self._turns: dict[int, RecordedCall] = {}
        self._answers: dict[tuple[int, int], ToolAnswer] = {}
        self.ended: AttemptEnd | None = None
        self.spent_s = 0.0
        """The seconds of the budget that were spent at the last record."""
        self._has_begun = resumes == 0
        """True once something happened under this worker that no earlier one can have begun."""

    def restore(self, record: JournalRecord) -> None:
        """Take in what an earlier worker recorded, in its order."""
        match record:
            case RecordedCall():
                self._turns[record.turn] = record
            case ToolAnswer():
                self._answers[record.turn, record.index] = record
            case AttemptEnd():
                self.ended = record
        self.spent_s = record.spent_s

    # ---- model calls

    def recorded_context(self, turn: int, segment: int) -> Int32 | None:
        """Recorded ids before a turn's sampled ones, if that turn began in this segment."""
        call = self._turns.get(turn)
        return call.context_ids if call is not None and call.segment == segment else None

    def recorded_call(self, turn: int, prompt: bytes) -> RecordedCall | None:
        """Returns the recorded model call of a turn, or None where it must be sampled now. A call
        that was cut off is given only to an attempt that has ended.

        A recorded call of another prompt (`prompt` is its digest) is no answer: it and what was
        recorded after it are forgotten. Raises RolloutError when the attempt has ended and nothing
        more may be sampled.
        """
        call = self._turns.get(turn)
        if call is not None and call.prompt != prompt:
            self._turns = {n: call for n, call in self._turns.items() if n < turn}
            self._answers = {key: answer for key, answer in self._answers.items() if key[0] < turn}
            call = None
        cut = call is not None and call.completion.finish_reason is FinishReason.ABORT
        if call is not None and (not cut or self.ended):
            return call
        self.check_open()
        return None

    def record_call(self, call: RecordedCall) -> None:
        self._has_begun = True
        self._turns[call.turn] = call
        if self._sink is not None:
            self._sink(FrameKind.CALL, call_body(call))

    # ---- tool calls, and the env's own turns

    def recorded_answer(self, turn: int, index: int) -> ToolAnswer | None:
        """Returns a recorded answer. Raises RolloutError as `recorded_call`."""
        answer = self._answers.get((turn, index))
        if answer is None:
            self.check_open()
        return answer

    def begin_call(self) -> bool:
        """Note that a tool call is about to be made. Returns whether an earlier incarnation may
        have made it: only the first call under a worker can be one.
        """
        doubtful, self._has_begun = not self._has_begun, True
        return doubtful

    def record_answer(self, answer: ToolAnswer) -> None:
        """Write an answer down."""
        self._answers[answer.turn, answer.index] = answer
        if self._sink is not None:
            self._sink(FrameKind.ANSWER, answer_body(answer))

    # ---- the end

    def record_end(self, ended: AttemptEnd) -> None:
        self.ended = ended
        if self._sink is not None:
            self._sink(FrameKind.END, ended_body(ended))

    def check_open(self) -> None:
        """Raise RolloutError when the attempt has ended and nothing more may happen."""
        if self.ended is not None:
            raise RolloutError(
                self.ended.code or FailureCode.STAGE_ERROR, "the attempt has ended before"
            )
