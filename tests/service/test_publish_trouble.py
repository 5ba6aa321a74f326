"""Publications while servers are away, removed or paused by somebody who died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.errors import ConflictError
from prorl.types import BackendFault
from tests.service.running_gateway import running_gateway
from tests.service.test_publish import say, servers, urls
from tests.waiting import until


async def test_a_run_with_unreachable_servers_delays_no_other_publication(
    tmp_path: Path,
) -> None:
    async with servers(2) as (well, dead), running_gateway(tmp_path, backends=(well.url,)) as w:
        dead.serves = True
        await w.run("lost", backends=[dead.url])
        await w.run()
        dead.silent = True
        w.core.watched.reported(dead.url, BackendFault.REFUSED, 1, 1, "reset")
        publisher, lost = w.served.gateway.publisher, w.core.run("lost")
        pending = asyncio.ensure_future(publisher.publish(lost, 1, "/w/1", wait_s=60.0))
        async with asyncio.timeout(60):
            assert (await say(w, "/w/b"))[0] == 201
            assert (await w.http("DELETE", "/v1/runs/lost"))[0] == 200
            with pytest.raises(ConflictError, match="which has ended"):
                await pending


async def test_a_run_is_published_when_its_server_returns(tmp_path: Path) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        server.serves = True
        await w.run()
        w.core.watched.reported(server.url, BackendFault.REFUSED, 1, 1, "reset")
        assert w.core.watched.health(server.url).is_out
        async with asyncio.timeout(60):
            assert (await say(w, "/w/1"))[0] == 201
        assert (server.path, server.number) == ("/w/1", "1")


async def test_a_backend_removed_in_the_middle_counts_as_not_updated(
    tmp_path: Path,
) -> None:
    async with (
        servers(3) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
    ):
        await w.run()
        model_servers[0].waits_at = "/pause"  # and the others for their turn
        saying = asyncio.ensure_future(say(w, "/w/1"))
        async with asyncio.timeout(60):
            await until(lambda: model_servers[0].paths)
            assert (await w.http("DELETE", f"/v1/backends?name={model_servers[1].url}"))[0] == 200
            model_servers[0].go_on.set()
            status, answer = await saying
        assert (status, [server.number for server in model_servers]) == (201, ["1", "0", "1"])
        assert answer["failed"] == {model_servers[1].url: f"{model_servers[1].url} was removed"}


async def test_a_server_paused_by_a_dead_gateway_is_resumed_by_its_successor(
    tmp_path: Path,
) -> None:
    """It died between the pause and the update: the label is still right."""
    async with servers(1) as (server,):
        async with running_gateway(tmp_path, backends=(server.url,)) as w:
            await w.run()
            assert (await say(w, "/w/1"))[0] == 201
        server.paused = True
        async with running_gateway(tmp_path, backends=(server.url,)) as w, asyncio.timeout(60):
            await until(
                lambda: not (server.paused or w.core.state.balancer.state(server.url) != "ready")
            )
        assert server.paths.count("/update_weights") == 1


@pytest.mark.parametrize("lost", ["/pause", "/resume"])
async def test_a_server_does_not_stay_paused_though_its_answer_was_lost(
    tmp_path: Path, lost: str
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.fails_at = lost
        if lost == "/resume":
            server.resumes = False
        assert (await say(w, "/w/1"))[0] == 503
        assert server.paused == (lost == "/resume")
        server.resumes, server.fails_at = True, ""
        await until(
            lambda: not (server.paused or w.core.state.balancer.state(server.url) != "ready")
        )
        assert server.number == "1"
