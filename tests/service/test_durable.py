"""Nothing is told before it is on disk: every promise waits for its transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from prorl.control import (
    CommitCursor,
    CommitPart,
    CommittedRollout,
    Kind,
    Reserve,
    Rows,
    from_batch,
)
from prorl.errors import StorageError
from prorl.service.log.log import ControlLog, Write
from prorl.types import Json
from tests.service.running_gateway import GatewayHarness, group, handout, running_gateway, settings

T = TypeVar("T")


class Gated(ControlLog):
    """A disk that takes as long as the test wants."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.open = threading.Event()
        self.open.set()

    def write_now(self, writes: Sequence[Write]) -> None:
        assert self.open.wait(10)
        super().write_now(writes)


class Full(ControlLog):
    """A disk that is full from some moment on."""

    full = False

    def write_now(self, writes: Sequence[Write]) -> None:
        super().write_now([("INSERT INTO nowhere VALUES (1)", [()])] if self.full else writes)


async def promised(log: Gated, promise: Coroutine[None, None, T]) -> T:
    """Check that a promise is not made while the disk writes; its value once it has written."""
    log.open.clear()
    waiting = asyncio.ensure_future(promise)
    await asyncio.sleep(0.25)
    early = waiting.done()
    log.open.set()
    value = await waiting
    assert not early, f"told before it was on disk: {value}"
    return value


async def test_every_promise_waits_for_its_transaction(tmp_path: Path) -> None:
    log = Gated(settings(tmp_path).root / "control.db")
    async with (
        running_gateway(tmp_path, log=log) as w,
        w.worker("init") as init,
        w.worker("store") as store,
    ):
        await promised(log, w.run(delivery="stream"))
        await promised(log, w.submit(group("a"), group("b"), group("c")))
        keys = await init.take(3)

        await promised(log, store.ask(Reserve(attempts=tuple(keys[:2]))))
        rows = tuple(
            CommittedRollout(rollout_id=key.rollout_id, attempt=key.attempt, reward=1.0)
            for key in keys[:2]
        )
        await promised(log, store.ask(CommitPart(part="p", rollouts=rows), "r"))
        await promised(log, store.decide("r", 0, 1))
        await promised(log, store.ask(handout([[0, 0]]), "r"))
        await promised(log, store.ask(CommitCursor(consumer="primary", seq=1), "r"))
        await promised(log, w.http("DELETE", "/v1/runs/r/rollouts/2"))


async def test_a_lease_is_on_disk_before_it_is_sent(tmp_path: Path) -> None:
    log = Gated(settings(tmp_path).root / "control.db")
    async with running_gateway(tmp_path, log=log) as w:
        await w.run()
        await w.submit(group())

        async def leased(w: GatewayHarness) -> Json:
            async with w.worker("init") as init:
                return await init.take()

        await promised(log, leased(w))
        assert log.read("SELECT attempt FROM rollouts") == [(1,)] or log.read(
            "SELECT worker_losses FROM rollouts"
        ) == [(1,)]


async def test_a_log_that_cannot_be_written_ends_the_gateway_and_promises_nothing(
    tmp_path: Path,
) -> None:
    log = Full(settings(tmp_path).root / "control.db")
    async with running_gateway(tmp_path, log=log) as w:
        await w.run()
        log.full = True
        status, answer = await w.http(
            "POST", "/v1/runs/r/groups", {"groups": [group().model_dump(mode="json")]}
        )
        assert (status, answer["code"]) == (507, "storage")
        with pytest.raises(ExceptionGroup) as caught:
            await w.served.failed()
        assert caught.group_contains(StorageError)
    async with running_gateway(tmp_path) as w:
        assert (await w.view())["counts"]["queued"] == 0


async def test_a_store_that_comes_back_hears_of_a_run_before_its_outbox(
    tmp_path: Path,
) -> None:
    log = Gated(settings(tmp_path).root / "control.db")
    async with running_gateway(tmp_path, log=log) as w, w.worker("store") as store:
        await w.run()
        await w.submit(group(n=2))
        await store.hear(Kind.ROWS)
        log.open.clear()
        w.core.set_backend("scripted:other", "ready")
        flying = asyncio.ensure_future(w.served.gateway.durable())
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            channel = await w.dial("store", store.name)
            await asyncio.sleep(0.1)
            w.core.cancel_run(w.core.run("r"))
            log.open.set()
            await flying
            kinds: list[Kind] = []
            while Kind.RUN not in kinds:
                batch = await channel.receive()
                assert batch is not None
                kinds += [row.kind for row in from_batch(batch)]
        assert not {Kind.TERMINAL, Kind.GROUP_COMPLETE} & set(kinds)
        await channel.close()


async def test_a_store_that_comes_back_serves_in_the_order_of_decisions(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init:
        await w.run()
        await w.submit(*(group(str(i)) for i in range(3)))
        keys = await init.take(3)
        async with w.worker("store") as store:
            await store.commit("r", "p", keys)
            for group_id in (2, 0, 1):
                await store.decide("r", group_id)
        async with w.worker("store") as store:
            control_rows = await store.hear(Kind.ROWS, 4)
            events = [event for row in control_rows for event in row.read(Rows).events]
            assert [event.group_id for event in events] == [2, 0, 1]
