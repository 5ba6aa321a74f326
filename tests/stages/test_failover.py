"""An attempt and its servers: whatever one of them does, the tokens are exact, the budget and the
attempt are untouched, and the gateway hears the right thing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from prorl.agents.native import NativeAgent
from prorl.backends.vllm import VllmBackend
from prorl.control import Assigned, Failover
from prorl.errors import BackendError
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.renderer.apart import AnyRenderer
from prorl.stages import failover
from prorl.stages.backends import LAST_BUSY_S, Backends, Flow
from prorl.stages.failover import MAX_FAULTS, Ask, Routed
from prorl.testing import RENDERER
from prorl.types import (
    AttemptKey,
    BackendFault,
    FailureClass,
    FailureCode,
    PolicyVersion,
    RunWeights,
    SpanKind,
    StopReason,
    Trajectory,
)
from tests.agents.test_native import context
from tests.backends.misbehaving_server import PIECE, Misbehaving, Mode
from tests.waiting import until

KEY = AttemptKey("run", 5, 2)
WEIGHTS = RunWeights("tag", published=True)


class Scene:
    """Some servers, and a gateway that always names the next one."""

    def __init__(self, *servers: Misbehaving) -> None:
        self.servers, self.failovers = servers, list[Failover]()
        self.backends = Backends(self._open)
        self.deadline, self._began = Deadline(30.0), time.monotonic()
        self.labels: tuple[str, ...] = ("tag:3:x",) * len(servers)
        self.answer: Ask = self._next
        self.current_weights = (PolicyVersion(3), WEIGHTS)

    async def _open(self, url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
        return VllmBackend(url, RENDERER.vocab_size, model="m")

    def free_s(self) -> float:
        """Returns how much of the time since the deadline began was not charged to it."""
        spent_s = self.deadline.budget_s - self.deadline.remaining_s
        return time.monotonic() - self._began - spent_s

    async def ask(self, failover: Failover) -> Assigned:
        self.failovers.append(failover)
        return await self.answer(failover)

    async def _next(self, failover: Failover) -> Assigned:
        urls = [server.url for server in self.servers]
        return Assigned(backend=urls[(urls.index(failover.backend) + 1) % len(urls)])

    async def run(self, min_version: int = 0) -> Trajectory:
        for server, label in zip(self.servers, self.labels, strict=True):
            server.label = label
        policy = Routed(
            self.backends,
            self.servers[0].url,
            key=KEY,
            deadline=self.deadline,
            renderer=RENDERER,
            ask=self.ask,
            current=lambda: self.current_weights,
        )
        try:
            return await NativeAgent().run(
                context(policy, deadline=self.deadline, min_version=PolicyVersion(min_version))
            )
        finally:
            await policy.close()
            await self.backends.close()


@asynccontextmanager
async def scene(*modes: Mode) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Misbehaving(mode)) for mode in modes]
        yield Scene(*servers)


def check_exact(trajectory: Trajectory, *servers: Misbehaving) -> None:
    """Every server saw the ids so far, and what they said is what is stored."""
    (sequence,) = trajectory.sequences
    calls = [call for server in servers for call in server.calls]
    ids = sequence.token_ids_L.tolist()
    for call in calls:
        assert ids[: len(call.prompt)] == call.prompt
        assert ids[len(call.prompt) :][: len(call.ids)] == call.ids
    reported_logprobs = [logprob for call in calls for logprob in call.logprobs]
    assert sequence.logprobs_C.tolist() == pytest.approx(reported_logprobs)


async def test_a_stream_that_breaks_loses_no_token_and_no_attempt() -> None:
    """X13: the next one continues from the exact ids; its label stood, so they train."""
    async with scene(Mode.HALF, Mode.WELL) as s:
        trajectory = await s.run()
        first, second = s.servers
        assert trajectory.stop_reason is StopReason.DONE
        check_exact(trajectory, first, second)
        assert second.calls[0].prompt == first.calls[0].prompt + first.calls[0].ids
        assert len(first.calls[0].ids) == PIECE
        (sequence,) = trajectory.sequences
        assert sequence.span_kind_S.tolist() == [SpanKind.CONTEXT, SpanKind.TRAINED]
        assert sequence.span_version_S.tolist() == [-1, 3]
        assert [(request.trouble, request.attempt) for request in s.failovers] == [
            (BackendFault.REFUSED, KEY)
        ]
        assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("mode", "trouble"),
    [
        (Mode.ERROR, BackendFault.ERROR),
        (Mode.BUSY, BackendFault.BUSY),
        *((mode, BackendFault.MALFORMED) for mode in (Mode.EMPTY, Mode.GARBAGE, Mode.NAN)),
    ],
)
async def test_a_bad_reply_is_evidence_and_another_server_answers(
    mode: Mode, trouble: BackendFault
) -> None:
    """X16: none of it trains, none of it costs an attempt."""
    async with scene(mode, Mode.WELL) as s:
        trajectory = await s.run()
        assert trajectory.stop_reason is StopReason.DONE
        check_exact(trajectory, s.servers[1])
        assert [request.trouble for request in s.failovers] == [trouble]


async def test_the_time_of_a_refused_reply_is_returned_to_the_budget() -> None:
    """It is the server's fault: a policy that is asked again has all of its time."""
    async with scene(Mode.NAN, Mode.WELL) as s:
        s.servers[0].delay_s = 0.5
        trajectory = await s.run()
        assert trajectory.stop_reason is StopReason.DONE
        assert [request.trouble for request in s.failovers] == [BackendFault.MALFORMED]
        assert s.free_s() > 0.4


@pytest.mark.parametrize("mode", [Mode.SILENT, Mode.DRIP, Mode.STALLED])
async def test_a_silent_server_is_abandoned_when_the_gateway_ejects_it(
    mode: Mode,
) -> None:
    """X14: SIGSTOP, a black hole, dripped bytes; the budget stands still for as long."""
    async with scene(mode, Mode.WELL) as s:
        running = asyncio.ensure_future(s.run())
        await until(lambda: s.servers[0].calls)
        s.backends.update_pool(dead=[s.servers[0].url], keyed=[])
        trajectory = await running
        assert trajectory.stop_reason is StopReason.DONE
        assert [request.trouble for request in s.failovers] == [BackendFault.SILENT]
        check_exact(trajectory, *s.servers)


@pytest.mark.parametrize("is_back_first", [False, True])
async def test_a_server_that_froze_and_thawed_gets_no_call_twice(is_back_first: bool) -> None:
    """No other server is able: the call stays open, and the budget stands still. `is_back_first`:
    the gateway names the server again before the call is answered.
    """
    async with scene(Mode.WELL) as s:
        (server,) = s.servers
        s.deadline, server.delay_s = Deadline(2.0), 4.0
        is_back = asyncio.Event()

        async def ask(failed: Failover) -> Assigned:
            await is_back.wait()
            return Assigned(backend=server.url)

        s.answer = ask
        running = asyncio.ensure_future(s.run())
        await until(lambda: server.calls)
        s.backends.update_pool(dead=[server.url], keyed=[])
        await until(lambda: s.failovers)
        assert not running.done()
        if is_back_first:
            s.backends.update_pool(dead=[], keyed=[])
            is_back.set()
        await until(lambda: server.in_flight == 0)
        is_back.set()
        trajectory = await running
        assert trajectory.stop_reason is StopReason.DONE
        assert len(server.calls) == 1, "sampled again"
        assert [request.trouble for request in s.failovers] == [BackendFault.SILENT]
        check_exact(trajectory, server)


async def test_an_attempt_that_ends_leaves_no_request_for_another_server() -> None:
    """The call was answered, and the gateway has not replied yet."""
    async with scene(Mode.WELL) as s:
        (server,) = s.servers
        server.delay_s = 3.0
        cancelled = asyncio.Event()

        async def ask(failed: Failover) -> Assigned:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        s.answer = ask
        running = asyncio.ensure_future(s.run())
        await until(lambda: server.calls)
        s.backends.update_pool(dead=[server.url], keyed=[])
        assert (await running).stop_reason is StopReason.DONE
        assert cancelled.is_set()


async def test_a_server_that_is_out_gets_no_new_call() -> None:
    async with scene(Mode.WELL, Mode.WELL) as s:
        out, other = s.servers
        s.backends.update_pool(dead=[out.url], keyed=[])
        trajectory = await s.run()
        assert trajectory.stop_reason is StopReason.DONE
        assert out.calls == []
        assert [request.backend for request in s.failovers] == [out.url]
        check_exact(trajectory, other)


async def test_silence_is_noticed_without_the_gateway_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "FIRST_S", 0.2)
    monkeypatch.setattr(failover, "SILENT_S", 0.1)
    async with scene(Mode.SILENT, Mode.WELL) as s:
        trajectory = await s.run()
        assert trajectory.stop_reason is StopReason.DONE
        assert [request.trouble for request in s.failovers] == [BackendFault.SILENT]
        assert s.free_s() > 0.15, "waiting for a server costs no budget"


async def test_a_failure_that_every_server_repeats_ends_the_attempt() -> None:
    async with scene(Mode.NAN, Mode.GARBAGE) as s:
        trajectory = await s.run()
        assert trajectory.failure.code is FailureCode.BACKEND_PROTOCOL
        assert trajectory.failure.failure_class is FailureClass.INFRA
        assert len(s.failovers) == MAX_FAULTS - 1
        assert not len(trajectory.sequences[0].logprobs_C)


async def test_without_any_server_it_waits_and_its_budget_pauses() -> None:
    async with scene(Mode.WELL, Mode.WELL) as s:
        s.deadline = Deadline(0.5)
        broken, back = s.servers
        requested, free = asyncio.Event(), asyncio.Event()

        async def ask(failed: Failover) -> Assigned:
            requested.set()
            await free.wait()
            return Assigned(backend=back.url)

        s.answer = ask
        broken.mode = Mode.HALF
        running = asyncio.ensure_future(s.run())
        await requested.wait()
        remaining_s = s.deadline.remaining_s
        await asyncio.sleep(0.6)
        assert s.deadline.remaining_s == remaining_s
        free.set()
        assert (await running).stop_reason is StopReason.DONE


async def test_a_server_with_old_weights_is_abandoned_and_its_tokens_dropped() -> None:
    async with scene(Mode.WELL, Mode.WELL) as s:
        s.labels = ("tag:2:y", "tag:3:x")
        trajectory = await s.run(min_version=3)
        assert trajectory.stop_reason is StopReason.DONE
        assert [request.trouble for request in s.failovers] == [BackendFault.BEHIND]
        assert trajectory.sequences[0].span_version_S.tolist() == [-1, 3]
        check_exact(trajectory, s.servers[1])


async def test_a_label_that_changed_during_a_call_proves_nothing() -> None:
    """X17: restarted with what it was started with, or loaded by another run, in the middle."""
    async with scene(Mode.WELL) as s:
        (server,) = s.servers
        server.delay_s = 0.2
        running = asyncio.ensure_future(s.run())
        await until(lambda: server.calls)
        server.label = "other:3:x"
        trajectory = await running
        (sequence,) = trajectory.sequences
        assert sequence.span_kind_S.tolist() == [SpanKind.CONTEXT, SpanKind.SAMPLED]


@pytest.mark.parametrize("announced", [False, True])
async def test_a_first_publication_during_a_call_leaves_it_the_version_that_the_run_began_with(
    announced: bool,
) -> None:
    async with scene(Mode.WELL) as s:
        s.labels = ("default",)
        s.current_weights = (PolicyVersion(0), RunWeights("tag"))
        s.servers[0].delay_s = 0.2
        running = asyncio.ensure_future(s.run())
        await until(lambda: s.servers[0].calls)
        weights = RunWeights("tag", published=True, announced=announced)
        s.current_weights = (PolicyVersion(1), weights)
        (sequence,) = (await running).sequences
        assert sequence.span_version_S.tolist() == [-1, 0]


async def test_a_cancelled_attempt_leaves_no_task_behind() -> None:
    async with scene(Mode.STALLED) as s:
        running = asyncio.ensure_future(s.run())
        await until(lambda: s.servers[0].calls)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0)
        waiting = [task for task in asyncio.all_tasks() if "Event.wait" in repr(task.get_coro())]
        assert not waiting


async def test_a_server_that_does_not_open_delays_nobody() -> None:
    """No lock is held across a probe."""
    async with scene(Mode.WELL) as s:
        opening = asyncio.Event()
        open_well = s._open

        async def open_(url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
            if url == "http://frozen":
                opening.set()
                await asyncio.Event().wait()
            return await open_well(url, renderer, keyed)

        backends = Backends(open_)
        frozen = asyncio.ensure_future(backends.get("http://frozen", RENDERER))
        await opening.wait()
        async with asyncio.timeout(60):
            assert (await backends.get(s.servers[0].url, RENDERER)).name == s.servers[0].url
        frozen.cancel()
        await asyncio.gather(frozen, return_exceptions=True)
        await backends.close()


async def test_the_key_goes_to_servers_that_the_operator_named() -> None:
    opened: list[tuple[str, bool]] = []

    async def open_(url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
        opened.append((url, keyed))
        raise BackendError(FailureCode.BACKEND_UNAVAILABLE, "away")

    backends = Backends(open_, has_key=True)
    early = asyncio.ensure_future(backends.get("http://ours", RENDERER))
    await asyncio.sleep(0.05)
    assert not opened, "before the gateway has said who may have it, nobody is asked"
    backends.update_pool(dead=[], keyed=["http://ours"])
    with pytest.raises(BackendError):
        await early
    opened.clear()
    for url in ("http://ours", "http://theirs"):
        with pytest.raises(BackendError):
            await backends.get(url, RENDERER)
    assert opened == [("http://ours", True), ("http://theirs", False)]


async def test_a_server_that_is_busy_is_waited_for_as_it_says_and_charged_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often it puts the call off: neither a fault nor time of the budget."""
    monkeypatch.setattr(failover, "MAX_FAULTS", 2)
    async with scene(Mode.BUSY) as s:
        (server,) = s.servers
        server.retry_after = "0.05"
        running = asyncio.ensure_future(s.run())
        await until(lambda: len(server.calls) > 3)
        assert not running.done()
        server.mode = Mode.WELL
        trajectory = await running
        assert trajectory.stop_reason is StopReason.DONE
        assert {request.trouble for request in s.failovers} == {BackendFault.BUSY}
        assert s.free_s() > 0.05 * 3, "it waited, and the budget stood still"


def test_fewer_calls_at_a_time_go_to_a_server_that_is_busy() -> None:
    flow = Flow()
    flow.in_flight = 31
    assert flow.wait_s(0.0) == 0.0
    for _ in range(16):  # a burst counts once
        flow.busy(0.0, 2.0, 0.0)
    assert flow.wait_s(0.0) == 2.0
    flow.in_flight = 16
    assert flow.wait_s(2.0) > 0.0, "half of what it had"
    flow.in_flight = 15
    assert flow.wait_s(2.0) == 0.0
    for now in (3.0, 100.0, 200.0, 300.0, 400.0, 500.0):
        flow.busy(now, 0.0, 0.0)
    assert flow.limit == 1.0, "one asks on"
    assert flow.free_at - 500.0 == LAST_BUSY_S
    for _ in range(200):
        flow.well()
    assert 10 < flow.limit < 32, "more again, step by step"


async def test_a_call_that_a_later_call_overtook_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is well and answers others: this call it has lost."""
    monkeypatch.setattr(failover, "OVERTAKEN_S", 1.0)
    async with scene(Mode.SILENT, Mode.WELL) as s:
        lost, _ = s.servers
        lost.answers_probes = True
        trajectory = await asyncio.wait_for(s.run(), 100)
        assert trajectory.stop_reason is StopReason.DONE
        assert [request.trouble for request in s.failovers] == [BackendFault.SILENT]


async def test_a_call_in_a_queue_that_nobody_leaves_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover, "OVERTAKEN_S", 0.3)
    async with scene(Mode.SILENT, Mode.WELL) as s:
        running = asyncio.ensure_future(s.run())
        await asyncio.sleep(2.0)
        assert not s.failovers, "the whole server is slow: no sign that this call is lost"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
