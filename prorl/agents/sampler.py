"""`Sampler`: the model calls of an attempt, from exact ids to exact ids.

    sampler = Sampler(context)
    sequence = sampler.record.sequence
    sequence.append_context(prompt_ids, turn=0)
    completion = await sampler.sample(sequence, turn=0)     # its ids are in the sequence now

Invariants: a call that an earlier worker of the attempt has recorded is given again, and only for
an equal prompt; pieces that a weight update or a lost server cut are continued from their exact
ids; no piece is of weights older than the attempt has seen; whatever was sampled is in the sequence
and in the journal, also when the call ends by an error or a cancel, before that goes on. The seed
comes from identity, never from time. Nothing is retried here. Sequences may grow side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from prorl.agents.context import AttemptContext, derive_seed
from prorl.agents.record import AttemptRecord, SequenceRecord, join
from prorl.completion import check_age, check_completion
from prorl.errors import BackendError, BudgetError, RolloutError, boundary
from prorl.journal import RecordedCall
from prorl.limits import Clock, Deadline
from prorl.types import (
    BackendFault,
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    PolicyVersion,
)
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.types import Int32

ResultT = TypeVar("ResultT")

SILENT_S = wait_limit_s("model.silent")

_MIN_WAIT_S = 0.01
"""Keeps a loop from spinning over a paused deadline that has no time left."""
_CANCEL_S = wait_limit_s("model.cancel")
MAX_EMPTY_ABORTS = 20
"""Pieces without a token that a backend may return in one turn while it takes new weights: a
trainer that publishes each second would have one turn aborted so often in twenty seconds.
"""


class Sampler:
    """The model calls of one attempt; `record` gets a turn for each."""

    def __init__(self, context: AttemptContext) -> None:
        self.record = AttemptRecord(tuple(context.messages))
        self._context, self._journal = context, context.journal
        self._clock = context.deadline.clock
        self._min_version = context.min_version
        self._oldest = dict[int, PolicyVersion]()
        """Oldest weights that may still speak in the calls under way, by their turns."""

    def restart(self) -> None:
        """Begin anew with the agent: what was sampled is in the journal, and is given again."""
        self.record.restart(tuple(self._context.messages))
        self._min_version = self._context.min_version

    async def sample(
        self, sequence: SequenceRecord, turn: int, max_tokens: int | None = None
    ) -> Completion:
        """The completion of what the sequence holds, appended to it: recorded, or sampled now.

        At most `max_tokens`, and what the run's sampling and limits leave. Raises RolloutError.
        """
        digest = prompt_digest(sequence.ids_L)
        if (call := self._journal.recorded_call(turn, digest)) is not None:
            return self._take(sequence, call)
        prompt_tokens, began, parts = len(sequence), self._clock(), list[Completion]()
        # A call beside this one may be answered by newer weights: no reason to refuse this one.
        self._oldest[turn] = self._min_version
        limit = min(
            max_tokens or self._context.sampling.max_tokens, self._context.sampling.max_tokens
        )
        try:
            while True:
                part = await self._part(sequence, turn, parts, limit)
                if part.finish_reason is not FinishReason.ABORT:
                    return join(parts)
        finally:
            self._min_version = max(self._min_version, self._oldest.pop(turn))
            llm_s = self._clock() - began
            if any(len(part.token_ids_C) for part in parts):
                self._write(sequence, turn, digest, join(parts), prompt_tokens, llm_s)
            else:
                self.record.llm_s += llm_s

    def _take(self, sequence: SequenceRecord, call: RecordedCall) -> Completion:
        """Append a model call that an earlier worker of the attempt has recorded."""
        completion, prompt_tokens = call.completion, len(sequence)
        sequence.append_sampled(completion, call.turn, call.temperature)
        self.record.add_turn(
            completion, prompt_tokens, call.temperature, call.llm_s, sequence.segment, call.turn
        )
        self._min_version = max((self._min_version, *completion.versions))
        if completion.finish_reason is FinishReason.ABORT:
            self._journal.check_open()
        return completion

    def _write(
        self,
        sequence: SequenceRecord,
        turn: int,
        digest: bytes,
        completion: Completion,
        prompt_tokens: int,
        llm_s: float,
    ) -> None:
        """Write down what was sampled, on the node before any of its calls runs."""
        temperature = self._context.sampling.temperature
        self.record.add_turn(completion, prompt_tokens, temperature, llm_s, sequence.segment, turn)
        self._journal.record_call(
            RecordedCall(
                turn=turn,
                segment=sequence.segment,
                prompt=digest,
                context_ids=sequence.last_context,
                completion=completion,
                temperature=temperature,
                llm_s=llm_s,
                spent_s=self._context.spent_s,
            )
        )

    async def _part(
        self, sequence: SequenceRecord, turn: int, parts: list[Completion], limit: int
    ) -> Completion:
        """Sample a piece, or all of it; it is in `parts` and `sequence` even where this raises."""
        context = self._context
        if context.cancelled():
            raise RolloutError(FailureCode.CANCELLED, "")
        if sum(not len(part.token_ids_C) for part in parts) > MAX_EMPTY_ABORTS:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE, f"aborted {MAX_EMPTY_ABORTS} times without a token"
            )
        max_new = limit - sum(len(part.token_ids_C) for part in parts)
        max_new = min(max_new, context.limits.max_tokens - len(sequence))
        if max_new <= 0:
            raise BudgetError(FailureCode.MAX_TOKENS, f"{len(sequence)} tokens")
        partial = PartialCompletion(self._clock)
        request = self._request(sequence, turn, len(parts), max_new, partial)
        try:
            with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, context.backend.name):
                completion = await self._generate(request, partial)
        except (BudgetError, BackendError, asyncio.CancelledError) as error:
            is_lie = isinstance(error, BackendError) and error.trouble is BackendFault.MALFORMED
            if partial.part is not None and len(partial.part.token_ids_C) and not is_lie:
                cut = replace(partial.part, finish_reason=FinishReason.ABORT)
                with suppress(BackendError):  # a piece that cannot be is none
                    self._append(sequence, turn, parts, cut, max_new)
            raise
        if _is_ended(completion, request.stop_token_ids):
            # Cut behind its last token: a turn that has ended does not go on.
            completion = replace(completion, finish_reason=FinishReason.STOP)
        elif _is_cut(completion) and len(completion.token_ids_C) == max_new:
            completion = replace(completion, finish_reason=FinishReason.LENGTH)
        self._append(sequence, turn, parts, completion, max_new)
        return completion

    def _append(
        self,
        sequence: SequenceRecord,
        turn: int,
        parts: list[Completion],
        completion: Completion,
        max_new: int,
    ) -> None:
        check_completion(completion, self._context.renderer.vocab_size, max_new)
        if self._context.routed_experts:
            completion = _checked_routing(completion, sequence)
        check_age(completion, self._oldest[turn])
        sequence.append_sampled(completion, turn, self._context.sampling.temperature)
        parts.append(completion)
        self._oldest[turn] = max((self._oldest[turn], *completion.versions))

    async def _generate(self, request: GenerateRequest, partial: PartialCompletion) -> Completion:
        """Ask the backend for one completion.

        The policy answers for time in which it spoke, the backend for silence: a deadline after
        SILENT_S without a token, or before the first of the attempt, is infrastructure's failure.
        """
        context = self._context
        try:
            return await within(context.deadline, context.backend.generate(request), "a model call")
        except BudgetError:
            silent_s = self._clock() - partial.at
            if silent_s < SILENT_S and (partial.part is not None or self.record.turns):
                raise
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{context.backend.name}: no token for {silent_s:.1f} s when the budget ended",
                BackendFault.SILENT,
            ) from None

    def _request(
        self,
        sequence: SequenceRecord,
        turn: int,
        part: int,
        max_tokens: int,
        partial: PartialCompletion,
    ) -> GenerateRequest:
        context, key = self._context, self._context.key
        return GenerateRequest(
            prompt_ids_L=sequence.ids_L,
            sampling=replace(context.sampling, max_tokens=max_tokens),
            # Equal for a turn of equal attempts of a run that is repeated.
            seed=derive_seed(
                context.run_seed,
                context.task.task_id,
                context.sample_index,
                key.attempt,
                turn,
                part,
            ),
            stop_token_ids=context.renderer.stop_token_ids,
            request_id=f"{key.run_id}/{key.rollout_id}/{key.attempt}/{turn}"
            + (f".{part}" if part else ""),
            session=context.session + (f"/{sequence.segment}" if sequence.segment else ""),
            min_version=self._oldest[turn],
            on_part=partial,
            task=context.task,
            sample_index=context.sample_index,
            turn=turn,
            run_seed=context.run_seed,
            routing_from=sequence.num_routed if context.routed_experts else -1,
        )


class PartialCompletion:
    """The partial completion of a model call, and when it last grew."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.at = clock, clock()
        self.part: Completion | None = None

    def __call__(self, part: Completion) -> None:
        self.at, self.part = self._clock(), part


async def within(deadline: Deadline, call: Awaitable[ResultT], label: str) -> ResultT:
    """The result of `call`, unless the deadline ends first: then `call` is cancelled.

    Not `asyncio.timeout`, which fixes the end when it starts: others may pause this one. Raises
    BudgetError(DEADLINE).
    """
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            deadline.check(FailureCode.DEADLINE, label)
            await asyncio.wait({task}, timeout=max(deadline.remaining_s, _MIN_WAIT_S))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)


def _is_ended(completion: Completion, stop_token_ids: tuple[int, ...]) -> bool:
    """Returns whether a completion that was cut ends in a stop token."""
    ids_C = completion.token_ids_C
    return _is_cut(completion) and len(ids_C) > 0 and int(ids_C[-1]) in stop_token_ids


def _is_cut(completion: Completion) -> bool:
    return completion.finish_reason is FinishReason.ABORT


def _checked_routing(completion: Completion, sequence: SequenceRecord) -> Completion:
    """The completion, whose experts begin where the sequence's end.

    A cut call may have none: the next one is asked for what is missing. Raises BackendError.
    """
    num_routed, routed_experts = sequence.num_routed, completion.routed_experts
    expected = len(sequence) + len(completion.token_ids_C) - 1 - num_routed
    if routed_experts is not None and len(routed_experts) == expected:
        return completion
    if completion.finish_reason is FinishReason.ABORT:
        return replace(completion, routed_experts=None)
    actual = "none" if routed_experts is None else f"{len(routed_experts)}"
    raise BackendError(
        FailureCode.BACKEND_PROTOCOL,
        f"{completion.backend} sent the experts of {actual} of {expected} tokens, which the run's"
        " `routed_experts` asks for: was it started with --enable-return-routed-experts?",
    )


def prompt_digest(ids_L: Int32) -> bytes:
    """Names a prompt: BLAKE2b-128 of its ids."""
    return blake2b(ids_L.astype("<i4", copy=False).tobytes(), digest_size=16).digest()
