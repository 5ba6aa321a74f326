"""Tables that grow beside the commits: each append once, whoever else appends, whatever dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prorl
from prorl.analysis.annotations import annotation_rows
from prorl.errors import SchemaError, UserError
from prorl.schema import ANNOTATIONS
from prorl.storage.files.appended import MANY, AppendedTable, PieceName, cover
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.files.parts import encode_by_itself
from prorl.storage.keep.compact import collect
from prorl.storage.read.catalog import query
from prorl.storage.read.verify import verify
from tests.storage.run_directories import add_rows, new_run
from tests.storage.scored_rows import scored


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Four rollouts."""
    made = new_run(tmp_path)
    add_rows(made, [scored(i) for i in range(4)])
    return made


def note(i: int) -> pa.Table:
    return annotation_rows([{"rollout_id": i % 4, "label": f"l{i}"}], author="me", run_id="demo")


def labels(run: RunDir) -> list[str]:
    return [
        str(label) for label in AppendedTable(run, "annotations").read().column("label").to_pylist()
    ]


def test_the_same_key_adds_nothing(run: RunDir) -> None:
    table = AppendedTable(run, "annotations")
    assert table.append(note(0), "a")
    assert not table.append(note(1), "a")
    assert not AppendedTable(run, "annotations").append(note(1), "a"), "another process"
    assert AppendedTable(run, "annotations").append(note(1), "b")
    assert labels(run) == ["l0", "l1"]
    with pytest.raises(SchemaError, match="rows for annotations"):
        table.append(note(1).drop_columns(["label"]), "c")


def test_rows_of_an_older_and_of_a_younger_prorl_are_read_merged_and_kept(run: RunDir) -> None:
    table = AppendedTable(run, "annotations")
    run.fs.makedirs(run.path("annotations"))
    for i in range(MANY):
        rows = note(i)
        if i % 2:
            rows = rows.append_column("of_tomorrow", pa.array([f"t{i}"]))
        else:
            rows = rows.drop_columns(["value", "turn"])
        content = encode_by_itself(rows, {**(ANNOTATIONS.metadata or {}), b"prorl.keys": b"[]"})
        write_durably(run.fs, run.path("annotations", f"{i + 1:010d}.parquet"), content)
    for _ in range(2):
        rows = table.read()
        assert rows.schema.names == ANNOTATIONS.names
        assert rows.column("label").to_pylist() == [f"l{i}" for i in range(MANY)]
        assert list(table.problems()) == []
        assert verify(run.root) == []
        collect(run, grace_s=0)
    assert table.pieces() == [PieceName(1, MANY)]
    merged = pq.read_table(table.path(PieceName(1, MANY)), partitioning=None)
    values = [f"t{i}" if i % 2 else None for i in range(MANY)]
    assert merged.column("of_tomorrow").to_pylist() == values


def test_many_who_append_at_once_lose_nothing(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda i: AppendedTable(run, "annotations").append(note(i), str(i)), range(40))
        )
    assert sorted(labels(run)) == sorted(f"l{i}" for i in range(40))
    assert AppendedTable(run, "annotations").pieces() == [PieceName(i, i) for i in range(1, 41)]


def test_merged_files_hold_the_same_rows_in_order(run: RunDir) -> None:
    table = AppendedTable(run, "annotations")
    for i in range(3 * MANY):
        table.append(note(i), str(i))
        if i % 50 == 49:
            collect(run, grace_s=0)
    collect(run, grace_s=0)
    assert len(table.pieces()) < MANY
    assert len(list((Path(run.root) / "annotations").iterdir())) == len(table.pieces())
    assert labels(run) == [f"l{i}" for i in range(3 * MANY)]
    assert not AppendedTable(run, "annotations").append(note(0), "0"), "keys are merged too"
    assert verify(run.root) == []


def test_large_files_are_not_merged(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.storage.files.appended.FULL_BYTES", 1)
    table = AppendedTable(run, "annotations")
    for i in range(MANY):
        table.append(note(i), str(i))
    collect(run, grace_s=0)
    assert len(table.pieces()) == MANY


def test_a_reader_sees_either_the_small_files_or_the_range() -> None:
    singles = [PieceName(i, i) for i in range(1, 5)]
    assert cover([*singles, PieceName(1, 3)]) == [PieceName(1, 3), PieceName(4, 4)]
    assert cover([PieceName(1, 3), PieceName(1, 4), *singles[2:]]) == [PieceName(1, 4)]


def test_damage_is_detected(run: RunDir) -> None:
    table = AppendedTable(run, "annotations")
    for i in range(3):
        table.append(note(i), str(i))
    path, rows = Path(table.path(PieceName(2, 2))), table.read()
    content, num_detected = path.read_bytes(), 0
    for at in range(0, len(content), 13):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        problems = list(table.problems())
        assert {where for where, _ in problems} <= {"annotations/0000000002.parquet"}
        assert problems or table.read() == rows, f"byte {at} changes what is read, unseen"
        num_detected += bool(problems)
    assert num_detected > len(content) / 13 / 2
    path.unlink()
    (finding,) = verify(run.root)
    assert "what lay between is missing" in finding.problem


def test_annotations_in_sql_and_from_a_notebook(run: RunDir) -> None:
    prorl.open(run.root).annotate(
        [{"rollout_id": 2, "label": "hack", "value": 0.5, "comment": "reads the tests", "turn": 1}],
        author="ann",
    )
    (row,) = query(
        run.root, "select * from annotations join rollouts using (rollout_id)"
    ).to_pylist()
    assert (row["label"], row["value"], row["turn"], row["author"]) == ("hack", 0.5, 1, "ann")
    with pytest.raises(UserError, match="rollout 9"):
        prorl.open(run.root).annotate([{"rollout_id": 9, "label": "x"}], author="ann")
    with pytest.raises(UserError, match="labl"):
        prorl.open(run.root).annotate([{"rollout_id": 1, "labl": "x"}], author="ann")
    assert ANNOTATIONS.names[0] == "run_id"
