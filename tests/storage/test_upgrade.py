"""What an older prorl wrote becomes what this one writes: no row changes, and a service goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.errors import ConflictError, SchemaError, StorageError
from prorl.schema import SCORED, TABLES
from prorl.service.log import ControlLog
from prorl.service.log_schema import LOG_VERSION
from prorl.service.log_upgrade import upgrade_log
from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.layout import RunDir
from prorl.storage.part_reader import PartReader
from prorl.storage.upgrade import upgrade
from prorl.storage.verify import verify
from tests.service.world import group, world
from tests.storage.compacting import expected_files, files
from tests.storage.older import old_content, old_root
from tests.storage.test_service import stream
from tests.storage.world import client, pipeline, store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where `world` has its root."""
    where = tmp_path / "root"
    where.mkdir()
    return where


def test_a_log_of_before_is_refused_with_a_word_how_to_mend_it(root: Path) -> None:
    old_root(root)
    with pytest.raises(SchemaError, match="prorl upgrade --root"):
        ControlLog(root / "control.db")


def test_rows_stay_and_everything_is_of_today(root: Path) -> None:
    run = old_root(root)
    rows = old_content(run)
    assert sum(map(len, rows.values())) == 71
    assert verify(run.root) == []
    with pytest.raises(StorageError, match="prorl upgrade"):
        StoredRun(run.root).sql("select count(*) from partial")
    assert upgrade(run)
    assert old_content(run) == rows
    assert verify(run.root) == []
    collect(run, grace_s=0)
    assert old_content(run) == rows
    stored = StoredRun(run.root)
    for table, schema in TABLES.items():
        for file in stored.files(table):
            with PartReader(run, file) as part:
                assert part.columns == schema.names
    (partial,) = stored.sql("select messages, resumes from partial").to_pylist()
    assert [said["content"] for said in partial["messages"]] == ["1+1?", "2"]
    assert stored.partial().schema.names == SCORED.names
    assert "digest" in stored.manifest
    assert files(run) == sorted([*expected_files(run), "partial/3-9.parquet"])
    assert not upgrade(run), "again: nothing to do"


def tables_of(path: Path) -> dict[str, object]:
    """Columns and indexes of a log by name."""
    with sqlite3.connect(path) as log:
        names = [n for (n,) in log.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {n: log.execute(f"PRAGMA table_info({n})").fetchall() for n in names}
        indexes = log.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
    log.close()
    # A column that was added has a default, since old rows need one.
    shapes = {n: [column[1:4] for column in found] for n, found in columns.items()}
    return {**shapes, **{name: " ".join(sql.split()) for name, sql in indexes}}


@pytest.mark.parametrize("version", [1, 2])
def test_a_log_that_was_brought_up_has_the_shape_of_a_fresh_one(root: Path, version: int) -> None:
    old_root(root)
    if version == 1:
        with sqlite3.connect(root / "control.db") as log:
            log.execute("ALTER TABLE versions DROP COLUMN published")
            log.execute("CREATE INDEX groups_state ON groups (run_id, state)")
            log.execute("UPDATE meta SET value = '1'")
        log.close()
    assert upgrade_log(root / "control.db") == version
    assert upgrade_log(root / "control.db") == LOG_VERSION
    fresh = root / "fresh" / "control.db"
    ControlLog(fresh).close()
    assert tables_of(root / "control.db") == tables_of(fresh)


def test_a_log_in_use_or_of_tomorrow_is_left_alone(root: Path) -> None:
    old_root(root)
    upgrade_log(root / "control.db")
    log = ControlLog(root / "control.db")
    with pytest.raises(ConflictError, match="another gateway"):
        upgrade_log(root / "control.db")
    log.write_now([("UPDATE meta SET value = ?", [(LOG_VERSION + 1,)])])
    log.close()
    with pytest.raises(SchemaError, match="upgrade prorl"):
        upgrade_log(root / "control.db")


async def test_a_service_goes_on_with_the_run_of_before(tmp_path: Path, root: Path) -> None:
    old_root(root)
    assert await asyncio.to_thread(dispatch, ["upgrade", "--root", str(root)]) == 0
    with sqlite3.connect(root / "control.db") as log:
        asked = "SELECT key FROM groups WHERE task_id LIKE 'late%' ORDER BY group_id"
        keys = [key for (key,) in log.execute(asked)]
    log.close()
    async with world(tmp_path, "local") as service:
        # Asked for again, as a client does that never heard the answer: nothing is made twice.
        await service.run(filter="dapo", delivery="stream")
        again = [group(f"late{i}", n=2, key=key) for i, key in enumerate(keys)]
        await service.submit(*again, last=True)
        async with store(service) as made, pipeline(service):
            with client(made.location) as trainer:
                read = await asyncio.to_thread(stream, trainer)
            assert [cursor for cursor, _ in read] == ["r@2", "r@3", "r@4"]
            await service.until(lambda view: view["state"] == "finished")
    run = RunDir(root / "r")
    assert verify(run.root) == []
    asked = "select count(*) as n, count(distinct group_id) as g from rollouts"
    assert StoredRun(run.root).sql(asked).to_pylist() == [{"n": 14, "g": 7}]
