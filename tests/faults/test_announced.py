"""Weights that a trainer sends itself, under fire: three servers are updated out of band, one is
started anew between its weights and their announcement, one is late, one is not even paused. Each
stored logprob that trains is that of a forward pass with the version that its span names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from prorl.backends.embedded import TOY
from prorl.client.client import Client
from prorl.deploy.running import client_of, service, signals
from prorl.errors import ConflictError
from prorl.types import Json
from tests.faults.test_weights import (
    BOUND,
    VERSIONS,
    WAVE,
    checkpoint,
    embedded,
    says,
    worst_gap,
)
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import Listening, settings, struck

SLOW = "say it again"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


async def send(server: Listening, path: Path, version: int, label: str) -> None:
    """Sends weights by the trainer's own channel: the service hears nothing of it."""
    body = {"path": str(path), "version": version, "label": label}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/update_weights", json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()


async def failed(call: Callable[[], dict[str, Json]]) -> Json:
    """Returns the servers for which a call failed, once every slow server has been asked again."""
    while True:
        try:
            servers: dict[str, str] = (await asyncio.to_thread(call))["failed"]
        except ConflictError as error:  # not one of them was believed
            if SLOW not in str(error):
                raise
        else:
            if not any(SLOW in why for why in servers.values()):
                return servers


async def under_fire(client: Client, folder: Path, pool: list[Listening]) -> dict[str, int]:
    """Versions announced in turn; how often a server was believed, and how often not."""
    seen = {"believed": 0, "refused": 0}
    for version in range(1, VERSIONS + 1):
        path = await asyncio.to_thread(checkpoint, folder, version)
        restarted, late, unpaused = (pool[(version + i) % 3] for i in range(3))
        label = f"own-{version}"
        paused = [restarted.url, late.url]
        assert await failed(partial(client.pause_backends, paused)) == {}
        for server in (restarted, unpaused):
            await send(server, path, version, label)
        if version % 2:
            await restarted.kill()
            await restarted.start()
        labels = {restarted.url: label, unpaused.url: label}
        refused = await failed(partial(client.announce, "r", version, labels))
        assert list(refused) == ([restarted.url] if version % 2 else [])
        seen["refused"] += len(refused)
        seen["believed"] += 2 - len(refused)
        await failed(partial(client.resume_backends, [restarted.url]))
        await asyncio.sleep(0.2)
        await send(late, path, version, label)
        assert await failed(partial(client.announce, "r", version, {late.url: label})) == {}
        seen["believed"] += 1
        assert await failed(partial(client.resume_backends, [late.url])) == {}
        await asyncio.sleep(0.1)
    return seen


async def test_no_token_is_labelled_with_weights_that_its_server_had_not(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    async with embedded(3) as pool:
        urls, more = [server.url for server in pool], {"tokenizer": str(TOY), "run": {"slots": 16}}
        config = settings(root, sandbox_kind, *urls, **more)
        async with signals() as stop, service(config, stop) as running:
            client = client_of(running)
            await asyncio.to_thread(
                client.create_run, run_id="r", sampling={"max_tokens": 96}, limits={}
            )
            firing = under_fire(client, tmp_path, pool)
            expected, seen = await struck(running, client, firing, says, WAVE)
    stored = check_complete(root / "r", expected)
    counts = rows(stored, "select status, count(*) as n from rollouts group by 1")
    assert [row["status"] for row in counts] == ["completed"]
    directories = {0: TOY} | {n: tmp_path / f"v{n}" for n in range(1, VERSIONS + 1)}
    worst, trained, unknown = await asyncio.to_thread(worst_gap, stored, directories)
    (versions,) = rows(stored, "select count(distinct max_version) as n from rollouts")
    print(
        f"{expected} rollouts, {seen}, {trained} spans of {versions['n']} versions,"
        f" {unknown} unknown, worst {worst:.1e}"
    )
    assert worst < BOUND
    assert (await asyncio.to_thread(worst_gap, stored, directories, 1))[0] > BOUND, "it would show"
    assert trained > expected / 2
