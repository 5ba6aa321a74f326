"""A context that is full, through the whole service: a stop reason with what was cut, or the run's
own strategy, which starts a segment.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.cli.progress import follow
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread, service, signals
from prorl.types import Json, Task
from tests.backends.misbehaving import Misbehaving
from tests.backends.trial import TALKER, check_exact
from tests.integration.checks import check_complete, rows

FILE, _, _ = TALKER.rpartition(":")
COUNT, TURNS = 4, 12


@pytest.mark.parametrize("agent", ["Talker", "dropping", "summing_up"])
async def test_what_does_not_fit_ends_the_rollout_or_starts_a_segment(
    tmp_path: Path, sandbox_kind: str, agent: str
) -> None:
    async with Misbehaving() as server, signals() as stop:
        config = ServiceConfig.model_validate(
            {
                "root": tmp_path / "root",
                "topology": "inline",
                "backends": (server.url,),
                "sandbox": {"kind": sandbox_kind},
                "load_code": True,
            }
        )
        async with service(config, stop) as running:
            client = client_of(running)
            limits = {"max_turns": TURNS, "max_tokens": 3000}
            await in_thread(
                lambda: client.create_run(run_id="r", agent=f"{FILE}:{agent}", limits=limits)
            )
            tasks = [
                Task(task_id=f"t{i}", env=f"{FILE}:Wordy", prompt=f"{i}?") for i in range(COUNT)
            ]
            await in_thread(lambda: client.submit("r", tasks, 1, key="w", last=True))
            await asyncio.wait_for(follow(client, running, "r", COUNT, quiet=True), 60)
        calls = server.calls
    stored = check_complete(tmp_path / "root" / "r", COUNT)
    ended = rows(
        stored,
        "select status, stop_reason, failure_code, failure_message as why, num_sequences as n"
        " from rollouts",
    )
    assert {one["status"] for one in ended} == {"completed"}
    if agent == "Talker":
        assert check_exact(stored, calls) == 0
        assert {(one["stop_reason"], one["failure_code"]) for one in ended} == {
            ("context", "max_tokens")
        }
        assert all("the output of look, " in one["why"] for one in ended)
        assert all("does not fit: " in one["why"] for one in ended)
        return
    assert {one["stop_reason"] for one in ended} == {"max_turns"}
    assert all(one["n"] > 1 for one in ended)
    said = {tuple(call.prompt + call.ids) for call in calls}
    segments: list[Json] = rows(stored, "select token_ids, segment from sequences")
    assert {one["segment"] for one in segments} >= {0, 1}
    assert all(tuple(one["token_ids"]) in said for one in segments), "as the server heard and said"
