"""Compaction changes where rows lie and nothing else, whatever dies and whoever reads meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prorl.errors import ConflictError, StorageError
from prorl.schema import TABLES
from prorl.schema.rows import row_hashes
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.files.part_reader import PartReader
from prorl.storage.keep.compact import ORDER as ORDER_OF_ROWS
from prorl.storage.keep.compact import checksum, collect, compact, remove_dead
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.groups import GroupIndex
from prorl.storage.read.verify import verify
from prorl.storage.write.writer import RunWriter
from tests.storage.compactable_run import (
    GROUPS,
    ORDER,
    content,
    expected_files,
    files,
    replayed,
    run_of_many_parts,
)
from tests.storage.control_log import FileLog
from tests.storage.run_directories import add_rows, new_run
from tests.storage.scored_rows import scored


def test_the_same_rows_in_fewer_files(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    rows, order = content(run), replayed(run)
    done = compact(run)
    assert done is not None
    assert len(done.commit.files) == 5, "one file a table that has rows"
    assert verify(run.root) == [], "what was replaced is still there, and known"
    assert len(collect(run, grace_s=0)) == done.num_before + 19
    assert (content(run), replayed(run)) == (rows, order)
    assert files(run) == expected_files(run)
    assert verify(run.root) == []
    assert compact(run, everything=True) is None


def test_packs_are_sorted_for_their_readers(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    compact(run)
    stored = StoredRun(run.root)
    groups = stored.read("sequences").column("group_id").to_pylist()
    assert list(dict.fromkeys(groups)) == [*ORDER, 1, 3]
    assert stored.read("rollouts").column("rollout_id").to_pylist() == [*range(GROUPS * 4 + 1)]
    (file,) = stored.files("sequences")
    with PartReader(run, file) as part:
        for i in range(part.num_row_groups):
            assert set(part.read([i]).column("group_id").to_pylist()) < set(range(GROUPS))
        assert part.row_group_sizes == [8, 8, 8], "row groups end where a group ends"


def test_a_range_of_small_packs_is_compacted_again(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    compact(run)
    add_rows(run, [scored(100)])
    compact(run)
    stored, rows = StoredRun(run.root), content(run)
    assert len(stored.files("sequences")) == 2
    done = compact(run, everything=True)
    assert done is not None
    assert str(done.commit.name) == "0000000001-0000000020-0001.json"
    assert len(StoredRun(run.root).files("sequences")) == 1
    assert collect(run, grace_s=60) == []
    assert verify(run.root) == [], "both are there, the newer one counts"
    collect(run, grace_s=0)
    assert content(run) == rows
    assert stored.read("turns").num_rows == len(rows["turns"]), "opened before, opened again"
    assert files(run) == expected_files(run)
    assert compact(run, everything=True) is None


def test_full_packs_are_not_written_again(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    done = compact(run, pack_bytes=3000)
    assert done is not None
    sequences = [file.path for file in done.commit.files if file.table == "sequences"]
    assert len(sequences) > 3
    add_rows(run, [scored(i, width=50) for i in range(100, 104)])
    again = compact(run, pack_bytes=3000)
    assert again is not None
    assert [f.path for f in again.commit.files if f.table == "sequences"][:3] == sequences[:3]
    assert verify(run.root) == []


def test_who_opened_the_run_before_reads_on(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    stored, index = StoredRun(run.root), GroupIndex(run)
    index.take_over(index.look())
    before = [row_hashes(index.read(group)) for group in range(GROUPS)]
    compact(run)
    collect(run, grace_s=0)
    assert stored.sql("select count(*) as n from sequences").to_pylist() == [{"n": GROUPS * 4}]
    assert StoredRun(run.root).read("turns").num_rows == stored.read("turns").num_rows
    assert [row_hashes(index.read(group)) for group in range(GROUPS)] == before


def test_an_index_follows_a_compaction_and_keeps_what_came_meanwhile(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    index = GroupIndex(run)
    index.take_over(index.look())
    compact(run)
    snapshot = index.look()
    late = add_rows(run, [scored(i, n=1) for i in range(200, 204)])
    file = next(file for file in late.files if file.table == "sequences")
    with PartReader(run, file) as part:
        index.add_written(file, part.read(), late.commit_seq)
    index.take_over(snapshot)
    collect(run, grace_s=0)
    assert [index.read(group).num_rows for group in (0, 5, 200, 203)] == [4, 4, 1, 1]


def test_nothing_goes_before_readers_had_time(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    before = files(run)
    compact(run)
    assert collect(run, grace_s=60) == []
    assert run.sweep((), num_commits=19) == [], "a restart"
    assert set(before) < set(files(run))


def test_a_pack_that_came_out_wrong_replaces_nothing(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    before = files(run)

    def losing(fs: Any, path: str, data: Any) -> None:
        write_durably(fs, path, data)
        if "/rollouts/" in path:
            other = run_of_many_parts(tmp_path / "other")
            (file,) = StoredRun(other.root).files("rollouts")[-1:]
            Path(path).write_bytes(Path(other.path(file.path)).read_bytes())

    with pytest.raises(StorageError, match="does not hold what it replaces"):
        compact(run, write=losing)
    assert files(run) == before


def test_a_missing_file_is_not_replaced_by_its_name(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)

    def losing(fs: Any, path: str, data: Any) -> None:
        write_durably(fs, path, data)
        if "/groups/" in path:
            for pack in Path(run.root).glob("sequences/pack-*"):
                pack.unlink()

    with pytest.raises((StorageError, FileNotFoundError)):
        compact(run, write=losing)
    assert run.compacted().last == 0
    assert verify(run.root) == []


def test_a_second_compaction_at_the_same_time_is_refused(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)

    def second(fs: Any, path: str, data: Any) -> None:
        write_durably(fs, path, data)
        with pytest.raises(ConflictError, match="is being compacted"):
            compact(run)
        with pytest.raises(ConflictError, match="is being compacted"):
            collect(run, grace_s=0)

    assert compact(run, write=second) is not None


def test_nothing_goes_that_a_compaction_at_work_has_written(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)

    def beside(fs: Any, path: str, data: Any) -> None:
        write_durably(fs, path, data)
        if "/groups/" in path:
            assert remove_dead(RunDir(run.where)) == []

    assert compact(run, write=beside) is not None
    assert remove_dead(run) == []
    collect(run, grace_s=0)
    assert files(run) == expected_files(run)


@pytest.mark.parametrize("lost", ["the range", "a commit behind it"])
def test_no_pack_goes_while_a_commit_is_missing(tmp_path: Path, lost: str) -> None:
    run = run_of_many_parts(tmp_path)
    done = compact(run)
    assert done is not None
    collect(run, grace_s=0)
    for first in (100, 104):
        add_rows(run, [scored(i) for i in range(first, first + 4)])
    half = Path(run.path("turns", "pack-dead-0001.parquet"))
    half.write_bytes(b"half")
    seq = done.commit.commit_seq
    Path(run.commit_path(seq, 1) if lost == "the range" else run.commit_path(seq + 1)).unlink()
    before = files(run)
    assert (remove_dead(run), collect(run, grace_s=0)) == ([], [])
    assert files(run) == before


def test_a_commit_behind_a_gap_waits(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    Path(run.commit_path(5)).unlink()
    done = compact(run)
    assert done is not None
    assert done.commit.commit_seq == 4


async def test_a_commit_that_is_compacted_is_not_published_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log = FileLog(tmp_path / "log.json")
    for first in (0, 4):
        add_rows(run, [scored(i) for i in range(first, first + 4)])
    log.state["parts"] = [
        {
            "commit_seq": commit.commit_seq,
            "part": commit.part,
            "published": commit.commit_seq < 2,
            "files": [],
        }
        for commit in run.commits()
    ]
    compact(run)
    collect(run, grace_s=0)
    before = files(run)
    writer = RunWriter(run, "demo", log, flush_s=0.0, flush_bytes=1 << 20)
    await writer.open(log.news())
    assert list(log.news().unpublished) == []
    assert files(run) == before


def test_checksums_are_of_values_and_not_of_order() -> None:
    rows = pa.table({"a": [1, 2, 2], "b": [[1.0], [2.0, 3.0], []]})
    assert checksum(rows) == checksum(rows.take([2, 0, 1]))
    assert checksum(rows) != checksum(rows.take([0, 1, 1]))
    assert checksum(rows) != checksum(rows.slice(1))


@pytest.mark.parametrize(("first", "stride"), [(2, 29), pytest.param(1, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("work", "steps"), [("compact", 60), ("score", 7)])
def test_a_kill_at_any_step_changes_no_row_and_leaves_no_file(
    tmp_path: Path, work: str, steps: int, first: int, stride: int
) -> None:
    command = [sys.executable, "-m", "tests.storage.kill_script", work, str(tmp_path)]
    done = subprocess.run(
        [*command, str(first), str(stride)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) >= steps


def test_every_table_has_an_order() -> None:
    assert set(ORDER_OF_ROWS) == set(TABLES)
