"""A run directory that the log does not know: refused, never touched."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from prorl.cli.app import dispatch
from prorl.errors import ConflictError
from prorl.service.core import core
from prorl.service.core.manifest import write_manifest
from prorl.storage.files.layout import RunDir
from prorl.storage.write.convert import event_rows, tables, task_rows
from prorl.types import Json
from tests.service.running_gateway import run_config, running_gateway, settings
from tests.storage.run_directories import add_commit, event
from tests.storage.scored_rows import scored, task_row


def written_run(root: Path) -> RunDir:
    """Run `r` as a store leaves it: two groups of two, the second with one member stored."""
    config = run_config(seed=3)
    write_manifest(settings(root.parent, root=root), config, 1_000.0)
    run = RunDir(root / "r")
    rows = [scored(i, n=2, run_id="r") for i in range(3)]
    by_table = tables(pa.concat_batches(rows))
    tasks = [task_row(g, "noop") for g in range(2)]
    events = [event(0, 0, "decided"), event(1, 0, "delivered", delivery_seq=0)]
    for name in ("commits", "partial", *by_table, "groups", "tasks"):
        (root / "r" / name).mkdir(exist_ok=True)
    add_commit(run, {k: pa.Table.from_batches([b]) for k, b in by_table.items()})
    add_commit(run, {"tasks": task_rows(tasks), "groups": event_rows(events)})
    return run


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_a_directory_that_the_log_does_not_know_is_refused_and_untouched(
    tmp_path: Path,
) -> None:
    written_run(tmp_path / "root")
    before = content(tmp_path / "root" / "r")
    async with running_gateway(tmp_path) as w:
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "r", "seed": 3})
        assert (status, "read it as it is" in answer["message"]) == (409, True), answer
        assert (await w.http("GET", "/v1/runs"))[1]["runs"] == []
    assert content(tmp_path / "root" / "r") == before


async def test_a_manifest_without_trajectories_is_continued(tmp_path: Path) -> None:
    """The gateway died between manifest and log."""
    async with running_gateway(tmp_path) as w:
        owner = w.core.log.owner
        write_manifest(settings(tmp_path), run_config(), 1_000.0, owner=owner)
        assert (await w.http("POST", "/v1/runs", {"run_id": "r"}))[0] == 201


async def test_a_log_that_is_older_than_a_directory_fails_that_run_and_serves_the_others(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        await w.run("other")
    (tmp_path / "root" / "r" / "commits").mkdir()
    (tmp_path / "root" / "r" / "commits" / "0000000001.json").write_text("{}")
    before = content(tmp_path / "root" / "r")
    async with running_gateway(tmp_path) as w:
        assert "knows 0 commits" in (status := (await w.http("GET", "/v1/runs/r"))[1])["stalled"]
        assert status["state"] == "failed"
        assert list(w.core.state.open) == ["other"]
    assert content(tmp_path / "root" / "r") == before
    async with running_gateway(tmp_path) as w:
        assert (await w.http("GET", "/v1/runs/r"))[1]["state"] == "failed"


async def test_ended_runs_cost_nothing_and_are_still_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 of them cost 3.2 s at start, and .83 s of the loop for each question of `serve`."""
    names = [f"r{i}" for i in range(5)]
    async with running_gateway(tmp_path) as w:
        monkeypatch.setattr(core, "KEPT_CLOSED", 2)
        for name in names:
            await w.run(name)
            w.core.runs.end_of_groups(w.core.run(name))
            w.core.sweep()
            await w.served.gateway.durable()
        assert list(w.core.state.runs) == names[-2:]
        listed = (await w.http("GET", "/v1/runs"))[1]["runs"]
        assert [(run["run_id"], run["state"]) for run in listed] == [
            (name, "finished") for name in names
        ]
    async with running_gateway(tmp_path) as w:
        assert not w.core.state.runs
        assert (await w.http("GET", "/v1/status"))[1]["runs"] == []
        assert (await w.http("GET", "/v1/runs/r0"))[1]["state"] == "finished"
        assert (await w.http("POST", "/v1/runs", {"run_id": "r1"}))[0] == 200
        assert (await w.http("POST", "/v1/runs", {"run_id": "r1", "seed": 9}))[0] == 409


async def test_two_services_on_the_same_store_take_no_run_from_each_other(tmp_path: Path) -> None:
    """One command on two hosts: both roots took the run, and one service ended for good."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    where: Json = {"url": str(tmp_path / "shared")}
    async with running_gateway(first, store=where) as w:
        assert (await w.http("POST", "/v1/runs", {"run_id": "r"}))[0] == 201
        with pytest.raises(ConflictError, match="belongs to another service's root"):
            async with running_gateway(second, store=where):
                pass
    async with running_gateway(first, store=where) as w:
        assert (await w.view())["state"] == "open", "its own root goes on"


def test_a_manifest_of_another_root_is_not_ours(tmp_path: Path) -> None:
    write_manifest(settings(tmp_path), run_config(), 1_000.0, owner="a")
    write_manifest(settings(tmp_path), run_config(), 2_000.0, owner="a")
    with pytest.raises(ConflictError, match="another service's root"):
        write_manifest(settings(tmp_path), run_config(), 1_000.0, owner="b")


async def test_a_run_that_was_dropped_is_forgotten(tmp_path: Path) -> None:
    drop = ["gc", "--drop", "r", "--root", str(tmp_path / "root")]
    async with running_gateway(tmp_path) as w:
        await w.run()
        w.core.runs.end_of_groups(w.core.run("r"))
        w.core.sweep()
        await w.served.gateway.durable()
    assert await asyncio.to_thread(dispatch, drop) == 0
    async with running_gateway(tmp_path) as w:
        assert (await w.http("GET", "/v1/runs"))[1]["runs"] == []
        assert (await w.http("POST", "/v1/runs", {"run_id": "r", "seed": 4}))[0] == 201
