"""Each byte of a store flipped, one at a time: `prorl verify` finds it, or it changes nothing.

Per file and not per store, in files of some ten kilobytes and in the page cache, so that a million
flips take minutes. `-m slow -s` flips every byte of about 1 MB and prints the table; by default
every 97th of a smaller one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl.analysis.annotations import annotate
from prorl.errors import ProrlError
from prorl.schema import APPENDED, SCORES, TABLES
from prorl.schema.fields import SCHEMA_VERSION
from prorl.storage.files.appended import AppendedTable, add_scores
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import MANIFEST, PARTIAL, PartFile, RunDir, manifest_digest
from prorl.storage.files.part_reader import read_part
from prorl.storage.files.parts import encode_partial
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import StoredRun, is_intact
from prorl.storage.read.verify import _by_itself, _commit, _commits, _manifest, verify
from tests.storage.compactable_run import run_of_many_parts
from tests.storage.run_directories import add_rows
from tests.storage.scored_rows import scored


def make_store(root: Path, width: int, rollouts: int) -> RunDir:
    """Every kind of file that a run directory may hold, packs and small parts."""
    run = run_of_many_parts(root)
    for first in range(100, 100 + rollouts, 4):
        add_rows(run, [scored(i, width=width) for i in range(first, first + 4)])
    compact(run, pack_bytes=48_000)
    add_rows(run, [scored(i, width=width) for i in range(1000, 1008)])
    manifest = {"run_id": "demo", "schema_version": SCHEMA_VERSION, "config": {"temperature": 1.0}}
    manifest["digest"] = manifest_digest(manifest)
    Path(run.path(MANIFEST)).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")
    write_durably(run.fs, run.path(PARTIAL, "3-1.parquet"), encode_partial(scored(3), "demo"))
    rows = [{"score": "s", "run_id": "demo", "rollout_id": 1, "attempt": 1, "reward": 0.5}]
    add_scores(run, "s", pa.Table.from_pylist(rows, schema=SCORES))
    annotate(StoredRun(run.root), [{"rollout_id": 1, "label": "good"}], author="me")
    assert verify(run.root) == []
    return run


@contextmanager
def bytes_of(path: Path) -> Iterator[mmap.mmap]:
    """A file's bytes as every reader sees them, to be changed in place."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        yield mapped


def detected_in_commits(run: RunDir) -> bool:
    """Returns whether `verify` detects it: an error that names the file, or a finding."""
    try:
        stored = StoredRun(run.root)
        rules = [*_manifest(stored), *_commits(stored.commits)]
        return bool(rules) or any(list(_commit(stored, commit)) for commit in stored.commits)
    except (ProrlError, UnicodeDecodeError):
        return True


Check = Callable[[], bool]


def checks(run: RunDir) -> dict[str, tuple[Check, Callable[[], Any]]]:
    """For each file, whether verify finds something, and what a reader gets from it."""
    stored = StoredRun(run.root)
    checks_by_name: dict[str, tuple[Check, Callable[[], Any]]] = {}
    for commit in stored.commits:
        for file in commit.files:
            checks_by_name[file.path] = (
                partial(_changed, run, file),
                partial(read_part, run, file),
            )
    appended = {name: AppendedTable(run, name) for name in APPENDED}
    for path in Path(run.root).rglob("*.*"):
        name = str(path.relative_to(run.root))
        if name.endswith(".json"):
            checks_by_name[name] = (
                lambda: detected_in_commits(run),
                lambda: StoredRun(run.root).commits,
            )
        elif (table := appended.get(name.partition("/")[0])) is not None:
            checks_by_name[name] = (partial(_has_problems, table), table.read)
        elif name not in checks_by_name and name.endswith(".parquet"):
            checks_by_name[name] = (partial(_seen, run, name), partial(_plain, path))
    return checks_by_name


def _has_problems(table: AppendedTable) -> bool:
    return bool(list(table.problems()))


def _changed(run: RunDir, file: PartFile) -> bool:
    return not is_intact(run, file)


def _seen(run: RunDir, name: str) -> bool:
    return bool(list(_by_itself(run, name)))


def _plain(path: Path) -> tuple[list[tuple[str, pa.DataType]], Any]:
    rows = pq.read_table(path, page_checksum_verification=True)
    return [(field.name, field.type) for field in rows.schema], rows.to_pylist()


def flip_all(run: RunDir, stride: int, read_stride: int) -> dict[str, list[int]]:
    """Returns for each folder the number of bytes: found by verify, harmless, changed unseen by
    verify, read without verify (of the sample): an error, the same, something else.
    """
    named = {file.path for commit in StoredRun(run.root).commits for file in commit.files}
    table: dict[str, list[int]] = {}
    for name, (seen, read) in sorted(checks(run).items()):
        path = Path(run.path(name))
        replaced = name.startswith(tuple(TABLES)) and name not in named and "empty" not in name
        if replaced or (name.startswith("commits/") and not _current(run, name)):
            continue  # what a range has replaced is read by nobody
        kind = "empty parts" if name.endswith("empty.parquet") else name.partition("/")[0]
        row = table.setdefault(kind, [0] * 7)
        whole = read()
        with bytes_of(path) as content:
            for at in range(0, len(content), stride):
                content[at] ^= 0xFF
                _count(row, seen(), whole, read, must_read=at % read_stride == 0)
                content[at] ^= 0xFF
    return table


def _count(
    row: list[int], detected: bool, whole: Any, read: Callable[[], Any], *, must_read: bool
) -> None:
    row[0] += 1
    row[1] += detected
    if not detected or must_read:
        got = "error"
        with suppress(ProrlError, pa.ArrowException, OSError, ValueError):
            got = "same" if read() == whole else "other"
        row[2] += not detected and got == "same"
        row[3] += not detected and got != "same"
        row[4 + ["error", "same", "other"].index(got)] += 1


def _current(run: RunDir, name: str) -> bool:
    stored = StoredRun(run.root)
    return any(name == f"commits/{commit.name}" for commit in stored.commits)


@pytest.mark.parametrize(
    ("width", "rollouts", "stride", "read_stride"),
    [
        (20, 8, 97, 1),
        pytest.param(400, 128, 1, 97, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["some", "every-byte"],
)
def test_every_flipped_byte_is_detected_or_harmless(
    tmp_path: Path, width: int, rollouts: int, stride: int, read_stride: int
) -> None:
    run = make_store(tmp_path, width, rollouts)
    table = flip_all(run, stride, read_stride)
    heads = ("flipped", "found", "harmless", "unseen", "read: error", "same", "OTHER")
    print(f"\n{'':12}", *(f"{head:>12}" for head in heads))
    for folder, row in table.items():
        print(f"{folder:12}", *(f"{count:12,}" for count in row))
    assert {folder: row[3] for folder, row in table.items() if row[3]} == {}
    assert all(table[name][1] == table[name][0] for name in ("sequences", "rollouts", "turns"))
    assert verify(run.root) == [], "everything was put back"
