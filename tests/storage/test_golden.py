"""The golden root: what was written once is read, served and compacted by any later prorl."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import pytest

from prorl.cli.commands.export import export
from prorl.cli.commands.gc import gc
from prorl.service.core.recover import load
from prorl.service.core.state import State
from prorl.service.log.log import ControlLog
from prorl.storage.files.layout import RunDir
from prorl.storage.files.part_reader import read_part
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from tests.service.running_gateway import running_gateway
from tests.storage.column_versions import YOUNGER, rewrite, with_younger
from tests.storage.compactable_run import replayed
from tests.storage.store_pipeline import client, store
from tests.storage.write_golden_root import ROOT, restore

SERVED = json.loads((ROOT / "served.json").read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    restore(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("younger", [False, True], ids=["older", "younger"])
def test_its_run_is_whole_before_and_after_a_compaction(root: Path, younger: bool) -> None:
    """It lacks an optional column of today. With `younger` each file also has one of tomorrow,
    which a compaction must not lose. A missing column once ended every compaction of an older run.
    """
    run = RunDir(root / "r")
    if younger:
        rewrite(run, with_younger)
    for _ in range(2):
        assert verify(run.root) == []
        stored = StoredRun(run.root)
        rows = {name: stored.read(name).num_rows for name in ("tasks", "rollouts", "groups")}
        assert rows == {"tasks": 4, "rollouts": 8, "groups": 4}
        (beside,) = stored.sql(
            "select (select value from metrics) as loss, (select label from annotations) as label"
        ).to_pylist()
        assert beside == {"loss": 0.5, "label": "good"}
        assert [[group, rows] for group, rows in replayed(run)] == SERVED
        (answer,) = stored.sql(
            "select count(*) as n, count(logprob_sum) as sums, max(run_id) as run from rollouts"
        ).to_pylist()
        assert answer == {"n": 8, "sums": 0, "run": "r"}
        exported = root / f"{uuid.uuid4().hex}.jsonl"
        assert export("r", exported, format_="trl", root=str(root)) == 0
        assert len(exported.read_text().splitlines()) == sum(len(rows) for _, rows in replayed(run))
        for file in [file for commit in stored.commits for file in commit.files if file.rows]:
            values = read_part(run, file, keep_unknown=True)
            assert (YOUNGER in values.column_names) is younger
            if younger:
                names = values.column(YOUNGER).to_pylist()
                assert None not in names
                assert len(set(names)) == file.rows
        assert gc("r", root=str(root), grace_s=0) == 0
    assert [commit.first_seq for commit in run.commits()] == [1]


def test_its_log_is_continued(root: Path) -> None:
    log, state = ControlLog(root / "control.db"), State()
    load(log, state, 0.0)
    run = state.runs["r"]
    assert (
        run.life.state,
        run.delivery.kept,
        run.delivery.waiting,
        run.delivery.next_delivery,
    ) == (
        "finished",
        2,
        2,
        0,
    )
    assert (run.has_work, run.outbox.stored) == (True, run.outbox.end)
    log.close()


async def test_a_service_goes_on_with_it(root: Path) -> None:
    """Its groups go to a trainer, whose commit ends the run for good."""
    async with running_gateway(root.parent) as w, store(w) as made:
        assert (await w.view())["state"] == "finished"
        with client(made.location) as trainer:

            def train() -> list[int]:
                groups: list[int] = []
                for batch in trainer.stream("r", max_groups=1, wait_s=60.0):
                    groups.append(int(batch.group_ids[0]))
                    trainer.commit(batch.cursor)
                return groups

            assert await asyncio.to_thread(train) == [group for group, _ in SERVED]
        await w.until(lambda view: not view["served"])
