"""A run has what it wanted: what is still at work for it ends, wherever it is, at once.

A real service and sandboxes; the model server, here, counts the requests that it is answering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prorl.deploy.running import client_of, service, signals
from prorl.supervisor.root import box_dir
from prorl.types import Task
from tests.backends.misbehaving_server import Misbehaving, Mode
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import settings
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUPS, N = 5, 2
"""As many as are opened for one that is to be kept, by a filter of which nothing is known yet."""
ANY = "select group_id, true as kept, 'any' as reason from rollouts group by 1"


async def _until(holds: Callable[[], bool]) -> float:
    """The wall clock's time when it first held."""
    await until(holds, limit_s=120)
    return time.time()


async def test_nothing_remains_of_redundant_rollouts(tmp_path: Path, sandbox_kind: str) -> None:
    """All but the last group hang in a model call; the last one is all that is wanted."""
    root = tmp_path / "root"
    live = box_dir(root) / "live"
    tasks = [
        Task(task_id=f"t{i}", env="math", prompt=f"{i} + 1?", data={"answer": str(i + 1)})
        for i in range(GROUPS)
    ]
    async with Misbehaving(Mode.STALLED) as server:
        config = settings(root, sandbox_kind, server.url)
        server.answers_probes = True
        async with signals() as stop, service(config, stop) as running:
            client = client_of(running)
            await asyncio.to_thread(client.create_run, run_id="r", filter=ANY, target_groups=1)
            await asyncio.to_thread(client.submit, "r", tasks[1:], N, key="stalled")
            stalled = (GROUPS - 1) * N
            begun = server.calls
            await _until(lambda: len(begun) == stalled and all(call.ids for call in begun))
            assert len(list(live.iterdir())) >= stalled
            server.mode = Mode.WELL
            await asyncio.to_thread(client.submit, "r", tasks[:1], N, key="well", last=True)
            idle, emptied = await asyncio.gather(
                _until(lambda: not server.in_flight and len(server.calls) == stalled + N),
                _until(lambda: len(server.calls) == stalled + N and not list(live.iterdir())),
            )
            async with asyncio.timeout(120):
                while (await asyncio.to_thread(client.run, "r"))["state"] != "finished":
                    await asyncio.sleep(0.1)
    stored = check_complete(root / "r", GROUPS * N)
    counts = rows(
        stored, "select failure_code as code, count(*) as n from rollouts group by 1 order by 1"
    )
    assert counts == [{"code": "", "n": N}, {"code": "redundant", "n": stalled}]
    tokens = [
        sum(len(turn["token_ids"]) for turn in row["sequences"])
        for path in sorted((root / "r" / "partial").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(tokens) == stalled, "what they had said is kept"
    assert all(tokens)
    (decided,) = rows(
        stored, "select epoch(event_at) as s from groups where event = 'decided' and kept"
    )
    at = decided["s"]
    print(f"requests 0 after {idle - at:.3f} s, sandboxes 0 after {emptied - at:.3f} s")
    assert idle >= at, "nothing was ended before there was enough"
