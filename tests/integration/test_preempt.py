"""A run that comes late has its share of few slots while another's long rollouts stand still.

Judged by what the calls left behind (`counting.py`), by the stored runs, and by an undisturbed run
with the same seed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl.backends.embedded import TOY
from prorl.cli.progress import Show, follow
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread, service, signals
from prorl.errors import UnavailableError
from prorl.linux.procfs import descendants
from prorl.storage.catalog import StoredRun
from prorl.supervisor.service import Supervisor
from prorl.types import Json, Task
from tests.integration.checks import check_complete, check_nothing_left, rows
from tests.integration.counting import said

SLOTS, LONG, SHORT, NUM_A, NUM_B = 4, 60, 3, 8, 4
ENV = str(Path(__file__).with_name("counting.py")) + ":Counting"
POLICY = "scripted:oracle?delay_s=0.1"


def _tasks(run: str, count: int, turns: int) -> list[Task]:
    data = {"turns": turns, "pause": 0.05}
    return [
        Task(task_id=f"{run}/{n}", env=ENV, prompt=f"Count {n}.", data=data) for n in range(count)
    ]


def _config(root: Path, sandbox_kind: str, after_s: float) -> ServiceConfig:
    pool = {"slots": SLOTS}
    values = {"root": root, "backends": (POLICY,), "preempt_after_s": after_s}
    stages = {"init": pool, "run": pool, "eval": pool}
    box = {"sandbox": {"kind": sandbox_kind}, "tokenizer": str(TOY), "load_code": True}
    return ServiceConfig.model_validate({**values, **stages, **box})


class Seen(NamedTuple):
    """What happened to the runs `a` and `b`."""

    a: StoredRun
    b: StoredRun
    lease_s: float
    """From B's submission to its first rollout in RUN."""
    a_ended: int
    """Of A's rollouts, when all of B's had."""


async def _view(client: Client, run: str) -> dict[str, Json]:
    try:
        return await in_thread(client.run, run)
    except UnavailableError:
        return {"counts": {}, "suspended": 0}


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(2400):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never happened: {what}")


async def _submit(client: Client, run: str, tasks: list[Task]) -> None:
    limits = {"max_turns": LONG + 1}
    await in_thread(lambda: client.create_run(run_id=run, limits=limits, seed=5))
    await in_thread(lambda: client.submit(run, tasks, 1, key="k", last=True))


async def _run(
    root: Path,
    sandbox_kind: str,
    after_s: float,
    disturb: Callable[[Supervisor, Client], Awaitable[None]] | None = None,
) -> Seen:
    before = set(descendants(os.getpid()))
    async with signals() as stop, service(_config(root, sandbox_kind, after_s), stop) as running:
        assert isinstance(running, Supervisor)
        client = client_of(running)
        await _submit(client, "a", _tasks("a", NUM_A, LONG))

        async def full() -> bool:
            return int((await _view(client, "a"))["counts"].get("running", 0)) == SLOTS

        await _until(full, "A has every slot")
        await _submit(client, "b", _tasks("b", NUM_B, SHORT))
        began = time.monotonic()

        async def started() -> bool:
            counts = (await _view(client, "b"))["counts"]
            return int(counts.get("running", 0)) + int(counts.get("completed", 0)) > 0

        await _until(started, "B has a slot")
        lease_s = time.monotonic() - began
        if disturb is not None:
            await disturb(running, client)

        async def served() -> bool:
            return bool((await _view(client, "b"))["counts"].get("completed") == NUM_B)

        await _until(served, "B has ended")
        a_ended = int((await _view(client, "a"))["counts"]["completed"])
        async with asyncio.timeout(240):
            for run in "ab":
                await follow(client, running, run, 0, Show.NOTHING)
    check_nothing_left(root, before)
    a, b = check_complete(root / "a", NUM_A), check_complete(root / "b", NUM_B)
    return Seen(a, b, lease_s, a_ended)


OUTPUTS = "select rollout_id, turn, content from messages where role = 'tool' order by 1, 2"
IDS = (
    "select r.rollout_key, s.segment, s.token_ids, s.span_end, s.span_kind, s.span_version,"
    " s.span_turn, s.span_temperature, s.reward, r.stop_reason, r.num_turns"
    " from sequences s join rollouts r using (rollout_id) order by 1, 2"
)
ENDS = "select attempt, status, reward, count(*) as n from rollouts group by all"


def _check_undisturbed(seen: Seen, calm: Seen) -> None:
    for run, other, count in ((seen.a, calm.a, NUM_A), (seen.b, calm.b, NUM_B)):
        assert rows(run, ENDS) == [{"attempt": 1, "status": "completed", "reward": 1.0, "n": count}]
        for row in rows(run, OUTPUTS):
            assert row["content"] == said(row["turn"]), row
        assert rows(run, IDS) == rows(other, IDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_late_run_has_its_share_before_long_rollouts_end(
    tmp_path: Path, sandbox_kind: str
) -> None:
    seen = await _run(tmp_path / "shared", sandbox_kind, 0.5)
    calm = await _run(tmp_path / "calm", sandbox_kind, 0.0)
    print(f"\nB's first slot after {seen.lease_s:.1f} s, without {calm.lease_s:.1f} s")
    assert seen.a_ended == 0 < calm.a_ended
    _check_undisturbed(seen, calm)
    counts = "select sum(suspensions)::int as n from rollouts"
    (a,), (b,), (off,) = (rows(run, counts) for run in (seen.a, seen.b, calm.a))
    assert (a["n"] >= SLOTS // 2, b["n"], off["n"]) == (True, 0, 0)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [("run-0",), ("gateway",), ("run-0", "gateway")])
async def test_who_dies_while_rollouts_stand_still_costs_nothing(
    tmp_path: Path, sandbox_kind: str, names: tuple[str, ...]
) -> None:
    async def disturb(running: Supervisor, client: Client) -> None:
        async def still() -> bool:
            return int((await _view(client, "a"))["suspended"]) >= SLOTS // 2

        await _until(still, "some stand still")
        for name in names:
            running.children[name].signal(signal.SIGKILL)

        async def back() -> bool:
            alive = all(running.children[name].lives > 1 for name in names)
            return alive and bool((await _view(client, "b"))["counts"].get("completed"))

        await _until(back, "they are back, and B goes on")

    seen = await _run(tmp_path / "killed", sandbox_kind, 0.5, disturb)
    calm = await _run(tmp_path / "calm", sandbox_kind, 0.0)
    _check_undisturbed(seen, calm)
