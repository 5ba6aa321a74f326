"""`StageHost`: hosts an operator between an Inlet and an Outlet; knows rows, credit and events.

    upstream --rows--> Inlet --> operator --> Growth --> Outlet --rows--> downstream
             <-- done, ack --                                   <-- acked, lost --

The operator runs one task per row, at most `slots` at a time (a row that waits for a guest takes no
slot).

What frees a slot: at INIT the row's arrival at RUN; at RUN and EVAL the operator's end, once the
Outlet had room for the result. What acks upstream: only EVAL, when the store acked; a RUN row is
therefore kept until the store's commit.

The gateway learns of every row in hand: `started` when it comes; and, when no valid row will leave,
`failed` with the code, or `released` where somebody asked to stop it. A row whose failure is infra,
task or cancelled still goes downstream if it has turns, for `partial/`. EVAL passes on rows that
failed in RUN without a message, since their fate is decided.

An exception of the operator fails its own row only: an error of ours by its code, any other as
`stage_error`. Not promised: an end in time, when an operator ignores both its deadline and its
cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from prorl.control import Failed, Released, Started, Stats
from prorl.errors import (
    PromptTooLongError,
    ProrlError,
    RolloutError,
    SchemaError,
    TaskError,
    boundary,
)
from prorl.flight.inlet import Inlet, ReceivedRow
from prorl.flight.outlet import Outlet
from prorl.graph import GRAPH
from prorl.limits import Clock
from prorl.linux import crashes
from prorl.protocols import Operator
from prorl.schema.columns import RanColumns
from prorl.schema.fields import TURN
from prorl.schema.rows import Added, Row, grow
from prorl.stages.operator import Emit, owner_of, uncancel_if_attempt_cancelled, was_cancelled
from prorl.timing import now
from prorl.types import FAILURE_CLASS, AttemptKey, Failure, FailureCode, Stage

log = logging.getLogger("prorl.stages")


class QuarantineReason(Protocol):
    """Returns why an attempt is not to be touched, and whether none of its run is; empty where it
    may be.
    """

    def __call__(self, key: AttemptKey) -> tuple[str, bool]: ...


class _Waiting(NamedTuple):
    before: Row
    added: Added
    grown: asyncio.Future[Row]


class Growth:
    """Grows one stage's rows by that stage's columns. Belongs to the event loop.

    Rows that end in the same turn of the loop get theirs in one call into Arrow: of a hundred that
    came in one message most end together, and one by one they would cost more than the work of a
    quick stage. A row whose values cannot be converted fails alone. Bounded by the stage's slots.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    async def __call__(self, before: Row, added: Added) -> Row:
        """The row of the next edge. Raises RolloutError for values that fit no column."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._convert)
        waiting = _Waiting(before, added, loop.create_future())
        self._waiting.append(waiting)
        return await waiting.grown

    def _convert(self) -> None:
        waiting, self._waiting = self._waiting, []
        if _convert(waiting) is not None:
            for pending in waiting:
                if (error := _convert([pending])) is not None and not pending.grown.done():
                    pending.grown.set_exception(error)


def _convert(waiting: list[_Waiting]) -> RolloutError | None:
    """Give these their rows, unless nobody waits any more; why none of them can have one."""
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "what a stage adds"):
            batch = grow(
                [pending.before for pending in waiting], [pending.added for pending in waiting]
            )
    except RolloutError as error:
        return error
    for i, pending in enumerate(waiting):
        if not pending.grown.done():
            pending.grown.set_result(Row(batch, i))
    return None


class StageHost:
    """One stage of one worker.

    `cancelled` is shared with the operator: keys that were cancelled while it works on them.
    `on_forget` is called with attempts that are no longer in hand.
    """

    def __init__(
        self,
        operator: Operator,
        inlet: Inlet,
        emit: Emit,
        *,
        slots: int,
        finished_bytes: int = 64 << 20,
        cancelled: set[AttemptKey] | None = None,
        tokens: Callable[[], int] = int,
        on_forget: Callable[[list[AttemptKey]], None] = lambda keys: None,
        quarantine_reason: QuarantineReason = lambda key: ("", False),
        clock: Clock = now,
    ) -> None:
        self.name = operator.stage
        self._operator = operator
        self._inlet = inlet
        self._emit = emit
        self._tokens = tokens
        self._clock = clock
        self._slots = slots
        self._cancelled = cancelled if cancelled is not None else set()
        self._on_forget, self._quarantine_reason = on_forget, quarantine_reason
        edge = GRAPH.row(self.name).gives
        self.acks_on_commit = GRAPH.takes(self.name) in GRAPH.redelivered
        """True if what it takes is kept upstream until the store has it."""
        self.is_at_most_once = edge not in GRAPH.redelivered
        """True if what it gives is downstream's from its arrival on; until then it may be taken
        back.
        """
        self.outlet = Outlet(
            edge,
            limit_bytes=finished_bytes,
            on_acked=self._acked,
            on_lost=self._give_up,
            path=GRAPH.path(self.name),
        )
        self._working: dict[AttemptKey, asyncio.Task[None]] = {}
        self._finished: dict[AttemptKey, Row] = {}
        self._finished_at: dict[AttemptKey, float] = {}
        self._grow = Growth()
        self._tasks: asyncio.TaskGroup | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._giving_back = False
        self._num_done = self._num_failed = 0
        self._busy_s = 0.0
        self._busy_since = clock()

    # ---- open and close

    async def run(self) -> None:
        """Work until the inlet is closed: the process leaves, and cancels what is in hand."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while received := await self._inlet.take():
                for row in received:
                    self._start(row)
            for task in self._working.values():
                task.cancel()

    def drain(self) -> None:
        self._inlet.stop()

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def cancel(self, key: AttemptKey) -> None:
        """Stop a row in hand; one that RUN or EVAL has finished goes on: the log decides."""
        task = self._working.get(key)
        if task is not None:
            if key not in self._cancelled:
                self._cancelled.add(key)
                # after its first step: a task that is cancelled before it frees no slot
                asyncio.get_running_loop().call_soon(self._cancel_begun, key, task)
        elif self.is_at_most_once and key in self._finished:
            self.outlet.drop(key)
            self._give_up([key])

    def _cancel_begun(self, key: AttemptKey, task: asyncio.Task[None]) -> None:
        if self._working.get(key) is task:
            task.cancel()

    def cancel_all(self) -> None:
        for key in self.in_hand():
            self.cancel(key)

    def give_back(self) -> None:
        """Stop what is not in other hands yet, and what comes late, and give it back.

        That is every row that is worked on, and at INIT those that RUN has not been sent.
        """
        self._giving_back = True
        for key in list(self._working):
            self.cancel(key)
        if self.is_at_most_once:
            unsent = [key for key in self._finished if key not in self.outlet]
            self._give_up(unsent + self.outlet.withdraw())

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def num_finished(self) -> int:
        """Rows that are done here and not yet acked downstream."""
        return len(self._finished)

    @property
    def longest_finished_s(self) -> float:
        """Returns how long the first of these has waited; 0 if there is none."""
        first = next(iter(self._finished_at.values()), None)
        return 0.0 if first is None else self._clock() - first

    def in_hand(self) -> list[AttemptKey]:
        return [*self._working, *self._finished]

    def stats(self) -> Stats:
        self._count_busy()
        return Stats(
            slots=self._slots,
            busy=self._num_busy,
            queued=self.outlet.num_waiting,
            done=self._num_done,
            failed=self._num_failed,
            busy_s=round(self._busy_s, 3),
            tokens=self._tokens(),
            stalled_s=round(self.outlet.stalled_s, 3),
        )

    # ---- one row

    def _start(self, received: ReceivedRow) -> None:
        assert self._tasks is not None
        key = received.key
        code = FailureCode(received.row.value("failure_code")) if self.acks_on_commit else None
        is_decided = code is not None and not FAILURE_CLASS[code].trains
        if not is_decided:  # an earlier stage has reported the attempt's failure
            self._emit(Started(), key, stage=self.name)
        self._count_busy()
        self._empty.clear()
        work = crashes.attribute_steps(owner_of(key), self._work(received))
        self._working[key] = self._tasks.create_task(work)
        if self._giving_back:
            self.cancel(key)

    async def _work(self, received: ReceivedRow) -> None:
        key, row = received.key, received.row
        added = await self._operate(key, row)
        self._count_busy()
        del self._working[key]
        self._cancelled.discard(key)
        if added is None:
            self._remove([key])
            return
        # In hand until downstream acks it. While the row is converted and while it waits for room
        # in the outlet, a cancellation or a lost downstream may take it out of `_finished` (INIT):
        # hence the question after each wait. What is no longer here must not go out.
        self._finished[key], self._finished_at[key] = row, self._clock()
        try:
            grown = await self._grow(row, added)
        except RolloutError as error:
            # Columns that cannot be converted are a bug of ours, at the cost of this row alone.
            if self._pop_finished(key) is not None:
                self._report(key, _failure(error))
                await self._release(row)
                self._remove([key])
            return
        if key in self._finished:
            self._finished[key] = grown
            await self.outlet.put(grown, key, received.num_bytes + added.num_bytes)
        if key not in self._finished:
            self.outlet.drop(key)
            return
        self._num_done += 1
        if not self.is_at_most_once:
            self._inlet.done(key)

    async def _operate(self, key: AttemptKey, row: Row) -> Added | None:
        """Returns the columns that the row gets, or None when the attempt ends here, reported."""
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{self.name} stage"):
                self._check_harmless(key)
                result = await self._operator(row)
        except asyncio.CancelledError:
            if uncancel_if_attempt_cancelled(key in self._cancelled):
                failure = Failure(code=FailureCode.CANCELLED)
            elif was_cancelled():
                raise
            else:  # what the row runs raised it itself: nobody would hear of the attempt again
                words = f"{self.name} stage: CancelledError"
                failure = Failure(code=FailureCode.STAGE_ERROR, message=words)
        except ProrlError as error:
            failure = _failure(error)
        else:
            if result.is_committed:
                return result
            self._report(key, result.failure, _num_sampled(row, result))
            # Kept in `partial/`, for people to look at, if there is anything to see.
            return None if isinstance(result, RanColumns) and not result.turns else result
        self._report(key, failure, _num_sampled(row))
        await self._release(row)
        return self._operator.unfinished(failure)

    def _check_harmless(self, key: AttemptKey) -> None:
        """Raises RolloutError for what no worker survives. Where the whole run is like that, its
        task is bad. A single attempt in EVAL is its answer's fault, and before EVAL it is ours.
        """
        why, is_of_run = self._quarantine_reason(key)
        if why:
            code = FailureCode.BAD_TASK if is_of_run else FailureCode.STAGE_ERROR
            if self.name == Stage.EVAL and not is_of_run:
                code = FailureCode.EVAL_FAILED
            raise RolloutError(code, why)

    def _report(self, key: AttemptKey, failure: Failure, num_sampled: int = 0) -> None:
        self._num_failed += 1
        if key in self._cancelled:
            self._emit(Released(), key, stage=self.name)
        else:
            failed = Failed(message=failure.message, num_sampled=num_sampled)
            self._emit(failed, key, stage=self.name, code=failure.code)

    async def _release(self, row: Row) -> None:
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, "release"):
                await self._operator.release(row)
        except RolloutError as error:
            log.warning("cannot give back what a row held: %s", error)

    # ---- what happens to finished rows

    def _acked(self, keys: list[AttemptKey]) -> None:
        for key in keys:
            self._pop_finished(key)
        self._remove(keys)

    def _give_up(self, keys: list[AttemptKey]) -> None:
        """Gives back rows that no consumer took, or whose consumer left before it began."""
        assert self._tasks is not None
        for key in keys:
            row = self._pop_finished(key)
            if row is not None:
                self._emit(Released(), key, stage=self.name)
                self._tasks.create_task(self._release(row))
        self._remove(keys)

    def _pop_finished(self, key: AttemptKey) -> Row | None:
        self._finished_at.pop(key, None)
        return self._finished.pop(key, None)

    def _remove(self, keys: list[AttemptKey]) -> None:
        """Removes these attempts from those in hand: frees their slots, lets EVAL's upstream forget
        them.
        """
        self._on_forget(keys)
        if self.acks_on_commit:
            self._inlet.ack(keys)
        else:
            for key in keys:
                self._inlet.done(key)
        if not self._working and not self._finished:
            self._empty.set()

    @property
    def _num_busy(self) -> int:
        return max(0, len(self._working) - self._inlet.num_slotless)

    def _count_busy(self) -> None:
        now = self._clock()
        self._busy_s += self._num_busy * (now - self._busy_since)
        self._busy_since = now


_COMPLETION = TURN.get_field_index("completion_tokens")


def _num_sampled(row: Row, result: Added | None = None) -> int:
    """Tokens that an attempt has sampled, as far as its row or what RUN adds to it says."""
    if isinstance(result, RanColumns):
        return sum(int(turn[_COMPLETION]) for turn in result.turns)
    if "turns" not in row.batch.schema.names:
        return 0
    return sum(int(turn["completion_tokens"]) for turn in row.value("turns"))


def _failure(error: ProrlError) -> Failure:
    match error:
        case RolloutError():
            return Failure(code=error.code, message=error.message)
        case PromptTooLongError():
            return Failure(code=FailureCode.PROMPT_TOO_LONG, message=str(error))
        case TaskError() | SchemaError():
            return Failure(code=FailureCode.BAD_TASK, message=str(error))
        case _:
            return Failure(code=FailureCode.STAGE_ERROR, message=str(error))
