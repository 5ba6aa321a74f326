"""Model servers that misbehave by script, through the whole service: what becomes of the rollouts,
and of the server. `/health` of most of them answers all the while.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prorl.cli.progress import follow
from prorl.client.client import Client
from prorl.deploy.running import client_of
from prorl.stages import failover
from prorl.types import Json, Task
from tests.backends.contradictory_replies import LIES
from tests.backends.misbehaving_server import Misbehaving, Mode
from tests.backends.pool_rollouts import (
    TEXT_ONLY_AGENT,
    check_exact,
    check_nothing_charged,
    until_out,
)
from tests.in_process_service import in_process
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import settings
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

ROLLOUTS, TURNS, SLOTS = 24, 6, 12


class Scene:
    """A service in this process over some servers, and the rollouts of one run."""

    def __init__(self, root: Path, servers: list[Misbehaving], client: Client, count: int) -> None:
        self.root, self.servers, self.client, self.count = root, servers, client, count
        self.finished: asyncio.Task[Json]

    async def begun(self, calls: int) -> None:
        """All are in the middle of work."""
        await until(lambda: all(len(server.calls) >= calls for server in self.servers))

    async def states(self) -> dict[str, str]:
        backends = await asyncio.to_thread(self.client.backends)
        return {backend["name"]: backend["state"] for backend in backends}

    async def check(self) -> int:
        """Every rollout completed at no cost, with the servers' own tokens; how many calls were
        continued elsewhere.
        """
        await asyncio.wait_for(self.finished, 120)
        stored = check_complete(self.root / "r", self.count)
        check_nothing_charged(stored, self.count, TURNS)
        return check_exact(stored, [call for server in self.servers for call in server.calls])


@asynccontextmanager
async def scene(
    tmp_path: Path, kind: str, count: int, delay_s: float = 0.03, rollouts: int = ROLLOUTS
) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Misbehaving()) for _ in range(count)]
        for server in servers:
            server.delay_s = delay_s
        more: Json = {"workers": 0, "run": {"slots": SLOTS}, "load_code": True}
        urls = [server.url for server in servers]
        config = settings(tmp_path / "root", kind, *urls, **more)
        running = await stack.enter_async_context(in_process(config))
        s = Scene(tmp_path / "root", servers, client_of(running), rollouts)
        limits = {"max_turns": TURNS, "run_s": 20}
        await asyncio.to_thread(
            s.client.create_run, run_id="r", agent=TEXT_ONLY_AGENT, limits=limits
        )
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"{i}?") for i in range(rollouts)]
        await asyncio.to_thread(s.client.submit, "r", tasks, 1, key="w", last=True)
        s.finished = asyncio.ensure_future(follow(s.client, running, "r", rollouts, quiet=True))
        yield s


async def test_silence_of_a_healthy_server_moves_the_call_and_opens_the_breaker(
    tmp_path: Path, sandbox_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hangs behind a front that says that it is well. Other silences, of an attempt
    alone: tests/stages/test_failover.py.
    """
    monkeypatch.setattr(failover, "FIRST_S", 1.0)
    monkeypatch.setattr(failover, "BETWEEN_S", 1.0)
    monkeypatch.setattr(failover, "SILENT_S", 0.3)
    async with scene(tmp_path, sandbox_kind, 2) as s:
        bad, good = s.servers
        await s.begun(3)
        bad.mode = Mode.SILENT
        await until_out(s.client, bad.url, 60)
        before = len(bad.calls)
        await s.check()
        assert len(bad.calls) == before, "no new work"
        assert (await s.states())[good.url] == "ready"


async def test_nothing_of_a_server_that_lies_now_and_then_is_stored(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Three of ten replies contradict themselves, each in another way; it is out, and counted."""
    async with scene(tmp_path, sandbox_kind, 2, rollouts=40) as s:
        bad, good = s.servers
        lies = itertools.cycle(LIES.values())
        bad.mode, bad.lie_share, bad.lie = Mode.LIES, 0.3, lambda events: next(lies)(events)
        await until_out(s.client, bad.url, 30)
        await s.check()
        views = {backend["name"]: backend for backend in await asyncio.to_thread(s.client.backends)}
        assert views[bad.url]["refused_replies"] >= 3
        assert views[good.url]["refused_replies"] == 0


@pytest.mark.slow
async def test_a_pool_that_is_busy_for_a_while_costs_nobody_anything(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Eight seconds of 429 failed 30 of 30 once."""
    async with scene(tmp_path, sandbox_kind, 1, rollouts=30) as s:
        (server,) = s.servers
        await s.begun(3)
        server.mode, server.retry_after = Mode.BUSY, "1"
        before = len(server.calls)
        await asyncio.sleep(8)
        (view,) = await asyncio.to_thread(s.client.backends)
        assert view["state"] == "ready"
        assert view["reason"].startswith("busy"), view
        assert "429" in view["reason"], view
        assert view["busy_replies"] > 0
        num_calls = len(server.calls) - before
        server.mode = Mode.WELL
        await s.check()
        assert num_calls < 10 * SLOTS, "eased off"


@pytest.mark.slow
async def test_a_server_that_leaves_a_fifth_of_its_calls_unanswered_is_ejected(
    tmp_path: Path, sandbox_kind: str
) -> None:
    async with scene(tmp_path, sandbox_kind, 2, rollouts=60) as s:
        bad, _ = s.servers
        await s.begun(3)
        bad.hang_share = 0.2
        began = asyncio.get_running_loop().time()
        await until_out(s.client, bad.url, 60)
        bad.hang_share = 0.0
        await s.check()
        assert asyncio.get_running_loop().time() - began < 90


@pytest.mark.slow
async def test_a_slow_server_gets_less_and_keeps_what_it_has(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Nobody is out, nobody is moved, new rollouts go where there is less in flight."""
    async with scene(tmp_path, sandbox_kind, 4, rollouts=96) as s:
        slow = s.servers[0]
        slow.delay_s *= 10
        await s.check()
        stored = check_complete(s.root / "r", s.count)
        assert set((await s.states()).values()) == {"ready"}
        served = rows(
            stored,
            "select backend, count(*) as n, avg(epoch(committed_at) - queue_s) as leased_s, min("
            " epoch(committed_at) - queue_s - init_s - run_s - eval_s) as since from rollouts"
            " join (select distinct rollout_id, backend from turns) using (rollout_id)"
            f" group by 1 order by backend <> '{slow.url}'",
        )
        assert sum(server_row["n"] for server_row in served) == s.count, (
            "each stayed where it began"
        )
        # As many are in hand of each: what it was given at once, and as much again each time that
        # it held those to their commit (`leased_s`) while there was work to give.
        submitted = min(server_row["since"] for server_row in served)
        leased_s = [server_row["leased_s"] - submitted for server_row in served]
        max_queue_s = max(row["queue_s"] for row in rows(stored, "select queue_s from rollouts"))
        in_hand = (
            sum(
                server_row["n"] * duration_s
                for server_row, duration_s in zip(served, leased_s, strict=True)
            )
            / max_queue_s
        )
        print(
            [
                (server_row["n"], round(duration_s, 2))
                for server_row, duration_s in zip(served, leased_s, strict=True)
            ],
            max_queue_s,
        )
        assert served[0]["n"] <= in_hand / len(served) * (1 + max_queue_s / leased_s[0])
        assert served[0]["n"] == min(server_row["n"] for server_row in served)
