"""The golden root: what was written once is read, served and compacted by any later prorl."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from prorl.service.core.state import State
from prorl.service.log.log import ControlLog
from prorl.service.log.recover import load
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.compact import collect, compact
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from tests.storage.compacting import replayed
from tests.storage.golden import ROOT

SERVED = [
    [0, ["aec80c34de0eb3dff4b21fbb2efa0899", "8bfe4e0e7d0b1ed1da9e06bc4d92283a"]],
    [2, ["92d67f44313ff48d0745498c9cdde2be", "5c464142a0745cd5731e3e8977967ce7"]],
]
"""Groups in the order of a replay, by the hashes of their rows."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of it. Folders without a file are not kept by git: made again here."""
    shutil.copytree(ROOT / "r", tmp_path / "r")
    (tmp_path / "r" / "partial").mkdir(exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "control.db")) as log:
        log.executescript((ROOT / "control.sql").read_text())
    return tmp_path


def test_its_run_is_whole_before_and_after_a_compaction(root: Path) -> None:
    run = RunDir(root / "r")
    for _ in range(2):
        assert verify(run.root) == []
        stored = StoredRun(run.root)
        rows = {name: stored.read(name).num_rows for name in ("tasks", "rollouts", "groups")}
        assert rows == {"tasks": 4, "rollouts": 8, "groups": 4}
        assert [[group, rows] for group, rows in replayed(run)] == SERVED
        compact(run, everything=True)
        collect(run, grace_s=0)


def test_its_log_is_gone_on_with(root: Path) -> None:
    log, state = ControlLog(root / "control.db"), State()
    load(log, state, 0.0)
    run = state.runs["r"]
    assert (run.state, run.kept, run.waiting, run.next_delivery) == ("finished", 2, 2, 0)
    assert (run.wanted, run.outbox_stored) == (True, run.outbox_end)
    log.close()
