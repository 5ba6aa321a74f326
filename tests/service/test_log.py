"""The control log: one writer, one version, transactions or nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from prorl.errors import ConflictError, SchemaError, StorageError
from prorl.service.log.log import ControlLog, forget_run
from prorl.service.log.log_schema import INSERT_VERSION, LOG_VERSION


async def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.db")
    await log.write([(INSERT_VERSION, [("r", 1, "", 0.0), ("r", 2, "", 0.0)])])
    log.close()
    log.close()
    again = ControlLog(tmp_path / "control.db")
    assert again.read("SELECT version FROM versions") == [(1,), (2,)]
    assert again.read("PRAGMA journal_mode") == [("wal",)]
    assert again._writer.execute("PRAGMA synchronous").fetchall() == [(2,)]
    again.close()


def test_a_second_gateway_on_the_same_root_is_refused(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.db")
    with pytest.raises(ConflictError, match="in use"):
        ControlLog(tmp_path / "control.db")
    log.close()
    ControlLog(tmp_path / "control.db").close()


def test_another_version_and_another_file_are_refused(tmp_path: Path) -> None:
    ControlLog(tmp_path / "control.db").close()
    connection = sqlite3.connect(tmp_path / "control.db")
    connection.execute("UPDATE meta SET value = ?", (LOG_VERSION + 1,))
    connection.commit()
    connection.close()
    with pytest.raises(SchemaError, match="which made it, or another root") as refused:
        ControlLog(tmp_path / "control.db")
    (tmp_path / "other.db").write_bytes(b"no database at all, but long enough to be looked at" * 9)
    with pytest.raises(StorageError) as unreadable:
        ControlLog(tmp_path / "other.db")
    # The frames of the refusals live on here: what they had opened is closed all the same.
    assert refused.tb
    assert unreadable.tb
    open_files = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert [path for path in open_files if path.parent == tmp_path] == []


@pytest.mark.parametrize("when", ["dropped", "deleted before a start"])
def test_pages_of_deleted_runs_go_back_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A service's own deletion leaves them free for runs to come, until the next start."""
    monkeypatch.setattr("prorl.service.log.log.SHRINK_PAGES", 50)
    path = tmp_path / "control.db"
    log = ControlLog(path)
    for run, count in (("kept", 10), ("r", 10_000)):
        log.write_now([(INSERT_VERSION, [(run, i, "x" * 100, 0.0) for i in range(count)])])
    log.close()
    if when == "dropped":
        forget_run(path, "r")
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM versions WHERE run_id = 'r'")
        assert path.stat().st_size > 1 << 20
    again = ControlLog(path)
    assert again.read("SELECT count(*) FROM versions") == [(10,)]
    again.close()
    assert path.stat().st_size < 1 << 18
