"""Parts on disk: layout, settings, reading by commits only, SQL over a copied directory, newer
schemas.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.analysis.opened import open_runs
from prorl.errors import NotFoundError, SchemaError, StorageError, UserError
from prorl.schema import SEQUENCES, TABLES
from prorl.schema.fields import SCHEMA_VERSION
from prorl.schema.rows import row_hashes
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import Commit, RunDir
from prorl.storage.files.part_reader import read_part
from prorl.storage.files.parts import LARGE_GROUP_ROWS, LARGE_ROWS, encode, row_groups
from prorl.storage.files.runs import list_runs
from prorl.storage.read.catalog import StoredRun, query
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.replay import stored_index
from prorl.storage.write.convert import tables
from prorl.types import AttemptKey, Failure, FailureCode, SandboxRef
from tests import strategies as ours
from tests.edge_rows import leased_batch, ran_row, ready_row, scored_row
from tests.storage.run_directories import (
    add_commit,
    add_events,
    add_rows,
    add_terminals,
    event,
    new_run,
)
from tests.storage.scored_rows import scored, terminal


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(ours.leases, ours.trajectories, ours.scores), min_size=1, max_size=5))
def test_whatever_a_rollout_holds_comes_back_from_parquet_and_as_a_group(
    drawn: list[tuple[Any, Any, Any]],
) -> None:
    rows = []
    for i, (lease, trajectory, score) in enumerate(drawn):
        lease = replace(lease, key=AttemptKey("demo", i, 1), group_id=i // 2, sample_index=i % 2)
        ready = ready_row(
            leased_batch([lease]), sandbox=SandboxRef(), prompt=(), tools=(), init_s=0.0
        )
        rows.append(
            scored_row(
                ran_row(ready, trajectory, run_s=0.0),
                score=score,
                failure=Failure(code=FailureCode.NONE),
                eval_s=0.0,
            )
        )
    expected = tables(pa.concat_batches(rows))
    with tempfile.TemporaryDirectory() as directory:
        run = new_run(Path(directory))
        commit = add_commit(
            run,
            {
                name: pa.Table.from_batches([batch])
                for name, batch in expected.items()
                if batch.num_rows
            },
        )
        for file in commit.files:
            (stored_batch,) = read_part(run, file).combine_chunks().to_batches()
            assert row_hashes(stored_batch) == row_hashes(expected[file.table]), file.table
        index = stored_index(StoredRun(run.root))
        stored = [group_id for group_id in range(len(rows)) if group_id in index]
        groups = [index.read(group_id) for group_id in stored]
    scored_rows = expected["sequences"].filter(pc.is_valid(expected["sequences"].column("reward")))
    assert row_hashes(pa.concat_batches([scored_rows[:0], *groups])) == row_hashes(scored_rows)


@pytest.mark.parametrize(("width", "compression"), [(20, "UNCOMPRESSED"), (2000, "ZSTD")])
def test_parquet_settings(width: int, compression: str) -> None:
    """A small table is not compressed."""
    rows = pa.Table.from_batches(
        [tables(pa.concat_batches([scored(i, width=width) for i in range(40)]))["sequences"]]
    )
    meta = pq.ParquetFile(pa.BufferReader(encode("sequences", rows, "demo", "part-1"))).metadata
    columns = {
        meta.row_group(0).column(i).path_in_schema: meta.row_group(0).column(i)
        for i in range(meta.num_columns)
    }
    for name in ("token_ids.list.element", "logprobs.list.element"):
        assert set(columns[name].encodings) == {"BYTE_STREAM_SPLIT", "RLE"}
        assert columns[name].compression == compression
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [8] * 5
    assert meta.metadata[b"prorl.run_id"] == b"demo"
    assert meta.metadata[b"prorl.schema_version"] == str(SCHEMA_VERSION).encode()


@given(st.lists(st.integers(1, 90), max_size=40))
def test_row_groups_tile_the_rows_and_respect_groups(sizes: list[int]) -> None:
    ids = [i for i, size in enumerate(sizes) for _ in range(size)]
    cuts = row_groups(pa.table({"group_id": pa.array(ids, pa.int64())}))
    most = 64 if len(ids) <= LARGE_ROWS else LARGE_GROUP_ROWS
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts)][: len(cuts)]
    assert sum(stop - start for start, stop in cuts) == len(ids)
    for start, stop in cuts:
        if stop == start:
            continue
        assert stop - start <= most
        inside = stop < len(ids) and ids[stop - 1] == ids[stop]
        assert not inside or sizes[ids[stop]] > most


def test_plain_globs_work_from_the_start(tmp_path: Path) -> None:
    new_run(tmp_path)
    for name, schema in TABLES.items():
        with duckdb.connect() as connection:
            cursor = connection.execute(f"select * from '{tmp_path}/demo/{name}/*.parquet'")
            assert [column[0] for column in cursor.description or ()] == schema.names
            assert cursor.fetchall() == []


def test_only_files_that_a_commit_names_are_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_rows(run, [scored(i) for i in range(4)])
    orphan = encode(
        "rollouts", pa.Table.from_batches([tables(scored(9))["rollouts"]]), "demo", "part-x"
    )
    write_durably(run.fs, run.path("rollouts", "part-x.parquet"), orphan)
    assert query(run.root, "select count(*) as n from rollouts").to_pylist() == [{"n": 4}]
    assert run.sweep({"part-0001"}) == ["rollouts/part-x.parquet"]
    assert run.sweep({"part-0001"}) == []


def test_parts_of_a_commit_that_is_missing_are_kept(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for first in (0, 4):
        add_rows(run, [scored(i) for i in range(first, first + 4)])
    Path(run.commit_path(1)).unlink()
    assert run.sweep((), num_commits=2) == []
    assert len(run.sweep((), num_commits=0)) == 4


def test_sql_over_a_copied_directory(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_rows(run, [scored(i, reward=i % 2) for i in range(4)])
    add_terminals(run, terminal(4))
    add_events(run, event(0, 0, "decided"), event(1, 0, "delivered", delivery_seq=0))
    shutil.copytree(tmp_path / "demo", tmp_path / "copy")
    shutil.rmtree(tmp_path / "demo")
    copy = tmp_path / "copy"
    statement = (
        "select status, count(*) as n, avg(reward) as mean from rollouts group by status order by"
        " status"
    )
    assert query(copy, statement).to_pylist() == [
        {"status": "completed", "n": 4, "mean": 0.5},
        {"status": "failed", "n": 1, "mean": None},
    ]
    tokens = query(
        copy, "select sum(len(token_ids)) as n from sequences join deliveries using (group_id)"
    )
    assert tokens.to_pylist() == [{"n": 80}]
    assert query(copy, "select count(*) as n from messages where role = 'grader'").to_pylist() == [
        {"n": 4}
    ]
    assert StoredRun(copy).run_id == "demo"
    assert list_runs(tmp_path) == ["copy"]


def test_a_folder_that_is_no_run_is_refused_in_a_single_line(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is no run directory"):
        StoredRun(tmp_path / "nothing")
    assert list_runs(tmp_path / "nothing") == []


def test_a_run_of_another_schema_names_the_prorl_to_read_it_with(tmp_path: Path) -> None:
    new_run(tmp_path, schema_version=99, code_version="9.9.0")
    with pytest.raises(
        SchemaError, match=r"by prorl 9.9.0 \(schema 99\); .* read it with that version"
    ):
        StoredRun(tmp_path / "demo")


def test_a_newer_commit_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    newer = orjson.loads(Commit(commit_seq=1, part="part-1", files=(), run_id="demo").dumps()) | {
        "schema_version": SCHEMA_VERSION + 1,
        "unheard": 1,
    }
    write_durably(run.fs, run.commit_path(1), orjson.dumps(newer))
    with pytest.raises(SchemaError, match=f"schema version {SCHEMA_VERSION + 1}"):
        run.commits()


def test_a_flipped_byte_is_refused_when_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    commit = add_rows(run, [scored(i, width=200) for i in range(4)])
    file = next(f for f in commit.files if f.table == "sequences")
    flip(Path(run.path(file.path)), 2000)
    with pytest.raises(StorageError, match=r"sequences/part-0001.parquet"):
        read_part(run, file)
    with pytest.raises(StorageError, match=r"is damaged: sequences/part-0001.parquet does not"):
        query(run.root, "select sum(list_sum(token_ids)) from sequences")
    with pytest.raises(StorageError, match=r"is damaged: sequences/part-0001.parquet does not"):
        StoredRun(run.root).read("sequences")
    new_run(tmp_path, "whole")
    with pytest.raises(StorageError, match=r"demo is damaged: sequences/part-0001.parquet"):
        open_runs(tmp_path).sql("select sum(list_sum(token_ids)) from sequences")
    assert query(run.root, "select count(*) as n from rollouts").to_pylist() == [{"n": 4}]


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_publishing_twice_is_success_and_other_content_is_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_durably(run.fs, run.path("a"), b"one")
    write_durably(run.fs, run.path("a"), b"one")
    with pytest.raises(StorageError, match="other content"):
        write_durably(run.fs, run.path("a"), b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot store"):
        write_durably(RunDir(tmp_path).fs, str(tmp_path / "nowhere" / "a"), b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            write_durably(RunDir(tmp_path).fs, str(tmp_path / "a"), b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_group_is_the_same_batch_wherever_its_members_lie(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    rows = [scored(i) for i in range(12)]
    together = tables(pa.concat_batches(rows[4:8]))["sequences"]
    add_rows(run, rows[:6])
    add_rows(run, [rows[7], *rows[8:]])
    add_rows(run, [rows[6]])
    index = GroupIndex(run)
    index.take_over(index.look())
    assert row_hashes(index.read(1)) == row_hashes(together)
    assert index.read(1).schema.equals(SEQUENCES)
    with pytest.raises(NotFoundError):
        index.read(99)


def test_cached_rows_equal_stored_rows_and_stay_within_bounds(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    index, cold = GroupIndex(run, cache_bytes=4000), GroupIndex(run)
    for start in range(0, 32, 8):
        rows = [scored(i) for i in range(start, start + 8)]
        commit = add_rows(run, rows)
        file = next(file for file in commit.files if file.table == "sequences")
        written = pa.Table.from_batches([tables(pa.concat_batches(rows))["sequences"]])
        index.add_written(file, written, commit.commit_seq)
    cold.take_over(cold.look())
    assert 0 < index.table_bytes <= 4000
    for group_id in range(8):
        assert row_hashes(index.read(group_id)) == row_hashes(cold.read(group_id))


@pytest.mark.parametrize(
    ("statement", "suggestion"),
    [
        ("select rewrd from rollouts", 'Candidate bindings: "reward"'),
        ("select * from rolouts", 'Did you mean "rollouts"'),
    ],
)
def test_a_mistake_in_sql_brings_the_suggestion(
    tmp_path: Path, statement: str, suggestion: str
) -> None:
    with pytest.raises(UserError, match=suggestion) as caught:
        StoredRun(new_run(tmp_path).root).sql(statement)
    assert "LINE 1" not in str(caught.value)


def test_a_large_file_of_short_rows_has_few_row_groups() -> None:
    ids = pa.array([i // 8 for i in range(4096)], pa.int64())
    narrow = row_groups(pa.table({"group_id": ids}))
    assert len(narrow) == 1
    wide = pa.table({"group_id": ids, "x": pa.array([b"x" * 40_000] * 4096)})
    assert len(row_groups(wide)) == 4096 // 32
    assert all(start % 8 == 0 for start, _ in narrow), "groups stay whole"
