"""Model servers are killed and frozen in the middle of rollouts of several turns: nothing fails,
nothing is charged, and every stored token is what a server said on the wire.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest

from prorl.cli.progress import follow
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.linux.procfs import descendants
from prorl.types import Json, Task
from tests.backends.pool_rollouts import (
    check_exact,
    check_not_called_since,
    check_nothing_charged,
    request_marks,
    until_out,
)
from tests.backends.wire_tap import Call
from tests.faults.model_server import TURNS, logprob_of, says
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.integration.services import Listening, settings

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

ROLLOUTS = 64
AWAY_S = 60.0
NEWS_S = 1.0
"""So long after the gateway has put a server out, RUN has heard it, also on a busy machine."""
END_ID = int(says(0)[-1])


class ModelServer(Listening):
    """Its calls are in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tap = folder / f"{name}.tap"
        super().__init__("tests.faults.model_server", "{port}", str(self.tap))

    def calls(self) -> list[Call]:
        """Returns the calls on the wire."""
        calls_by_name: dict[str, list[Call]] = {}
        for line in self.tap.read_bytes().splitlines() if self.tap.exists() else ():
            entry = orjson.loads(line)
            name, ids = entry["call"], entry.get("ids", [])
            if "prompt" in entry:
                calls_by_name.setdefault(name, []).append(Call(entry["at"], name, entry["prompt"]))
            call = calls_by_name[name][-1]
            call.ids += ids
            call.logprobs += [logprob_of(token) for token in ids]
            call.is_whole = call.ids[-1:] == [END_ID]
        return [call for calls in calls_by_name.values() for call in calls]


@asynccontextmanager
async def servers(folder: Path, count: int) -> AsyncIterator[list[ModelServer]]:
    async with AsyncExitStack() as stack:
        made = [ModelServer(folder, f"server-{i}") for i in range(count)]
        for server in made:
            stack.push_async_callback(server.kill)
            await server.start()
        yield made


def config(root: Path, sandbox_kind: str, pool: Sequence[ModelServer]) -> ServiceConfig:
    more: Json = {"run": {"slots": 32}, "trace": True}
    return settings(root, sandbox_kind, *(server.url for server in pool), **more)


async def submit(client: Client, count: int) -> None:
    await asyncio.to_thread(client.create_run, run_id="r", limits={"run_s": 30})
    tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"Find it, {i}.") for i in range(count)]
    await asyncio.to_thread(client.submit, "r", tasks, 1, key="w", last=True)


async def until_tokens(pool: Sequence[ModelServer], calls: int) -> None:
    """All are in the middle of work."""
    async with asyncio.timeout(60):
        while any(len(server.calls()) < calls for server in pool):
            await asyncio.sleep(0.1)


def calls_of(pool: Sequence[ModelServer]) -> list[Call]:
    return [call for server in pool for call in server.calls()]


def check_stored(root: Path, calls: Sequence[Call], count: int) -> int:
    """All completed at no cost, all as the wire had it; how many calls were continued."""
    stored = check_complete(root / "r", count)
    check_nothing_charged(stored, count, stop="done")
    continued = check_exact(stored, calls)
    end = says(TURNS - 1).tolist()
    for row in rows(stored, "select token_ids, span_end from sequences"):
        assert row["token_ids"][row["span_end"][-1] - len(end) :] == end
    return continued


async def test_a_killed_and_a_frozen_server_of_four_cost_nothing(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """A server that is out is asked nothing; a rollout on the others asks nothing twice."""
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    async with servers(tmp_path, 4) as pool:
        async with (
            signals() as stop,
            service(config(root, sandbox_kind, pool), stop) as running,
        ):
            client = client_of(running)
            await submit(client, ROLLOUTS)
            finished = asyncio.ensure_future(follow(client, running, "r", ROLLOUTS, quiet=True))
            await until_tokens(pool, 4)
            pool[0].strike(signal.SIGKILL)
            killed_at = time.monotonic()
            dead_s = await until_out(client, pool[0].url, 30)
            pool[1].strike(signal.SIGSTOP)
            stopped_at = time.monotonic()
            frozen_s = await until_out(client, pool[1].url, 30)
            await asyncio.wait_for(finished, 300)
            # A server that thaws begins calls that nobody waits for: they would be the latest.
            server_calls = calls_of(pool)
            pool[1].strike(signal.SIGCONT)
        continued = check_stored(root, server_calls, ROLLOUTS)
        calls = request_marks(root)
        assert {call.edge for call in calls} == {server.url for server in pool}
        print(
            f"dead out after {dead_s:.2f} s, frozen after {frozen_s:.2f} s, {continued} continued"
        )
        assert continued > 0
        check_not_called_since(calls, pool[0].url, killed_at + dead_s + NEWS_S)
        check_not_called_since(calls, pool[1].url, stopped_at + frozen_s + NEWS_S)
        struck = {call.key for call in calls if call.edge in (pool[0].url, pool[1].url)}
        others = Counter(call.key for call in calls if call.key not in struck)
        assert others
        assert set(others.values()) == {TURNS}
    check_no_leftovers(root, before)


async def test_a_sole_server_that_is_away_keeps_everybody_waiting_and_nobody_fails(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root, count = tmp_path / "root", 1000
    async with servers(tmp_path, 1) as pool:
        async with (
            signals() as stop,
            service(config(root, sandbox_kind, pool), stop) as running,
        ):
            client = client_of(running)
            await submit(client, count)
            finished = asyncio.ensure_future(follow(client, running, "r", count, quiet=True))
            await until_tokens(pool, 8)
            await pool[0].kill()
            await until_out(client, pool[0].url, 5)
            await asyncio.sleep(AWAY_S)
            counts = (await asyncio.to_thread(client.run, "r"))["counts"]
            print(f"after {AWAY_S:g} s without a server: {counts}")
            assert counts["failed"] == 0
            assert counts["queued"] > count / 2
            await pool[0].start()
            await finished
        check_stored(root, calls_of(pool), count)
