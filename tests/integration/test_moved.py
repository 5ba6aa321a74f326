"""A node that leaves in the middle of long rollouts: they go on elsewhere, from their last turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.node import node
from prorl.deploy.running import Running, in_thread
from prorl.journal import Answer
from prorl.journal.attempt import MOVED_NOTE
from prorl.journal.recovered import look
from prorl.storage.catalog import StoredRun
from prorl.supervisor.service import Supervisor
from prorl.tls import Join
from prorl.types import Json, Task
from tests.integration.checks import rows
from tests.integration.counting import said
from tests.integration.test_drain import charges, left
from tests.integration.test_nodes import finished, nodes
from tests.integration.test_outside import join_file

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")

TURNS = 20
SLOTS = 16
ENV = str(Path(__file__).with_name("counting.py")) + ":Counting"
TASKS = [
    Task(task_id=f"c/{i}", env=ENV, prompt=f"Count {i}.", data={"turns": TURNS, "pause": 0.02})
    for i in range(SLOTS)
]


def _answers(path: Path) -> int:
    found = look(path)
    return sum(isinstance(record, Answer) for record in found.records) if found else 0


async def _begun(running: Running, root: Path, **settings: Json) -> prorl.Client:
    """A run of which each rollout has made a few turns on the node."""
    client = prorl.connect(running.config.root)
    limits = {"max_turns": TURNS + 1}
    policy = ["scripted:oracle?delay_s=0.5"]
    client.create_run(run_id="far", backends=policy, limits=limits, **settings)
    await in_thread(lambda: client.submit("far", TASKS, n=1, key="k", last=True))
    async with asyncio.timeout(120):
        while True:
            journals = list(root.glob("journal/run-0/*.journal"))
            if len(journals) == SLOTS and all(_answers(path) >= 3 for path in journals):
                return client
            await asyncio.sleep(0.05)


async def _another(running: Running, root: Path, kind: str) -> Supervisor:
    values = {stage: {"slots": SLOTS} for stage in ("init", "run", "eval")}
    own = {"root": root, "node_id": root.name, "sandbox": {"kind": kind}, "load_code": True}
    config = ServiceConfig.model_validate({**values, **own})
    return await in_thread(node, Join.read(join_file(running, "node")), config)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_node_that_leaves_costs_no_turn(tmp_path: Path, sandbox_kind: str) -> None:
    async with nodes(tmp_path, sandbox_kind, "n1", slots=SLOTS, load_code=True) as (
        running,
        (first,),
    ):
        client = await _begun(running, tmp_path / "n1")
        client.drain("n1", deadline_s=0.0)
        await left(first)
        async with await _another(running, tmp_path / "n2", sandbox_kind):
            view = await finished(client)
        assert view["counts"]["completed"] == SLOTS
        assert charges(running) == (SLOTS, 0, 0), "each was leased again, charged to nobody"
        stored = StoredRun(running.config.root / "far")
        assert rows(stored, "select distinct anew, resumes, num_turns, reward from rollouts") == [
            {"anew": "", "resumes": 1, "num_turns": TURNS + 1, "reward": 1.0}
        ]
        told = "select rollout_id, count(*) as n from messages where role = 'tool' and"
        assert [
            row["n"] for row in rows(stored, f"{told} contains(content, '{MOVED_NOTE}') group by 1")
        ] == [1] * SLOTS, "each policy heard once that its shell is another"


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_where_no_policy_may_be_told_so_it_begins_anew_and_says_why(
    tmp_path: Path, sandbox_kind: str
) -> None:
    async with nodes(tmp_path, sandbox_kind, "n1", slots=SLOTS, load_code=True) as (
        running,
        (first,),
    ):
        client = await _begun(running, tmp_path / "n1", on_unknown="fail")
        client.drain("n1", deadline_s=0.0)
        await left(first)
        async with await _another(running, tmp_path / "n2", sandbox_kind):
            view = await finished(client)
        assert view["counts"]["completed"] == SLOTS
        assert charges(running) == (SLOTS, 0, 0)
        stored = StoredRun(running.config.root / "far")
        assert rows(stored, "select distinct anew, resumes, reward from rollouts") == [
            {
                "anew": "its shell would not have come along (on_unknown: fail)",
                "resumes": 0,
                "reward": 1.0,
            }
        ]
        for row in rows(stored, "select turn, content from messages where role = 'tool'"):
            assert row["content"] == said(row["turn"])
