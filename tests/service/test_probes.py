"""Backends that stop answering get no new rollouts, and get them again when they answer."""

from __future__ import annotations

import asyncio

from aiohttp import web

from prorl.service.balancer import BackendState, Balancer
from prorl.service.probes import MAX_MISSES, Probes


async def test_ejected_when_it_stops_and_back_when_it_answers() -> None:
    well = True

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=200 if well else 503)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    name = f"http://{host}:{port}"
    balancer, woken = Balancer([name, "scripted:oracle"]), asyncio.Event()
    watching = asyncio.ensure_future(Probes(balancer, woken.set, probe_s=0.01).watch())
    async with asyncio.timeout(30):
        await asyncio.sleep(0.1)
        assert balancer.states[name] is BackendState.READY
        well = False
        while balancer.states[name] is BackendState.READY:
            await asyncio.sleep(0.01)
        assert balancer.acquire(1) == balancer.acquire(2) == "scripted:oracle"
        well = True
        await woken.wait()
        assert balancer.states[name] is BackendState.READY
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await runner.cleanup()


def test_one_missed_answer_is_nothing_and_a_drain_is_not_ended() -> None:
    balancer = Balancer(["http://a", "http://b"])
    probes = Probes(balancer, lambda: None)
    for _ in range(MAX_MISSES - 1):
        probes.heard("http://a", False)
    probes.heard("http://a", True)
    probes.heard("http://a", False)
    assert balancer.states["http://a"] is BackendState.READY
    balancer.drain("http://b")
    for well in [False] * MAX_MISSES + [True]:
        probes.heard("http://b", well)
    assert balancer.states["http://b"] is BackendState.DRAINING
    probes.heard("http://gone", False)
