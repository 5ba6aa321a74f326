"""Weights that a trainer sends itself: who is believed, who is fenced, what a restart remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.control import Kind, Paused
from prorl.types import Json
from tests.service.running_gateway import GatewayHarness, running_gateway
from tests.service.test_publish import ModelServer, servers, urls
from tests.waiting import until


async def announce(w: GatewayHarness, version: int, **labels: str) -> tuple[int, Json]:
    named = [{"backend": url, "label": label} for url, label in labels.items()]
    return await w.http("POST", "/v1/runs/r/versions", {"version": version, "announce": named})


async def hold(w: GatewayHarness, what: str, *model_servers: ModelServer) -> Json:
    status, reply = await w.http(
        "POST", f"/v1/backends/{what}", {"names": list(urls([*model_servers]))}
    )
    assert status == 200, reply
    return reply["failed"]


async def test_a_paused_server_is_announced_and_serves_again(tmp_path: Path) -> None:
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
        w.worker("run") as run,
    ):
        await w.run()
        first, second = model_servers
        assert await hold(w, "pause", first) == {}
        assert first.paths[0] == "/pause?mode=abort"
        assert first.version.startswith("held:"), "its tokens are of no version from here on"
        assert w.core.state.balancer.fenced == {first.url}
        (row,) = await run.hear(Kind.PAUSED)
        assert row.read(Paused) == Paused(backend=first.url, paused=True)
        async with w.worker("run", "run-1") as late:
            assert [row.read(Paused).paused for row in await late.hear(Kind.PAUSED)] == [True]

        answer = {"run_id": "r", "version": 1, "failed": {}, "pending": False, "verified": False}
        expected = (201, answer)
        assert await announce(w, 1, **{first.url: ""}) == expected
        assert first.number == "1"
        assert (await w.view())["version"] == 1
        assert w.core.state.balancer.fenced == {first.url, second.url}
        assert await hold(w, "resume", first) == {}
        assert w.core.state.balancer.fenced == {second.url}, "it has not the newest weights"
        assert [row.read(Paused).paused for row in await run.hear(Kind.PAUSED, 2)] == [True, False]

        second.version = "step-1"
        again = await announce(w, 1, **{second.url: "step-1"})
        assert again == (200, expected[1])
        assert not w.core.state.balancer.fenced
        assert not any(
            "update_weights" in path for server in model_servers for path in server.paths
        )


@pytest.mark.parametrize(
    ("stated", "label", "problem"),
    [
        ("0", "", "not known to have them"),
        ("0", "0", "not known to have them"),
        ("step-0", "step-1", "states 'step-0' instead of 'step-1'"),
    ],
)
async def test_who_cannot_have_them_is_not_believed(
    tmp_path: Path, stated: str, label: str, problem: str
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.version = stated
        status, reply = await announce(w, 1, **{server.url: label})
        assert status == 409
        assert problem in reply["message"]
        assert server.version == stated
        assert (await w.view())["version"] == 0
        assert not w.core.state.balancer.fenced, "nothing is known to be newer"


async def test_a_server_started_anew_between_pause_and_announcement_is_not_believed(
    tmp_path: Path,
) -> None:
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
    ):
        await w.run()
        await hold(w, "pause", *model_servers)
        model_servers[0].version = "default"
        status, reply = await announce(w, 1, **dict.fromkeys(urls(model_servers), ""))
        assert status == 201
        assert list(reply["failed"]) == [model_servers[0].url]
        failed = await hold(w, "resume", *model_servers)
        assert list(failed) == [model_servers[0].url]
        assert w.core.state.balancer.fenced == {model_servers[0].url}


async def test_announced_weights_are_compared_before_they_get_rollouts(tmp_path: Path) -> None:
    """A server that states a label at once, one that stood paused when it resumes."""
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
    ):
        labelled, paused = model_servers
        labelled.serves = paused.serves = True
        await w.run()
        await hold(w, "pause", paused)
        labelled.version = "step-1"
        named = [
            {"backend": labelled.url, "label": "step-1"},
            {"backend": paused.url, "label": ""},
        ]
        other = {"prompt_ids": [1, 2], "ids": [64, 65], "logprobs": [-0.5, -3.0]}
        body = {"version": 1, "announce": named, "expected": other}
        status, reply = await w.http("POST", "/v1/runs/r/versions", body)
        assert (status, reply["verified"]) == (201, True)
        assert "2 from those of the trainer" in reply["failed"][labelled.url]
        failed = await hold(w, "resume", paused)
        assert "2 from those of the trainer" in failed[paused.url]
        assert w.core.state.balancer.fenced == {labelled.url, paused.url}
        own = {**other, "logprobs": [-0.5, -1.05]}
        await hold(w, "pause", *model_servers)
        body = {"version": 2, "announce": [{"backend": url} for url in urls(model_servers)]}
        assert (await w.http("POST", "/v1/runs/r/versions", {**body, "expected": own}))[0] == 201
        assert await hold(w, "resume", *model_servers) == {}
        assert not w.core.state.balancer.fenced


async def test_what_is_resumed_without_an_announcement_stays_fenced(tmp_path: Path) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        await hold(w, "pause", server)
        failed = await hold(w, "resume", server)
        assert "no version was announced" in failed[server.url]
        assert not server.paused
        assert w.core.state.balancer.fenced == {server.url}


async def test_a_server_slow_to_state_its_weights_is_resumed_by_the_second_request(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        assert await hold(w, "pause", server) == {}
        assert (await announce(w, 1, **{server.url: ""}))[0] == 201
        server.freezes_at = "/weight_info"
        assert "say it again" in (await hold(w, "resume", server))[server.url]
        server.freezes_at, server.silent = "", False
        assert await hold(w, "resume", server) == {}
        assert not w.core.state.balancer.fenced


async def test_a_server_that_lost_announced_weights_is_fenced_and_not_updated(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.version = "mine"
        assert (await announce(w, 1, **{server.url: "mine"}))[0] == 201
        server.version = "default"
        await until(lambda: w.core.state.balancer.fenced)
        assert server.paths == ["/update_weight_version"]


async def test_a_restarted_gateway_remembers_paused_servers_and_announcements(
    tmp_path: Path,
) -> None:
    async with servers(2) as model_servers:
        async with running_gateway(tmp_path, backends=urls(model_servers)) as w:
            await w.run()
            model_servers[0].version = model_servers[1].version = "mine"
            await announce(w, 1, **dict.fromkeys(urls(model_servers), "mine"))
            await hold(w, "pause", model_servers[1])
        async with (
            running_gateway(tmp_path, backends=urls(model_servers)) as w,
            w.worker("run") as run,
        ):
            await until(lambda: w.core.state.balancer.fenced == {model_servers[1].url})
            (row,) = await run.hear(Kind.PAUSED)
            assert row.read(Paused).backend == model_servers[1].url
            assert model_servers[1].paused, "a trainer sends it weights"
            assert (await announce(w, 2, **{model_servers[1].url: ""}))[0] == 201
            assert await hold(w, "resume", model_servers[1]) == {}
            assert w.core.state.balancer.fenced == {model_servers[0].url}


async def test_a_servers_weights_are_loaded_or_announced_but_never_assumed(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        status, reply = await w.http("POST", "/v1/runs/r/versions", {"version": 1})
        assert (status, "announce" in reply["message"]) == (422, True)
        assert (await announce(w, 1, **{"http://127.0.0.1:1": "x"}))[0] == 422
        status, reply = await w.http("POST", "/v1/backends/pause", {"names": ["http://other:1"]})
        assert status == 404
