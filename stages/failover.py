"""An attempt's policy, whichever servers it takes.

    call -> trouble -> the tokens that came are a piece of the turn -> ask the gateway -> go on

Invariants: tokens that were received stay, and the next server continues from the exact ids; while
there is no server, or it is silent or busy, the budget stands still. A call that a later one
overtook is given up; one that is silent for another reason stays open while the gateway looks for
another server, so that a server that froze and thawed samples nothing twice. A failure that another
server would repeat (the same bad reply `MAX_FAULTS` times) ends the attempt. Nothing is retried
without a pause that grows, with jitter. A backend that is no server (a script) is never left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prorl.agents.sampler import SILENT_S
from prorl.backends.catalogue import is_server
from prorl.completion import check_age, check_completion, num_shared
from prorl.control import Assigned, CallTotals, Failover
from prorl.errors import BackendError
from prorl.flight import trace
from prorl.limits import Deadline
from prorl.renderer.apart import AnyRenderer
from prorl.stages.backends import Backends
from prorl.types import (
    AttemptKey,
    BackendFault,
    Completion,
    FailureCode,
    GenerateRequest,
    PolicyVersion,
    RunWeights,
)
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.types import Int32

FIRST_S = wait_limit_s("model.first_token")
OVERTAKEN_S, PREFILL_TOKENS_PER_S = wait_limit_s("model.overtaken"), 500.0
"""A call that a later one overtook is given up after this long, and a second more for so many
tokens of its prompt: the slowest prefill of a server that computes, on a CPU.
"""
BETWEEN_S = wait_limit_s("model.next_token")
STILL_S = wait_limit_s("model.gone")
MAX_FAULTS = 6
"""Failures of one call without a token in between. A server that dies takes one, and so does each
server that the call then goes to; more than a pool has is a prompt that no server takes.
"""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 5.0

Ask = Callable[[Failover], Awaitable[Assigned]]
CurrentWeights = Callable[[], tuple[PolicyVersion, RunWeights | None]]
"""Newest version of the run, and how its servers' labels read."""
Count = Callable[[Completion], None]

_TROUBLE = {
    FailureCode.BACKEND_UNAVAILABLE: BackendFault.REFUSED,
    FailureCode.BACKEND_PROTOCOL: BackendFault.MALFORMED,
}
_REPEATS = frozenset({BackendFault.ERROR, BackendFault.MALFORMED})
_WORTHLESS = frozenset({BackendFault.MALFORMED, BackendFault.BEHIND})
"""Replies worth nothing from their first token on: they contradict themselves, or are old."""


class _FailoverRequest(NamedTuple):
    lost: Failover
    reply: asyncio.Task[Assigned]


class Routed:
    """Implements `prorl.protocols.Backend` for one attempt."""

    def __init__(
        self,
        backends: Backends,
        url: str,
        *,
        key: AttemptKey,
        deadline: Deadline,
        renderer: AnyRenderer,
        wait_s: float = 3600.0,
        ask: Ask | None = None,
        current: CurrentWeights = lambda: (PolicyVersion(0), None),
        count: Count = lambda completion: None,
    ) -> None:
        self.name = url
        self._backends, self._key, self._deadline = backends, key, deadline
        self._renderer, self._wait_s, self._ask = renderer, wait_s, ask
        self._current, self._count = current, count
        self._clock = backends.clock
        self._reasons: set[str] = set()
        self._part: Completion | None = None
        """The part of the call that has come so far."""
        self._began_at = self._received_at = 0.0
        self._prompt_tokens = 0
        """The prompt of the call that is under way."""
        self._news = asyncio.Event()
        self._lost: Failover | None = None
        """The fault of `name`, as long as nothing was asked about it."""
        self._request: _FailoverRequest | None = None
        """To the gateway for another server, while the call to `name` stays open."""
        self._num_lost = 0
        """Failures since the last token."""
        self._computed_L: Int32 = np.zeros(0, np.int32)
        """Prompt and completion of the last call."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """A completion that was cut is marked as aborted. Raises BackendError."""
        faults = 0
        while True:
            if self._lost is not None or self._request is not None:
                await self._move()
            try:
                return await self._call(request)
            except BackendError as error:
                self._lost = self._report(error, request)
                if self._lost is None:
                    raise
                faults += self._lost.trouble in _REPEATS
                if faults >= MAX_FAULTS:
                    raise

    async def close(self) -> None:
        """Close no backend: they belong to the worker."""
        if self._request is not None:
            self._request.reply.cancel()
            await asyncio.gather(self._request.reply, return_exceptions=True)

    # ---- one call

    async def _call(self, request: GenerateRequest) -> Completion:
        """A completion, or the tokens that came before trouble did."""
        newest, weights = self._current()
        routed = replace(
            request,
            newest_version=max(newest, request.newest_version),
            weights=weights,
            on_part=lambda part: self._receive_part(part, request),
        )
        self._part, self._received_at = None, self._clock()
        self._prompt_tokens = len(request.prompt_ids_L)
        remaining_s = self._deadline.remaining_s
        try:
            completion = await self._await_with_timeouts(routed)
            check_age(completion, request.min_version)
        except BackendError as error:
            self._lost = self._report(error, request)
            if self._part is None or self._lost is None or self._lost.trouble in _WORTHLESS:
                self._drop(request)
                if self._lost is not None:  # the server's fault, at the policy's time
                    self._deadline.give_back(remaining_s - self._deadline.remaining_s)
                raise
            limit = request.sampling.max_tokens
            completion = check_completion(self._part, self._renderer.vocab_size, limit)
        except asyncio.CancelledError:
            if self._part is not None and request.on_part is not None:
                request.on_part(self._part)
            raise
        else:
            self._backends.note(self.name, None)
            self._backends.answered(self.name, self._began_at)
        if len(completion.token_ids_C):
            self._num_lost = 0
        self._note(request, completion)
        self._count(completion)
        return completion

    def _note(self, request: GenerateRequest, completion: Completion) -> None:
        """Add the call to the counts of its server, with the prompt tokens that it had before."""
        if not is_server(self.name):
            return
        prompt_L, cached = request.prompt_ids_L, completion.cached_tokens
        repeated = num_shared(self._computed_L, prompt_L)
        self._computed_L = np.concatenate([prompt_L, completion.token_ids_C])
        call = CallTotals(
            prompt=len(prompt_L),
            cached=cached,
            reusable=repeated,
            reused=min(cached, repeated),
            sampled=len(completion.token_ids_C) if completion.llm_s else 0,
            llm_s=completion.llm_s,
        )
        self._backends.count(self.name, self._key.run_id, call)

    async def _await_with_timeouts(self, request: GenerateRequest) -> Completion:
        url = self.name
        if not is_server(url):  # never silent, never out
            return await self._await_local(url, request)
        if self._backends.dead_since(url) is not None:
            raise self._silence(f"{url} is out")
        await self._until_free(url)
        trace.mark(url, trace.REQUESTED, (self._key,))
        self._began_at = self._received_at = self._clock()
        work = asyncio.ensure_future(self._sample(url, request))
        try:
            with self._backends.watch(url, self):
                await self._until_done(work, url, request)
            return work.result()
        finally:
            self._pause_deadline("paused", False)
            self._pause_deadline("silent", False)
            self._pause_deadline("moving", False)
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _until_free(self, url: str) -> None:
        """Wait while the server is busy. Raises BackendError when it is for too long, or goes."""
        began = self._clock()
        try:
            while (wait_s := self._backends.wait_s(url)) > 0.0:
                self._pause_deadline("busy", True)
                busy_s = self._clock() - began
                if busy_s >= self._wait_s:
                    message = f"{url} was busy for {busy_s:.0f} s"
                    raise BackendError(
                        FailureCode.BACKEND_UNAVAILABLE, message, BackendFault.DECLINED
                    )
                if self._backends.dead_since(url) is not None:
                    raise self._silence(f"{url} is out")
                await asyncio.sleep(min(wait_s, 1.0))
        finally:
            self._pause_deadline("busy", False)

    async def _until_done(
        self, work: asyncio.Task[Completion], url: str, request: GenerateRequest
    ) -> None:
        """Wait until the call is done. Each change of the server, and each limit of its silence, is
        a reason to look again.
        """
        while not work.done():
            self._news.clear()
            waits: set[asyncio.Task[Any]] = {work}
            try:
                timeout_s = self._patience_s(url)
            except BackendError as silence:
                self._wait_for_another(silence, url, request)
                timeout_s = STILL_S
            if self._request is not None and not self._request.reply.done():
                waits.add(self._request.reply)
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait(
                    {*waits, news}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                news.cancel()

    def _wait_for_another(self, silence: BackendError, url: str, request: GenerateRequest) -> None:
        """Ask the gateway once for another server, and keep the call open until the reply is there.

        A reply that names the same server means that it is back: the call may still be answered,
        and waits anew. Raises BackendError where the call is given up: another server goes on, a
        later call overtook it, or there is no gateway to ask.
        """
        if self._request is None:
            lost = self._report(silence, request)
            is_lost_alone = self._backends.dead_since(url) is None and self._is_overtaken()
            if lost is None or is_lost_alone:
                self._lost = lost
                raise silence
            self._request = _FailoverRequest(lost, asyncio.ensure_future(self._ask_within(lost)))
        elif self._request.reply.done():
            reply = self._request.reply
            if reply.exception() is not None or reply.result().backend != url:
                self._lost = self._request.lost
                raise silence
            self._request, self._received_at = None, self._clock()
        self._pause_deadline("moving", self._request is not None)

    def _is_overtaken(self) -> bool:
        return self._backends.overtook(self.name, self._began_at)

    async def _ask_within(self, lost: Failover) -> Assigned:
        """Returns the server that goes on. Raises BackendError when there is none in `wait_s`."""
        assert self._ask is not None
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._ask(lost)
        except TimeoutError:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"no backend went on within {self._wait_s:g} s: {lost.message}",
                lost.trouble,
            ) from None

    async def _await_local(self, url: str, request: GenerateRequest) -> Completion:
        """Sample from a backend that is no server; its pauses stop the deadline (`look`)."""
        self._pause_deadline("paused", self._backends.is_paused(url))
        try:
            with self._backends.watch(url, self):
                return await self._sample(url, request)
        finally:
            self._pause_deadline("paused", False)

    async def _sample(self, url: str, request: GenerateRequest) -> Completion:
        return await (await self._backends.get(url, self._renderer)).generate(request)

    def _patience_s(self, url: str) -> float:
        """Returns the seconds until the silence must be judged again. Raises BackendError where it
        has lasted too long.
        """
        paused = self._backends.is_paused(url)
        self._pause_deadline("paused", paused)
        silent_s, dead_at = self._clock() - self._received_at, self._backends.dead_since(url)
        if dead_at is not None and silent_s >= STILL_S:
            raise self._silence(f"{url} is out, and gave no token for {silent_s:.1f} s")
        self._pause_deadline("silent", silent_s >= SILENT_S)
        limit_s = BETWEEN_S
        if self._part is None:
            limit_s = self._patience_for_first_s(silent_s, paused)
        if silent_s >= limit_s and not paused:
            raise self._silence(f"{url} gave no token for {silent_s:.1f} s")
        due = [STILL_S] if dead_at is not None else []
        due += [SILENT_S] if silent_s < SILENT_S else []
        return max(0.01, min([*due, limit_s if silent_s < limit_s else silent_s + 1]) - silent_s)

    def _patience_for_first_s(self, silent_s: float, paused: bool) -> float:
        """Returns how long the first token is waited for: less where a later call has one
        already.
        """
        overtaken_s = min(FIRST_S, OVERTAKEN_S + self._prompt_tokens / PREFILL_TOKENS_PER_S)
        if silent_s < overtaken_s or self._is_overtaken():
            return overtaken_s
        if not paused:
            self._backends.look_out(self.name, self._renderer)
        return FIRST_S

    @staticmethod
    def _silence(message: str) -> BackendError:
        return BackendError(FailureCode.BACKEND_UNAVAILABLE, message, BackendFault.SILENT)

    def look(self) -> None:
        self._pause_deadline("paused", self._backends.is_paused(self.name))
        self._news.set()

    def _receive_part(self, part: Completion, request: GenerateRequest) -> None:
        self._part = part
        self._received_at = self._clock()
        self._backends.answered(self.name, self._began_at)
        self._pause_deadline("silent", False)
        if request.on_part is not None:
            request.on_part(part)

    def _drop(self, request: GenerateRequest) -> None:
        """Discards the partial result of the call, for its listeners, too."""
        part, self._part = self._part, None
        if part is not None and request.on_part is not None:
            none = np.zeros(0, np.int32)
            request.on_part(
                replace(
                    part,
                    token_ids_C=none,
                    logprobs_C=none.astype(np.float32),
                    version_ends=(),
                    versions=(),
                )
            )

    def _pause_deadline(self, reason: str, still: bool) -> None:
        if still and reason == "silent" and reason not in self._reasons:
            self._deadline.give_back(SILENT_S)
        (self._reasons.add if still else self._reasons.discard)(reason)
        (self._deadline.pause if self._reasons else self._deadline.resume)()

    # ---- another server

    def _report(self, error: BackendError, request: GenerateRequest) -> Failover | None:
        """Returns what the gateway must know of a failure; None when no other server would help."""
        if self._lost is not None:
            return self._lost
        trouble = error.trouble or _TROUBLE.get(error.code)
        if self._ask is None or trouble is None or not is_server(self.name):
            return None
        if trouble is BackendFault.DECLINED:
            return None
        faults, calls = self._backends.note(self.name, trouble, error.retry_after_s)
        return Failover(
            attempt=self._key,
            backend=self.name,
            trouble=trouble,
            message=error.message[:500],
            faults=faults,
            calls=calls,
            min_version=request.min_version,
        )

    async def _move(self) -> None:
        """Let the gateway say who goes on. A request that was made while a call stayed open is
        awaited, also where the call was answered after all: the gateway counts on its reply. Raises
        BackendError.
        """
        self._pause_deadline("moving", True)
        try:
            if self._request is None:
                assert self._lost is not None
                if self._num_lost:
                    pause_s = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**self._num_lost)
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                self.name = (await self._ask_within(self._lost)).backend
            else:
                self.name = (await self._request.reply).backend
        finally:
            self._pause_deadline("moving", False)
            if self._request is not None:
                self._request.reply.cancel()
                self._request = None
        self._num_lost += self._lost is not None
        self._lost = None
