"""Run directories of the past, kept as they were written: whatever prorl reads today, it reads
them. A directory here is never written again; a change of the format adds one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.compact import compact
from prorl.storage.layout import RunDir
from prorl.storage.verify import verify
from tests.storage.compacting import replayed

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one. Folders without a file are not kept by git: made again here."""
    where = tmp_path / str(request.param)
    shutil.copytree(GOLDEN / where.name, where)
    (where / "partial").mkdir(exist_ok=True)
    return where


def test_it_is_whole_and_says_what_it_said(golden: Path) -> None:
    expected = json.loads((GOLDEN / f"{golden.name}.json").read_text())
    assert verify(golden) == []
    stored = StoredRun(golden)
    assert {table: stored.read(table).num_rows for table in expected["rows"]} == expected["rows"]
    assert [[group, rows] for group, rows in replayed(RunDir(golden))] == expected["replayed"]


def test_it_is_compacted_without_a_change(golden: Path) -> None:
    expected = json.loads((GOLDEN / f"{golden.name}.json").read_text())
    compact(RunDir(golden), everything=True)
    collect(RunDir(golden), grace_s=0)
    assert verify(golden) == []
    assert [[group, rows] for group, rows in replayed(RunDir(golden))] == expected["replayed"]
    reward = StoredRun(golden).sql("select sum(reward) as r, count(*) as n from rollouts")
    assert reward.to_pylist() == [{"r": 3.0, "n": 5}]


def test_there_are_some() -> None:
    assert {"v1", "v1-compacted"} <= set(NAMES)
