"""The native tool loop: sample, parse, run the calls, append their output, again.

It ends when the policy answers or a budget is used up:

    prompt -> [completion -> calls -> tool output]* -> completion without calls -> artefact

Invariants: within a segment the ids of each prompt are all earlier ids plus the bridge, never
rendered again; a new segment begins only where the template or `shorten` tells the past anew;
whatever happens, `run` returns a trajectory with everything that was sampled until then; nothing is
retried here. A budget that ends leaves the artefact to be scored (class policy); a backend or
sandbox that we lost leaves none (class infra). Not promised: tokens of a model call that was cut
short, since backends give none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from prorl.agents.calls import TOOL_GRACE_S, ToolCalls, spent_s
from prorl.agents.ending import End, end_with, ended
from prorl.agents.record import AttemptRecord, join
from prorl.agents.seeds import derive_seed
from prorl.agents.shorten import Room, Shorten, stop
from prorl.agents.user import user_turn
from prorl.agents.waiting import SILENT_S, Ear, within
from prorl.completion import check_completion
from prorl.errors import (
    BackendError,
    BudgetError,
    RolloutError,
    SandboxError,
    boundary,
)
from prorl.journal import Ended, Said
from prorl.protocols import AgentContext
from prorl.types import (
    FAILURE_CLASS,
    UNKNOWN_VERSION,
    Completion,
    Failure,
    FailureClass,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Message,
    PolicyVersion,
    StopReason,
    ToolCall,
    Trajectory,
    Trouble,
)

ARTEFACT_S = 45.0
"""For fetching the artefact, also when the deadline has passed: it is what the policy is scored by.

A sandbox client's own limit for a file (30 s) comes first, since it knows who is to blame. One that
answers, but slowly, is as its agent has made it.
"""
OVERTIME_S = TOOL_GRACE_S + ARTEFACT_S
"""Longest time after the deadline until `run` returns, for whoever guards it."""
MAX_EMPTY_ABORTS = 20
"""Pieces without a token that a backend may return in one turn while it takes new weights."""


class NativeAgent:
    """Implements `prorl.protocols.Agent`; holds no state of an attempt.

    `shorten` says what becomes of a conversation whose next message does not fit.
    """

    def __init__(self, shorten: Shorten = stop, artefact_s: float = ARTEFACT_S) -> None:
        self._shorten, self._artefact_s = shorten, artefact_s

    async def run(self, context: AgentContext) -> Trajectory:
        """Drive one attempt to its end.

        Raises only CancelledError, and only when `context.cancelled()` is false.
        """
        attempt = _Attempt(context, self._shorten)
        try:
            end = await ended(attempt.drive())
            end, artefact = await attempt.finish(end, self._artefact_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not context.cancelled() or task is None:
                raise
            task.uncancel()
            end, artefact = end_with(FailureCode.CANCELLED), b""
        return attempt.trajectory(end, artefact)


class _Attempt:
    """One run of the loop; its state is the record."""

    def __init__(self, context: AgentContext, shorten: Shorten) -> None:
        self._context, self._shorten = context, shorten
        self._record = AttemptRecord(tuple(context.messages))
        self._live = list(context.messages)
        """The conversation as the policy sees it now."""
        self._min_version = context.min_version
        self._clock = context.deadline.clock
        self._journal = context.journal
        self._calls = ToolCalls(context)

    async def drive(self) -> End:
        """Turns until one ends the loop."""
        if (end := self._begin()) is not None:
            return end
        while (end := await self._turn(len(self._record.turns))) is None:
            pass
        return end

    def _begin(self) -> End | None:
        """Render what is live into a sequence that holds nothing yet."""
        context, record = self._context, self._record
        prompt = self._journal.context(len(record.turns), record.segment)
        if prompt is None:
            prompt = context.renderer.prompt(self._live, context.tools)
        if (limit := context.limits.max_tokens) <= len(prompt):
            text = f"a prompt of {len(prompt)} tokens does not fit in limits.max_tokens = {limit}"
            code = FailureCode.MAX_TOKENS if record.turns else FailureCode.BAD_TASK
            return End(StopReason.CONTEXT, Failure(code=code, message=text))
        record.sequence.context(prompt, turn=len(record.turns))
        return None

    async def _turn(self, turn: int) -> End | None:
        context, record = self._context, self._record
        prompt_ids_L = record.sequence.ids_L
        completion = await self._sample(turn)
        message = replace(
            context.renderer.parse(completion.token_ids_C, prompt_ids_L, context.tools), turn=turn
        )
        self._said(message)
        record.final = message.content
        if not message.tool_calls:
            if completion.finish_reason is FinishReason.LENGTH:
                return end_with(FailureCode.MAX_TOKENS, "cut off in the answer")
            outputs = await user_turn(self._context, turn, self._live)
            if not outputs:
                return End(StopReason.DONE)
            self._said(*outputs)
        else:
            outputs = await self._call_tools(turn, message.tool_calls)
        if turn + 1 >= context.limits.max_turns:
            return end_with(FailureCode.MAX_TURNS, f"{turn + 1} turns without an answer")
        return await self._extend(completion, outputs)

    def _said(self, *messages: Message) -> None:
        self._record.messages += messages
        self._live += messages

    # ---- what fits

    async def _extend(self, completion: Completion, new: Sequence[Message]) -> End | None:
        """Append the bridge; where it does not fit, or the run wants it so, a new segment."""
        context, record = self._context, self._record
        if context.renderer.starts_segment(new):
            record.new_segment()
            return self._begin()
        bridge = self._journal.context(len(record.turns), record.segment)
        if bridge is None:
            bridge = context.renderer.bridge(completion.token_ids_C, new)
        room = context.limits.max_tokens - len(record.sequence)
        if len(bridge) < room:
            record.sequence.context(bridge, turn=len(record.turns))
            return None
        shorter = await self._shorten(tuple(self._live), Room(self._fits, self._ask))
        if shorter is None:
            names = ", ".join(sorted({message.name for message in new} - {""})) or "tools"
            text = f"the output of {names}, {len(bridge)} tokens, does not fit: {room} are left"
            return End(StopReason.CONTEXT, Failure(code=FailureCode.MAX_TOKENS, message=text))
        self._live = list(shorter)
        record.new_segment()
        return self._begin()

    def _fits(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation leaves a quarter of the context to go on with."""
        prompt = self._context.renderer.prompt(messages, self._context.tools)
        return 4 * len(prompt) <= 3 * self._context.limits.max_tokens

    async def _ask(self, messages: Sequence[Message]) -> str:
        """The policy's answer to a conversation, as a turn in a segment of its own."""
        record, before = self._record, self._live
        turn = len(record.turns)
        record.new_segment()
        self._live = list(messages)
        if (end := self._begin()) is not None:
            raise BudgetError(end.failure.code, end.failure.message)
        prompt_ids_L = record.sequence.ids_L
        completion = await self._sample(turn)
        said = self._context.renderer.parse(completion.token_ids_C, prompt_ids_L)
        record.messages += (replace(messages[-1], turn=turn), replace(said, turn=turn))
        self._live = before
        return said.content

    # ---- the model

    async def _sample(self, turn: int) -> Completion:
        """One turn's completion: recorded, or sampled.

        Pieces that a weight update cut are continued from their exact ids.
        """
        record, parts = self._record, list[Completion]()
        if (said := self._journal.said(turn)) is not None:
            return self._take(said)
        await self._context.boundary()
        prompt_tokens, began = len(record.sequence), self._clock()
        try:
            while True:
                part = await self._sample_part(turn, parts)
                parts.append(part)
                if part.finish_reason is not FinishReason.ABORT:
                    return join(parts)
        finally:
            if any(len(part.token_ids_C) for part in parts):
                self._write(turn, join(parts), prompt_tokens, self._clock() - began)
            else:
                record.llm_s += self._clock() - began

    def _take(self, said: Said) -> Completion:
        """A model call that an earlier life of the attempt has recorded."""
        record, completion = self._record, said.completion
        prompt_tokens = len(record.sequence)
        record.sequence.sampled(completion, said.turn, said.temperature)
        record.turn(completion, prompt_tokens, said.temperature, said.llm_s)
        self._min_version = max((self._min_version, *completion.versions))
        if completion.finish_reason is FinishReason.ABORT:
            self._journal.check_open()
        return completion

    def _write(self, turn: int, completion: Completion, prompt_tokens: int, llm_s: float) -> None:
        """Write down what was sampled, on the node before any of its calls runs."""
        context, record = self._context, self._record
        temperature = context.sampling.temperature
        record.turn(completion, prompt_tokens, temperature, llm_s)
        said = Said(
            turn=turn,
            segment=record.segment,
            context_ids=record.sequence.last_context,
            completion=completion,
            temperature=temperature,
            llm_s=llm_s,
            spent_s=spent_s(context),
        )
        self._journal.say(said)

    async def _sample_part(self, turn: int, parts: Sequence[Completion]) -> Completion:
        context, record = self._context, self._record
        if context.cancelled():
            raise RolloutError(FailureCode.CANCELLED, "")
        if sum(not len(part.token_ids_C) for part in parts) > MAX_EMPTY_ABORTS:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE, f"aborted {MAX_EMPTY_ABORTS} times without a token"
            )
        wanted = context.sampling.max_tokens - sum(len(part.token_ids_C) for part in parts)
        wanted = min(wanted, context.limits.max_tokens - len(record.sequence))
        if wanted <= 0:
            raise BudgetError(FailureCode.MAX_TOKENS, f"{len(record.sequence)} tokens")
        heard = Ear(self._clock)
        request = self._request(turn, len(parts), wanted, heard)
        with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, context.backend.name):
            completion = await self._generate(request, heard)
        check_completion(completion, context.renderer.vocab_size, wanted)
        self._check_versions(completion)
        record.sequence.sampled(completion, turn, context.sampling.temperature)
        self._min_version = max((self._min_version, *completion.versions))
        return completion

    async def _generate(self, request: GenerateRequest, heard: Ear) -> Completion:
        """Ask the backend for one completion.

        The policy answers for time in which it spoke, the backend for silence: a deadline after
        SILENT_S without a token, or before the first of the attempt, is infrastructure's failure.
        """
        context = self._context
        try:
            return await within(context.deadline, context.backend.generate(request), "a model call")
        except BudgetError:
            silent_s = self._clock() - heard.at
            if silent_s < SILENT_S and (heard.num_parts or self._record.turns):
                raise
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{context.backend.name}: no token for {silent_s:.1f} s when the budget ended",
                Trouble.SILENT,
            ) from None

    def _check_versions(self, completion: Completion) -> None:
        """Refuse tokens of weights older than this rollout has seen, or than its lease allows.

        Another attempt is due.
        """
        known = [version for version in completion.versions if version != UNKNOWN_VERSION]
        oldest = min(known, default=self._min_version)
        if oldest < self._min_version:
            text = (
                f"{self._context.backend.name} serves version {oldest}, older than"
                f" {self._min_version}"
            )
            raise BackendError(FailureCode.BACKEND_UNAVAILABLE, text, Trouble.BEHIND)

    def _request(self, turn: int, part: int, max_tokens: int, heard: Ear) -> GenerateRequest:
        context, key = self._context, self._context.key
        return GenerateRequest(
            prompt_ids_L=self._record.sequence.ids_L,
            sampling=replace(context.sampling, max_tokens=max_tokens),
            seed=self._seed(turn, part),
            stop_token_ids=context.renderer.stop_token_ids,
            request_id=f"{key.run_id}/{key.rollout_id}/{key.attempt}/{turn}"
            + (f".{part}" if part else ""),
            session=context.session,
            min_version=PolicyVersion(self._min_version),
            on_part=heard,
            task=context.task,
            sample_index=context.sample_index,
            turn=turn,
            run_seed=context.run_seed,
        )

    def _seed(self, turn: int, part: int) -> int:
        """Equal for a turn of equal attempts of a run that is repeated."""
        context = self._context
        attempt = self._journal.seed_attempt(context.key.attempt)
        task_id, sample = context.task.task_id, context.sample_index
        return derive_seed(context.run_seed, task_id, sample, attempt, turn, part)

    async def _call_tools(self, turn: int, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls in order; what the policy is told of each."""
        outputs, began = list[Message](), self._clock()
        earlier_s = self._calls.recorded_s
        try:
            for number, call in enumerate(calls):
                text = await self._calls.run(turn, number, call)
                outputs.append(
                    Message(role="tool", content=text, name=call.name, call_id=call.id, turn=turn)
                )
        finally:
            self._said(*outputs)
            tool_s = self._clock() - began + self._calls.recorded_s - earlier_s
            self._record.tools(tool_s, len(calls))
        return outputs

    # ---- the end

    async def finish(self, end: End, limit_s: float) -> tuple[End, bytes]:
        """How it ended, and what crosses into EVAL: as recorded, or written down now."""
        if (ended := self._journal.ended) is not None:
            return End(ended.stop, Failure(code=ended.code, message=ended.message)), ended.artefact
        artefact = b""
        if end.failure.failure_class.trains:
            end, artefact = await self._artefact(end, limit_s)
        code, message = end.failure.code, end.failure.message
        spent = spent_s(self._context)
        self._journal.end(
            Ended(stop=end.stop, code=code, message=message, artefact=artefact, spent_s=spent)
        )
        return end, artefact

    async def _artefact(self, end: End, limit_s: float) -> tuple[End, bytes]:
        """The artefact that the env wants EVAL to judge.

        A sandbox that cannot give it any more changes a good end, and an end that was bad stays.
        """
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, "artefact"):
                return end, await self._fetch(limit_s)
        except RolloutError as error:
            ours = FAILURE_CLASS[error.code] is FailureClass.INFRA
            keep = end.stop is StopReason.SANDBOX_BROKEN or (
                end.stop is not StopReason.DONE and not ours
            )
            return (end if keep else end_with(error.code, error.message)), b""

    async def _fetch(self, limit_s: float) -> bytes:
        context = self._context
        try:
            async with asyncio.timeout(limit_s) as guard:
                return await context.env.artefact(context.task, self._record.final, context.sandbox)
        except TimeoutError as cause:
            if context.sandbox is None or not guard.expired():
                raise
            message = f"the sandbox did not give its artefact in {limit_s:g} s"
            raise SandboxError(FailureCode.SANDBOX_BROKEN, message) from cause

    def trajectory(self, end: End, artefact: bytes) -> Trajectory:
        """The record as it is now."""
        record = self._record
        return Trajectory(
            sequences=record.sequences,
            turns=tuple(record.turns),
            messages=tuple(record.messages),
            artefact=artefact,
            stop_reason=end.stop,
            failure=end.failure,
            llm_s=record.llm_s,
            tool_s=record.tool_s,
        )
