"""Tests of which runs may go and which are kept, by a real control log."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from prorl.cli.app import dispatch
from prorl.errors import ConflictError
from prorl.service import gateway
from prorl.storage.files.runs import list_runs
from prorl.storage.keep.compact import collect, compact, leftovers
from prorl.storage.keep.retention import TRASH, drop_run, drop_trash, why_kept
from tests.service.running_gateway import TOKEN, group, running_gateway
from tests.storage.compactable_run import content, expected_files, files, run_of_many_parts
from tests.storage.run_directories import add_rows
from tests.storage.scored_rows import scored
from tests.storage.store_pipeline import client, directory, pipeline, store
from tests.waiting import until


async def test_a_run_is_kept_as_long_as_its_trainer_needs_it(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, store(w) as made, pipeline(w):
        root = w.config.root
        await w.run(filter="none", delivery="stream")

        def reason() -> str:
            return why_kept(root / "control.db", "r")

        assert reason() == "it is open"
        await w.submit(*(group(f"t{i}", n=2) for i in range(3)), last=True)
        await w.until(lambda view: view["state"] == "finished")
        await until(lambda: reason() != "it is open")
        assert reason() == "3 groups wait for its trainer"
        with client(made.location) as trainer:

            def read() -> list[str]:
                return [batch.cursor for batch in trainer.stream("r", max_groups=1, wait_s=5.0)]

            cursors = await asyncio.to_thread(read)
            await asyncio.to_thread(trainer.commit, cursors[1])
            assert reason() == "its trainer has committed 2 of 3 groups"
            with pytest.raises(ConflictError, match="committed 2 of 3 groups"):
                drop_run(directory(w))
            await asyncio.to_thread(trainer.commit, cursors[2])
        assert reason() == ""
    drop_run(directory(w))
    assert list_runs(root) == []


async def test_a_service_deletes_an_ended_run_and_its_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "DELETE_BATCH", 2)
    async with running_gateway(tmp_path) as w, store(w), pipeline(w):
        await w.run(filter="none", delivery="store")
        await w.submit(*(group(f"t{i}", n=2) for i in range(3)))
        status, answer = await w.http("DELETE", "/v1/runs/r/data")
        assert (status, "is open" in answer["message"]) == (409, True), answer
        await w.submit(group("t3", n=2), last=True)
        await w.until(lambda view: view["state"] == "finished" and not view["served"])
        assert await w.http("DELETE", "/v1/runs/r/data") == (200, {"run_id": "r", "deleted": True})
        assert list_runs(w.config.root) == []
        assert (await w.http("GET", "/v1/runs"))[1]["runs"] == []
        for path in ("r", "r/rollouts/0"):
            assert (await w.http("GET", f"/v1/runs/{path}"))[0] == 404
        tables = ("runs", "groups", "rollouts", "parts", "outbox", "cursors", "versions")
        num_rows = {name: w.core.log.read(f"SELECT count(*) FROM {name}")[0][0] for name in tables}
        assert num_rows == dict.fromkeys(tables, 0)
        await w.run(seed=7)
        assert (await w.view())["config"]["seed"] == 7


async def test_a_failed_run_is_forgotten_and_the_directory_that_is_anothers_stays(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        w.core.fail_run(w.core.run("r"), "its directory is another's")
        assert (await w.http("DELETE", "/v1/runs/r/data"))[0] == 200
        assert list_runs(w.config.root) == ["r"]
        assert (await w.http("GET", "/v1/runs/r"))[0] == 404


def test_the_name_of_a_killed_drop_is_dropped_again(tmp_path: Path) -> None:
    root = tmp_path / "a ?#%41"
    root.mkdir()
    run = run_of_many_parts(root)
    trash = Path(run.root).with_name(f"{TRASH}{Path(run.root).name}")
    (trash / "rollouts").mkdir(parents=True)
    with closing(sqlite3.connect(Path(run.root).with_name("control.db"))) as log:
        log.executescript(
            "create table runs (run_id, state, config);"
            "create table groups (run_id, state, delivery_seq);"
            "create table cursors (run_id, consumer, seq)"
        )
    drop_run(Path(run.root))
    assert not trash.exists()
    assert list_runs(root) == []


def test_a_run_is_kept_if_the_log_cannot_be_read(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    log = tmp_path / "control.db"
    log.mkdir()
    with pytest.raises(ConflictError, match=f"is kept: {log} cannot be read"):
        drop_run(Path(run.root))
    assert list_runs(tmp_path) == [Path(run.root).name]


def test_a_drop_that_was_killed_is_finished_later(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    Path(run.root).rename(tmp_path / f"{TRASH}demo")
    assert list_runs(tmp_path) == []
    drop_trash(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_gc_merges_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of_many_parts(tmp_path)
    rows, before = content(run), len(files(run)) + 5
    assert dispatch(["gc", "--grace-s", "0", "--root", str(tmp_path)]) == 0
    assert f"{before - 5:,} files removed" in capsys.readouterr().out
    assert files(run) == expected_files(run)
    assert content(run) == rows


def test_age_is_that_of_the_last_commit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_of_many_parts(tmp_path, name)
    for path in (tmp_path / "a" / "commits").iterdir():
        os.utime(path, (0, 0))
    drop = ["gc", "--drop", "--older-than-days", "30", "--root", str(tmp_path)]
    assert dispatch(["gc", "--drop", "--root", str(tmp_path)]) == 2
    assert dispatch(drop) == 0
    assert list_runs(tmp_path) == ["b"]


def test_unswept_files_are_reported_and_plain_sql_counts_right_meanwhile(tmp_path: Path) -> None:
    """The statement of docs/run-directory.md, with DuckDB alone."""
    docs = Path(__file__).parents[2] / "docs" / "run-directory.md"
    text = docs.read_text().partition("```sql\n")[2].partition("```")[0]
    run = run_of_many_parts(tmp_path)
    statements = text.replace("prorl-runs/RUN", run.root).split(";")[:2]

    def count() -> int:
        with duckdb.connect() as connection:
            connection.execute(statements[0])
            return int((connection.execute(statements[1]).fetchone() or (0,))[0])

    assert (count(), leftovers(tmp_path)) == (25, [])
    compact(run)
    add_rows(run, [scored(i) for i in range(100, 104)])
    assert (count(), leftovers(tmp_path)) == (29, ["demo"])
    collect(run, grace_s=0)
    assert (count(), leftovers(tmp_path)) == (29, [])


async def test_a_starting_store_removes_the_files_of_earlier_stores(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path / "root")
    rows = content(run)
    compact(run)
    assert leftovers(tmp_path / "root") == ["demo"]
    async with running_gateway(tmp_path, store={"keep_replaced_s": 0.2}) as w, store(w):
        while await asyncio.to_thread(leftovers, tmp_path / "root"):
            await asyncio.sleep(0.05)
    assert files(run) == expected_files(run)
    assert content(run) == rows


async def test_a_starting_store_removes_the_files_of_a_dead_compaction(tmp_path: Path) -> None:
    """The run has ended, and no log tells of it."""
    run = run_of_many_parts(tmp_path / "root")
    compact(run)
    collect(run, grace_s=0)
    assert leftovers(tmp_path / "root") == []
    (Path(run.root) / "turns" / "pack-dead-0001.parquet").write_bytes(b"half")
    assert leftovers(tmp_path / "root") == ["demo"]
    async with running_gateway(tmp_path, store={"keep_replaced_s": 0.2}) as w, store(w):
        while await asyncio.to_thread(leftovers, tmp_path / "root"):
            await asyncio.sleep(0.05)
    assert files(run) == expected_files(run)


async def test_gc_leaves_a_run_to_the_service_that_works_on_its_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log forgets the run as well, and a run that is open stays."""
    async with running_gateway(tmp_path) as w, store(w), pipeline(w):
        host, _, port = w.served.http.removeprefix("http://").rpartition(":")
        address = {"host": host, "http_port": int(port), "token": TOKEN}
        (w.config.root / "service.json").write_text(json.dumps(address))
        for run_id in ("old", "open"):
            await w.run(run_id)
            await w.submit(group("t0", n=2), run_id=run_id, last=run_id == "old")
        await w.until(lambda view: view["state"] == "finished" and not view["served"], "old")
        drop = ["gc", "--drop", "--older-than-days", "0", "--root", str(w.config.root)]
        assert await asyncio.to_thread(dispatch, drop) == 0
        assert list_runs(w.config.root) == ["open"]
        assert (await w.http("GET", "/v1/runs/old"))[0] == 404
        await w.run("old", seed=7)
    assert "run 'open' is open" in capsys.readouterr().err
