"""Weights that a trainer sends itself: who is believed, who is fenced, what a restart remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.control import Kind, Paused
from prorl.types import Json
from tests.service.test_publish import ModelServer, servers, urls
from tests.service.world import World, world
from tests.waiting import until


async def announce(w: World, version: int, **labels: str) -> tuple[int, Json]:
    named = [{"backend": url, "label": label} for url, label in labels.items()]
    return await w.http("POST", "/v1/runs/r/versions", {"version": version, "announce": named})


async def hold(w: World, what: str, *found: ModelServer) -> Json:
    status, said = await w.http("POST", f"/v1/backends/{what}", {"names": list(urls([*found]))})
    assert status == 200, said
    return said["failed"]


async def test_a_held_server_is_announced_and_serves_again(tmp_path: Path) -> None:
    async with (
        servers(2) as found,
        world(tmp_path, backends=urls(found)) as w,
        w.worker("run") as run,
    ):
        await w.run()
        first, second = found
        assert await hold(w, "pause", first) == {}
        assert first.said[0] == "/pause?mode=abort"
        assert first.version.startswith("held:"), "its tokens are of no version from here on"
        assert w.core.state.balancer.fenced == {first.url}
        (row,) = await run.hear(Kind.PAUSED)
        assert row.read(Paused) == Paused(backend=first.url, paused=True)
        async with w.worker("run", "run-1") as late:
            assert [row.read(Paused).paused for row in await late.hear(Kind.PAUSED)] == [True]

        answer = {"run_id": "r", "version": 1, "failed": {}, "pending": False, "verified": False}
        said = (201, answer)
        assert await announce(w, 1, **{first.url: ""}) == said
        assert first.number == "1"
        assert (await w.view())["version"] == 1
        assert w.core.state.balancer.fenced == {first.url, second.url}
        assert await hold(w, "resume", first) == {}
        assert w.core.state.balancer.fenced == {second.url}, "it has not the newest weights"
        assert [row.read(Paused).paused for row in await run.hear(Kind.PAUSED, 2)] == [True, False]

        second.version = "step-1"
        again = await announce(w, 1, **{second.url: "step-1"})
        assert again == (200, said[1])
        assert not w.core.state.balancer.fenced
        assert not any("update_weights" in path for server in found for path in server.said)


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
    async with servers(1) as (server,), world(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.version = stated
        status, said = await announce(w, 1, **{server.url: label})
        assert status == 409
        assert problem in said["message"]
        assert server.version == stated
        assert (await w.view())["version"] == 0
        assert not w.core.state.balancer.fenced, "nothing is known to be newer"


async def test_a_server_started_anew_between_pause_and_announcement_is_not_believed(
    tmp_path: Path,
) -> None:
    async with servers(2) as found, world(tmp_path, backends=urls(found)) as w:
        await w.run()
        await hold(w, "pause", *found)
        found[0].version = "default"
        status, said = await announce(w, 1, **dict.fromkeys(urls(found), ""))
        assert status == 201
        assert list(said["failed"]) == [found[0].url]
        told = await hold(w, "resume", *found)
        assert list(told) == [found[0].url]
        assert w.core.state.balancer.fenced == {found[0].url}


async def test_announced_weights_are_compared_before_they_get_rollouts(tmp_path: Path) -> None:
    """A server that states a label at once, one that stood paused when it resumes."""
    async with servers(2) as found, world(tmp_path, backends=urls(found)) as w:
        labelled, paused = found
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
        status, said = await w.http("POST", "/v1/runs/r/versions", body)
        assert (status, said["verified"]) == (201, True)
        assert "2 from those of the trainer" in said["failed"][labelled.url]
        told = await hold(w, "resume", paused)
        assert "2 from those of the trainer" in told[paused.url]
        assert w.core.state.balancer.fenced == {labelled.url, paused.url}
        own = {**other, "logprobs": [-0.5, -1.05]}
        await hold(w, "pause", *found)
        body = {"version": 2, "announce": [{"backend": url} for url in urls(found)]}
        assert (await w.http("POST", "/v1/runs/r/versions", {**body, "expected": own}))[0] == 201
        assert await hold(w, "resume", *found) == {}
        assert not w.core.state.balancer.fenced


async def test_what_is_resumed_without_an_announcement_stays_fenced(tmp_path: Path) -> None:
    async with servers(1) as (server,), world(tmp_path, backends=(server.url,)) as w:
        await w.run()
        await hold(w, "pause", server)
        told = await hold(w, "resume", server)
        assert "no version was announced" in told[server.url]
        assert not server.paused
        assert w.core.state.balancer.fenced == {server.url}


async def test_a_server_that_is_slow_to_state_its_weights_is_resumed_when_it_is_said_again(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), world(tmp_path, backends=(server.url,)) as w:
        await w.run()
        assert await hold(w, "pause", server) == {}
        assert (await announce(w, 1, **{server.url: ""}))[0] == 201
        server.freezes_at = "/weight_info"
        assert "say it again" in (await hold(w, "resume", server))[server.url]
        server.freezes_at, server.silent = "", False
        assert await hold(w, "resume", server) == {}
        assert not w.core.state.balancer.fenced


async def test_a_server_that_lost_announced_weights_is_fenced_and_told_of_them_by_nobody(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), world(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.version = "mine"
        assert (await announce(w, 1, **{server.url: "mine"}))[0] == 201
        server.version = "default"
        await until(lambda: w.core.state.balancer.fenced)
        assert server.said == ["/update_weight_version"]


async def test_a_restart_of_the_gateway_remembers_who_is_held_and_what_was_announced(
    tmp_path: Path,
) -> None:
    async with servers(2) as found:
        async with world(tmp_path, backends=urls(found)) as w:
            await w.run()
            found[0].version = found[1].version = "mine"
            await announce(w, 1, **dict.fromkeys(urls(found), "mine"))
            await hold(w, "pause", found[1])
        async with world(tmp_path, backends=urls(found)) as w, w.worker("run") as run:
            await until(lambda: w.core.state.balancer.fenced == {found[1].url})
            (row,) = await run.hear(Kind.PAUSED)
            assert row.read(Paused).backend == found[1].url
            assert found[1].paused, "a trainer sends it weights"
            assert (await announce(w, 2, **{found[1].url: ""}))[0] == 201
            assert await hold(w, "resume", found[1]) == {}
            assert w.core.state.balancer.fenced == {found[0].url}


async def test_a_servers_weights_are_loaded_or_announced_but_never_taken_on_trust(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), world(tmp_path, backends=(server.url,)) as w:
        await w.run()
        status, said = await w.http("POST", "/v1/runs/r/versions", {"version": 1})
        assert (status, "announce" in said["message"]) == (422, True)
        assert (await announce(w, 1, **{"http://127.0.0.1:1": "x"}))[0] == 422
        status, said = await w.http("POST", "/v1/backends/pause", {"names": ["http://other:1"]})
        assert status == 404
