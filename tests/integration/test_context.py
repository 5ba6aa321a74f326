"""A context that is full, through the whole service: a stop reason with what was cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from prorl.types import Json, Task
from tests.backends.misbehaving_server import Misbehaving
from tests.backends.pool_rollouts import TEXT_ONLY_AGENT, check_exact
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import settings

FILE, _, _ = TEXT_ONLY_AGENT.rpartition(":")
COUNT, TURNS = 4, 12


async def test_what_does_not_fit_ends_the_rollout(tmp_path: Path, sandbox_kind: str) -> None:
    async with Misbehaving() as server, signals() as stop:
        more: Json = {"workers": 0, "load_code": True}
        config = settings(tmp_path / "root", sandbox_kind, server.url, **more)
        async with service(config, stop) as running:
            client = client_of(running)
            limits = {"max_turns": TURNS, "max_tokens": 3000}
            await asyncio.to_thread(
                client.create_run, run_id="r", agent=TEXT_ONLY_AGENT, limits=limits
            )
            tasks = [
                Task(task_id=f"t{i}", env=f"{FILE}:Wordy", prompt=f"{i}?") for i in range(COUNT)
            ]
            await asyncio.to_thread(client.submit, "r", tasks, 1, key="w", last=True)
            await asyncio.wait_for(follow(client, running, "r", COUNT, quiet=True), 110)
        calls = server.calls
    stored = check_complete(tmp_path / "root" / "r", COUNT)
    ended = rows(
        stored,
        "select status, stop_reason, failure_code, failure_message as why from rollouts",
    )
    assert {row["status"] for row in ended} == {"completed"}
    assert check_exact(stored, calls) == 0
    assert {(row["stop_reason"], row["failure_code"]) for row in ended} == {
        ("context", "max_tokens")
    }
    assert all("new messages of " in row["why"] for row in ended), ended
    assert all("do not fit: " in row["why"] for row in ended)
