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
from tests.storage.run_directories import new_run


class Search:
    """A search that takes until it is let go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.searches: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, run_id: str) -> ServedRun | None:
        self.searches.append(run_id)
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
    assert search.searches == ["old"]
    endpoint.close()


async def test_the_number_of_runs_from_searches_is_bounded(tmp_path: Path) -> None:
    endpoint, search = Endpoint(tmp_path / "hot", 1 << 20), Search(tmp_path)
    endpoint.find = search
    search.may_end.set()
    names = [f"r{i}" for i in range(MAX_STORED_RUNS + 1)]
    for name in names:
        await ask(endpoint, name)
    await ask(endpoint, names[-1])
    assert search.searches == names
    await ask(endpoint, names[0])
    assert search.searches == [*names, names[0]]
    endpoint.close()


async def test_a_missing_run_is_reported_and_searched_for_again(tmp_path: Path) -> None:
    endpoint, search = Endpoint(tmp_path / "hot", 1 << 20), Search(tmp_path)
    endpoint.find = search
    search.may_end.set()
    for _ in range(2):
        with pytest.raises(NotFoundError, match="gone"):
            await ask(endpoint, "gone")
    assert search.searches == ["gone", "gone"]
    endpoint.close()


class CountedOrder(LiveOrder):
    """An order of which is noted how much is asked for at once."""

    max_bytes = 0

    async def take(self, request: OrderRequest) -> OrderReply:
        self.max_bytes = request.max_bytes
        return OrderReply((), end=True)


def order(run_id: str) -> CountedOrder:
    """An order that is never handed out."""
    nobody: Any = None
    return CountedOrder(run_id, size=lambda group: 1, handout=nobody, save_cursor=nobody)


async def test_no_ticket_reads_a_whole_run_at_once(tmp_path: Path) -> None:
    endpoint, index = Endpoint(tmp_path / "hot", 1 << 20), GroupIndex(new_run(tmp_path))
    counted_order = order("demo")
    endpoint.add(counted_order, index)
    await endpoint.get(orjson.dumps({"run": "demo", "max_bytes": 2**60}))
    assert counted_order.max_bytes == MAX_BYTES
    endpoint.close()


async def test_a_run_that_reads_slowly_delays_no_other(tmp_path: Path) -> None:
    endpoint, release = Endpoint(tmp_path / "hot", 1 << 20), threading.Event()
    for name in ("slow", "quick"):
        endpoint.add(order(name), GroupIndex(new_run(tmp_path, name)))
    slow = asyncio.ensure_future(endpoint.on_thread("slow", release.wait))
    async with asyncio.timeout(30):
        assert (await endpoint.get(orjson.dumps({"run": "quick"}))).num_rows == 0
    assert not slow.done()
    release.set()
    await slow
    endpoint.close()
