"""Health that is believed: evidence, verdicts, and probes that look at each server by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prorl.config import RunConfig
from prorl.control import CallTotals
from prorl.errors import BackendError
from prorl.service.core.backend_watch import FADE_S, BackendWatch, Paces
from prorl.service.core.state import RunRecord, State
from prorl.service.pool.balancer import BackendState, Balancer
from prorl.service.pool.health import DEAD_MISSES, SLOW_MISSES, HealthVerdict, ServerHealth
from prorl.service.probes import PROBE_S, PROBE_TIMEOUT_S, Probes
from prorl.types import BackendFault, FailureCode


class Server:
    """Answers `/health` as it is told."""

    def __init__(self) -> None:
        self.well, self.silent, self.url = True, False, ""
        self.num_requests = 0

    async def health(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        if self.silent:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.well else 503)

    async def try_call(self, name: str) -> None:
        if not self.well:
            raise BackendError(FailureCode.BACKEND_UNAVAILABLE, "ill", BackendFault.ERROR)


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get("/health", server.health)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield
    await runner.cleanup()


@asynccontextmanager
async def watching(
    pool: BackendWatch, server: Server, probe_s: float = 0.01, idle_probe_s: float = 0.01
) -> AsyncIterator[None]:
    probes = Probes(pool, server.try_call, probe_s=probe_s, idle_probe_s=idle_probe_s)
    work = asyncio.ensure_future(probes.watch())
    async with asyncio.timeout(30):
        yield
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def pool_of(*names: str, on_change: Callable[[], None] = lambda: None) -> BackendWatch:
    return BackendWatch(State(Balancer(names)), asyncio.get_running_loop().time, on_change)


async def until(pool: BackendWatch, name: str, state: BackendState) -> None:
    while pool._balancer.state(name) is not state:
        await asyncio.sleep(0.01)


async def test_out_when_it_says_so_and_back_when_a_model_call_is_answered() -> None:
    server = Server()
    async with listening(server):
        changes: list[list[str]] = []
        pool = pool_of(
            server.url, "scripted:oracle", on_change=lambda: changes.append(pool.unreachable())
        )
        async with watching(pool, server):
            server.well = False
            await until(pool, server.url, BackendState.EJECTED)
            assert pool._balancer.acquire(1) == pool._balancer.acquire(2) == "scripted:oracle"
            server.well = True
            await until(pool, server.url, BackendState.READY)
            assert changes == [[server.url], []]


async def test_a_sole_server_that_refuses_is_out_at_once_and_its_silence_a_little_later() -> None:
    server = Server()
    async with listening(server):
        pool = pool_of(server.url)
        server.silent = True
        async with watching(pool, server):
            await until(pool, server.url, BackendState.EJECTED)
            assert pool.health(server.url).misses == DEAD_MISSES, "half of a pool of one is in"
    server = Server()
    async with listening(server):
        pool = pool_of(server.url)
    async with watching(pool, server):
        await until(pool, server.url, BackendState.EJECTED)
        assert pool.health(server.url).misses == 1


async def test_a_frozen_server_is_out_by_its_probes_alone() -> None:
    """Nothing is asked of it but its health, so that no reply's silence says anything."""
    server, other = Server(), Server()
    async with listening(server), listening(other):
        pool = pool_of(server.url, other.url)
        async with watching(pool, server):
            while not server.num_requests:
                await asyncio.sleep(0.01)
            server.silent, server.num_requests = True, 0
            await until(pool, server.url, BackendState.EJECTED)
            assert pool.health(server.url).misses == server.num_requests == SLOW_MISSES
            assert pool._balancer.state(other.url) is BackendState.READY
    assert PROBE_S + SLOW_MISSES * PROBE_TIMEOUT_S < 3.0, "from the freeze to the verdict"


@pytest.mark.parametrize("is_open", [False, True])
async def test_the_interval_depends_on_whether_a_run_is_open(is_open: bool) -> None:
    server = Server()
    async with listening(server):
        pool = pool_of(server.url)
        if is_open:
            pool._state.open["r"] = RunRecord(config=RunConfig(run_id="r"), created_at=0.0)
        intervals = (0.01, 300.0) if is_open else (300.0, 0.01)
        async with watching(pool, server, *intervals):
            while server.num_requests < 3:
                await asyncio.sleep(0.01)


async def test_a_name_that_no_resolver_takes_is_that_names_trouble() -> None:
    server, odd = Server(), f"http://{'x' * 64}.org"
    async with listening(server):
        pool = pool_of(odd, server.url)
        async with watching(pool, server):
            await until(pool, odd, BackendState.EJECTED)
            server.well = False
            await until(pool, server.url, BackendState.EJECTED)


async def test_reports_of_run_open_the_breaker() -> None:
    """`/health` answers all the while: each model call fails, or lies."""
    pool = pool_of("http://a", "http://b")
    for trouble, faults, calls, out in (
        (BackendFault.ERROR, 2, 2, False),
        (BackendFault.ERROR, 3, 20, False),
        (BackendFault.BUSY, 20, 20, False),
        (BackendFault.DECLINED, 20, 20, False),
        (BackendFault.SILENT, 1, 1, False),
        (BackendFault.MALFORMED, 3, 20, True),
    ):
        pool.reported("http://a", trouble, faults, calls, "it")
        assert pool.health("http://a").is_out is out, trouble
    doubted = [name for name, doubt in pool.doubts.items() if doubt.is_set()]
    assert doubted == ["http://a"], "silence is looked into at once"
    pool.reported("http://b", BackendFault.REFUSED, 1, 20, "it")
    assert pool.unreachable() == ["http://a", "http://b"], "whoever is left"
    pool.reported("scripted:faulty", BackendFault.REFUSED, 9, 9, "it")
    assert "scripted:faulty" not in pool.unreachable()


@pytest.mark.parametrize(
    ("troubles", "verdict"),
    [
        ([BackendFault.SILENT] * (SLOW_MISSES - 1), HealthVerdict.NONE),
        (
            [BackendFault.SILENT] * (SLOW_MISSES - 1) + [None, BackendFault.SILENT],
            HealthVerdict.NONE,
        ),
        ([BackendFault.SILENT] * SLOW_MISSES, HealthVerdict.SLOW),
        ([BackendFault.SILENT] * DEAD_MISSES, HealthVerdict.DEAD),
        ([BackendFault.REFUSED], HealthVerdict.DEAD),
        ([BackendFault.ERROR], HealthVerdict.DEAD),
    ],
)
def test_probes_give_verdicts(troubles: list[BackendFault | None], verdict: HealthVerdict) -> None:
    health = ServerHealth()
    assert [health.probe(trouble) for trouble in troubles][-1] is verdict


def test_a_server_that_flaps_is_tried_later_each_time_until_it_is_steady() -> None:
    health, waits, now = ServerHealth(), list[float](), 1000.0
    for _ in range(4):
        health.out(now, "it")
        waits.append(health.back_at - now)
        health.back(now + 1)
        now += 2
    assert waits == sorted(set(waits))
    health.out(now + 1000, "it")
    assert health.back_at - now - 1000 == waits[0]


async def test_a_drain_is_not_ended_by_good_health() -> None:
    server = Server()
    async with listening(server):
        pool = pool_of(server.url)
        pool._balancer.drain(server.url)
        pool.reported(server.url, BackendFault.REFUSED, 1, 1, "it")
        async with watching(pool, server):
            await until(pool, server.url, BackendState.DRAINING)
            assert not pool._balancer.able()


def test_a_server_of_a_third_of_the_speed_gets_fewer_and_is_tried_again() -> None:
    now = [0.0]
    paces, balancer = Paces(lambda: now[0]), Balancer(["fast", "slow"])
    paces.add("fast", CallTotals(sampled=1000, llm_s=10.0))
    paces.add("slow", CallTotals(sampled=1000, llm_s=30.0))
    balancer.weigh(paces.weights())
    for rollout in range(100):
        balancer.acquire(rollout)
    assert balancer.in_flight("slow") == 10
    now[0] = 20 * FADE_S
    balancer.weigh(paces.weights())
    assert balancer.acquire(100) == "slow", "what was measured long ago is forgotten"
    balancer.weigh({})
    assert balancer.acquire(101) == "slow"


def test_small_differences_and_few_tokens_weigh_nothing() -> None:
    paces = Paces(lambda: 0.0)
    paces.add("a", CallTotals(sampled=1000, llm_s=10.0))
    paces.add("b", CallTotals(sampled=1000, llm_s=12.0))
    paces.add("c", CallTotals(sampled=10, llm_s=10.0))
    assert dict(paces.weights()) == {"a": 1.0, "b": 1.0}
    paces.forget("a")
    assert dict(paces.weights()) == {"b": 1.0}
