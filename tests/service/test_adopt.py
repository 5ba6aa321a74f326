"""A run directory that the log does not know: refused, never touched, adopted on request."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from prorl.control import Kind, TaskRow
from prorl.errors import ConflictError, SchemaError
from prorl.service.adopt import adopt
from prorl.service.log import ControlLog
from prorl.service.manifest import write_manifest
from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.compact import compact
from prorl.storage.convert import event_rows, tables, task_rows
from prorl.storage.layout import RunDir
from tests.service.world import run_config, settings, world
from tests.storage.directory import add_commit, event
from tests.storage.rows import scored

TASK = TaskRow(
    group_id=0,
    task_id="t",
    data_source="",
    env="noop",
    n=2,
    task="{}",
    sampling="{}",
    extra="{}",
)


def written_run(root: Path) -> RunDir:
    """Run `r` as a store leaves it: two groups of two, the second with one member stored."""
    config = run_config(seed=3)
    write_manifest(settings(root.parent, root=root), config, 1_000.0)
    run = RunDir(root / "r")
    rows = [scored(i, n=2, run_id="r") for i in range(3)]
    found = tables(pa.concat_batches(rows))
    tasks = [msgspec.structs.replace(TASK, group_id=g) for g in range(2)]
    events = [event(0, 0, "decided"), event(1, 0, "delivered", delivery_seq=0)]
    for name in ("commits", "partial", *found, "groups", "tasks"):
        (root / "r" / name).mkdir(exist_ok=True)
    add_commit(run, {k: pa.Table.from_batches([b]) for k, b in found.items()})
    add_commit(run, {"tasks": task_rows(tasks), "groups": event_rows(events)})
    return run


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
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
    async with world(tmp_path) as w:
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "r", "seed": 3})
        assert (status, "prorl adopt" in answer["message"]) == (409, True), answer
        assert (await w.http("GET", "/v1/runs"))[1]["runs"] == []
    assert content(tmp_path / "root" / "r") == before


async def test_a_manifest_without_trajectories_is_gone_on_with(tmp_path: Path) -> None:
    """The gateway died between manifest and log."""
    write_manifest(settings(tmp_path), run_config(), 1_000.0)
    async with world(tmp_path) as w:
        assert (await w.http("POST", "/v1/runs", {"run_id": "r"}))[0] == 201


async def test_a_log_that_is_older_than_its_directories_is_not_served(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.run()
    (tmp_path / "root" / "r" / "commits").mkdir()
    (tmp_path / "root" / "r" / "commits" / "0000000001.json").write_text("{}")
    with pytest.raises(ConflictError, match="the control log knows 0 commits"):
        async with world(tmp_path):
            pass


@pytest.mark.parametrize("compacted", [False, True])
async def test_an_adopted_run_is_known_and_read_only(tmp_path: Path, compacted: bool) -> None:
    run = written_run(tmp_path / "root")
    if compacted:
        compact(run)
        collect(run, grace_s=0)
    before = content(tmp_path / "root" / "r")
    log = ControlLog(tmp_path / "root" / "control.db")
    found = adopt(StoredRun(run.root), log)
    assert (found.groups, found.rollouts, found.commits, found.missing) == (2, 4, 2, 1)
    with pytest.raises(ConflictError, match="is known here"):
        adopt(StoredRun(run.root), log)
    log.close()
    async with world(tmp_path) as w, w.worker("store") as store:
        assert (await w.http("POST", "/v1/runs", {"run_id": "r", "seed": 3}))[0] == 200
        view = await w.view()
        assert (view["state"], view["commits"], view["delivered"]) == ("adopted", 2, 1)
        assert view["counts"] | {"completed": 3, "cancelled": 1} == view["counts"]
        group = (await w.http("GET", "/v1/runs/r/groups/0"))[1]
        assert (group["state"], group["delivery_seq"]) == ("delivered", 0)
        assert [member["reward"] for member in group["rollouts"]] == [1.0, 1.0]
        body = {"groups": [{"task": {"task_id": "x", "env": "noop", "prompt": "x"}}]}
        status, answer = await w.http("POST", "/v1/runs/r/groups", body)
        assert (status, "adopted" in answer["message"]) == (409, True), answer
        await w.run("other")
        await store.hear(Kind.RUN)
        assert [row.run_id for row in store.of(Kind.RUN)] == ["other"]
    assert content(tmp_path / "root" / "r") == before


def test_what_is_not_whole_is_not_adopted(tmp_path: Path) -> None:
    run = written_run(tmp_path / "root")
    log = ControlLog(tmp_path / "other.db")
    shutil.copytree(run.root, tmp_path / "renamed")
    with pytest.raises(ConflictError, match="rename it"):
        adopt(StoredRun(tmp_path / "renamed"), log)
    victim = next(Path(run.root, "rollouts").glob("part-*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(ConflictError, match="missing or cut"):
        adopt(StoredRun(run.root), log)
    Path(run.commit_path(2)).unlink()
    with pytest.raises((ConflictError, SchemaError)):
        adopt(StoredRun(run.root), log)
    log.close()
