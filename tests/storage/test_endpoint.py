"""Runs that an endpoint does not have: searched for once, however often and impatiently asked."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from prorl.errors import NotFoundError
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.delivery import LiveOrder, OrderReply, OrderRequest
from prorl.storage.serve.endpoint import MAX_BYTES, MAX_STORED_RUNS, Endpoint, ServedRun
from prorl.storage.serve.replay import open_replay
from tests.storage.directory import new_run


class Search:
    """A search that takes until it is let go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, run_id: str) -> ServedRun | None:
        self.asked.append(run_id)
        await self.may_end.wait()
        if run_id == "gone":
            return None
        if not (self.root / run_id).exists():
            new_run(self.root, run_id)
        order, index = open_replay(self.root / run_id)
        return ServedRun(order=order, index=index)


async def ask(endpoint: Endpoint, run_id: str) -> str:
    return str(orjson.loads(await endpoint.status(orjson.dumps({"run": run_id})))["run"])


async def test_a_search_outlives_the_client_that_caused_it(tmp_path: Path) -> None:
    endpoint, search = Endpoint(tmp_path / "hot", 1 << 20), Search(tmp_path)
    endpoint.find = search
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ask(endpoint, "old")
    second, third = (asyncio.ensure_future(ask(endpoint, "old")) for _ in range(2))
    search.may_end.set()
    assert [await second, await third] == ["old", "old"]
    assert await ask(endpoint, "old") == "old"
    assert search.asked == ["old"]
    endpoint.close()


async def test_runs_that_were_found_are_bounded(tmp_path: Path) -> None:
    endpoint, search = Endpoint(tmp_path / "hot", 1 << 20), Search(tmp_path)
    endpoint.find = search
    search.may_end.set()
    names = [f"r{i}" for i in range(MAX_STORED_RUNS + 1)]
    for name in names:
        await ask(endpoint, name)
    await ask(endpoint, names[-1])
    assert search.asked == names
    await ask(endpoint, names[0])
    assert search.asked == [*names, names[0]]
    endpoint.close()


async def test_a_run_that_is_not_there_is_said_and_asked_for_again(tmp_path: Path) -> None:
    endpoint, search = Endpoint(tmp_path / "hot", 1 << 20), Search(tmp_path)
    endpoint.find = search
    search.may_end.set()
    for _ in range(2):
        with pytest.raises(NotFoundError, match="gone"):
            await ask(endpoint, "gone")
    assert search.asked == ["gone", "gone"]
    endpoint.close()


class Asked(LiveOrder):
    """An order of which is noted how much is asked for at once."""

    max_bytes = 0

    async def take(self, request: OrderRequest) -> OrderReply:
        self.max_bytes = request.max_bytes
        return OrderReply((), end=True)


def order(run_id: str) -> Asked:
    """An order that is never handed out."""
    nobody: Any = None
    return Asked(run_id, size=lambda group: 1, handout=nobody, save_cursor=nobody)


async def test_no_ticket_reads_a_whole_run_at_once(tmp_path: Path) -> None:
    endpoint, index = Endpoint(tmp_path / "hot", 1 << 20), GroupIndex(new_run(tmp_path))
    asked = order("demo")
    endpoint.add(asked, index)
    await endpoint.get(orjson.dumps({"run": "demo", "max_bytes": 2**60}))
    assert asked.max_bytes == MAX_BYTES
    endpoint.close()


async def test_a_run_that_reads_slowly_delays_no_other(tmp_path: Path) -> None:
    endpoint, held = Endpoint(tmp_path / "hot", 1 << 20), threading.Event()
    for name in ("slow", "quick"):
        endpoint.add(order(name), GroupIndex(new_run(tmp_path, name)))
    slow = asyncio.ensure_future(endpoint.on_thread("slow", held.wait))
    async with asyncio.timeout(30):
        assert (await endpoint.get(orjson.dumps({"run": "quick"}))).num_rows == 0
    assert not slow.done()
    held.set()
    await slow
    endpoint.close()
