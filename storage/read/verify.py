"""Checks a run directory against what its commits say: hashes, row counts, invariants, order.

A finding is one line about one file or row. No finding means: commits are dense; every named file
is there with the size, hash and rows that its commit says; nothing that no commit names lies
between them; no rollout, sequence or event is stored twice; sequences belong to rollouts that were
played, are valid and as many as the rollouts count, with their reward; the delivery order is dense
and within what was kept.
Not checked: whether the log accepted more rollouts than are stored (that needs control.db). A run
that is being written right now may show files that are about to be named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import SchemaError, StorageError
from prorl.pluralize import pluralize
from prorl.schema import APPENDED, TABLES
from prorl.schema.sequences import validate_sequences
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.durable import TEMP_MARK
from prorl.storage.files.layout import (
    COMMITS,
    EMPTY,
    MANIFEST,
    PARTIAL,
    Commit,
    PartFile,
    RunDir,
    manifest_digest,
)
from prorl.storage.files.part_reader import PartReader, read_file
from prorl.storage.files.parts import (
    COLUMNS_DIGEST,
    ROWS_DIGEST,
    columns_digest,
    rows_digest,
)
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.sql import LockedDuckDB


def verify(where: str | Path) -> list[StorageFinding]:
    """Raises as `StoredRun`."""
    stored = StoredRun(where)
    run = stored.directory
    findings = [*_manifest(stored), *_commits(stored.commits), *_strays(run, stored.commits)]
    findings += [finding for commit in stored.commits for finding in _commit(stored, commit)]
    for commit in stored.commits:
        for file in commit.files:
            findings += _file(run, file)
    for name in sorted(run.names(PARTIAL)):
        findings += _by_itself(run, f"{PARTIAL}/{name}")
    for table in TABLES:
        findings += _by_itself(run, f"{table}/{EMPTY}")
    for table in APPENDED:
        problems = AppendedTable(stored.directory, table).problems()
        findings += [StorageFinding(where=where, problem=problem) for where, problem in problems]
    return findings or list(broken_rules(stored))


def _commits(commits: Iterable[Commit]) -> Iterator[StorageFinding]:
    expected = 1
    for commit in commits:
        if (commit.first_seq or commit.commit_seq) != expected:
            yield StorageFinding(
                where="commits",
                problem=f"commit {commit.commit_seq} stands where {expected} was expected",
            )
            return
        expected = commit.commit_seq + 1


def _manifest(stored: StoredRun) -> Iterator[StorageFinding]:
    digest = stored.manifest.get("digest")
    if digest is not None and digest != manifest_digest(stored.manifest):
        yield StorageFinding(where=MANIFEST, problem="does not hold what its own digest says")


def _commit(stored: StoredRun, commit: Commit) -> Iterator[StorageFinding]:
    """Yields whether a commit is what a writer can have written."""
    run, name = stored.directory, commit.name
    where = f"{COMMITS}/{name}"
    if not run.has(where) or run.read(where) != commit.dumps():
        yield StorageFinding(where=where, problem="is not as it was written")
    if commit.run_id != stored.run_id:
        yield StorageFinding(
            where=where, problem=f"is of run {commit.run_id}, not of {stored.run_id}"
        )
    for file in commit.files:
        table, _, rest = file.path.partition("/")
        single = not commit.first_seq and rest != f"{commit.part}.parquet"
        if file.table not in TABLES or file.table != table or single:
            yield StorageFinding(
                where=where, problem=f"names {file.path} as {file.table} of {commit.part}"
            )


def _by_itself(run: RunDir, path: str) -> Iterator[StorageFinding]:
    """A file that no commit names says a digest of its rows itself, an empty part of its columns,
    which may be those of another prorl.
    """
    if not path.endswith(".parquet") or not run.has(path):
        return
    try:
        rows = read_file(run, path)
        rows.validate(full=True)
        digests = rows.schema.metadata or {}
        expected = digests.get(ROWS_DIGEST)
        if expected is not None and expected.decode() != rows_digest(rows):
            yield StorageFinding(where=path, problem="does not hold the rows that its footer says")
        elif path.endswith(f"/{EMPTY}") and rows.num_rows:
            yield StorageFinding(where=path, problem=f"holds {pluralize(rows.num_rows, 'row')}")
        elif (
            path.endswith(f"/{EMPTY}")
            and digests.get(COLUMNS_DIGEST) != columns_digest(rows.schema).encode()
        ):
            yield StorageFinding(
                where=path, problem="does not hold the columns that its footer says"
            )
    except (pa.ArrowException, OSError, ValueError, ArithmeticError) as error:
        yield StorageFinding(where=path, problem=f"cannot be read: {_short(error, run)}")


def _strays(run: RunDir, commits: Iterable[Commit]) -> Iterator[StorageFinding]:
    named = {file.path for commit in commits for file in commit.files} | run.replaced_files()
    for folder in (*TABLES, COMMITS, PARTIAL):
        for name in sorted(run.names(folder)):
            stray = folder in TABLES and name != EMPTY and f"{folder}/{name}" not in named
            if stray or name.startswith(TEMP_MARK):
                yield StorageFinding(where=f"{folder}/{name}", problem="is named by no commit")


def _file(run: RunDir, file: PartFile) -> Iterator[StorageFinding]:
    try:
        content = run.read(file.path)
    except FileNotFoundError:
        yield StorageFinding(where=file.path, problem="is missing")
        return
    except OSError as error:
        yield StorageFinding(where=file.path, problem=f"cannot be read: {_short(error, run)}")
        return
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256 or len(content) != file.bytes:
        yield StorageFinding(
            where=file.path,
            problem=(
                f"holds {len(content)} bytes with sha256 {digest}, its commit says {file.bytes} and"
                f" {file.sha256}"
            ),
        )
    try:
        yield from _rows(run, file)
    except (StorageError, SchemaError) as error:
        yield StorageFinding(where=file.path, problem=f"cannot be read: {_short(error, run)}")


def _short(error: Exception, run: RunDir) -> str:
    return str(error).replace(run.root + "/", "")


def _rows(run: RunDir, file: PartFile) -> Iterator[StorageFinding]:
    num_rows = 0
    with PartReader(run, file) as part:
        for i in range(part.num_row_groups):
            rows = part.read([i])
            num_rows += rows.num_rows
            if file.table == "sequences":
                yield from _invalid(file, rows)
    if num_rows != file.rows:
        yield StorageFinding(
            where=file.path,
            problem=f"holds {pluralize(num_rows, 'row')}, its commit says {file.rows}",
        )


def _invalid(file: PartFile, rows: pa.Table) -> Iterator[StorageFinding]:
    for batch in rows.to_batches():
        for sequence_id, problem in zip(
            batch.column("sequence_id").to_pylist(), validate_sequences(batch), strict=True
        ):
            if problem:
                yield StorageFinding(where=file.path, problem=f"sequence {sequence_id}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFinding:
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


_QUERIES = {
    "rollouts": {
        "rollout {0} is completed but its class is {1!r}": (
            """
            select rollout_id, failure_class from rollouts
            where status = 'completed' and failure_class not in ('', 'policy')"""
        ),
        "rollout {0} is {1} but valid": (
            "select rollout_id, status from rollouts where valid and status <> 'completed'"
        ),
    },
    "attempts": {
        "attempt {1} of rollout {0} is stored {2} times": (
            "select rollout_id, attempt, count(*) from attempts group by all having count(*) > 1"
        ),
        "attempt {1} of rollout {0} has committed, and ended without a row": (
            """
            select rollout_id, attempt from attempts
            semi join (from rollouts where status = 'completed') using (rollout_id, attempt)"""
        ),
    },
    "sequences": {
        "rollout {0} counts {1} sequences and {2} tokens, stored are {3} and {4}": (
            """
            select rollout_id, num_sequences, num_tokens, coalesce(n, 0), coalesce(t, 0)
            from rollouts left join (
                select rollout_id, attempt, count(*) as n, sum(num_tokens) as t
                from sequences group by all
            ) using (rollout_id, attempt)
            where num_sequences <> coalesce(n, 0) or num_tokens <> coalesce(t, 0)"""
        ),
        "sequence {0} belongs to no rollout that was played to its end in that attempt": (
            """
            select sequence_id from sequences
            anti join (from rollouts where status <> 'cancelled') using (rollout_id, attempt)"""
        ),
        "sequence {0} has the reward {1}, its rollout {2}": (
            """
            select sequence_id, s.reward, r.reward
            from sequences s join rollouts r using (rollout_id, attempt)
            where s.reward is distinct from r.reward"""
        ),
    },
    "turns": {
        "rollout {0} counts {1} turns, stored are {2}": (
            """
            select rollout_id, num_turns, count(turn)
            from rollouts left join turns using (rollout_id, attempt)
            group by rollout_id, num_turns
            having num_turns <> count(turn)"""
        ),
    },
    "groups": {
        "group {0} was decided {1} times": (
            "select group_id, count(*) from groups where event = 'decided' group by 1 having"
            " count(*) > 1"
        ),
        "group {0} was delivered but never kept": (
            """
            select group_id from groups where event = 'delivered'
            and group_id not in (select group_id from groups where event = 'decided' and kept)"""
        ),
        "delivery_seq {0} stands where {1} was expected": (
            """
            select delivery_seq, n from (
                select delivery_seq, row_number() over (order by delivery_seq) - 1 as n
                from groups where event = 'delivered'
            ) where delivery_seq <> n"""
        ),
    },
    "trained": {
        "checkpoint {0} was trained on sequence {1}, which is not stored": (
            "select checkpoint, sequence_id from trained anti join sequences using (sequence_id)"
        ),
        "checkpoint {0} was trained on sequence {1} {2} times": (
            """
            select checkpoint, sequence_id, count(*) from trained
            group by consumer, checkpoint, sequence_id having count(*) > 1"""
        ),
    },
    "annotations": {
        "annotation {0} is of rollout {1}, which is not stored": (
            "select annotation_id, rollout_id from annotations anti join rollouts using"
            " (rollout_id)"
        ),
    },
}
"""Per table: what is wrong -> rows for which it is. `sequences` here is its scalar columns and
num_tokens.
"""


_ONCE = {
    "rollouts": "rollout_id",
    "sequences": "sequence_id",
    "groups": "event_seq",
    "tasks": "group_id",
}
"""The column by which a row of a table is known."""

_MOST = 20
"""Rows that one rule reports."""


def broken_rules(stored: StoredRun) -> Iterator[StorageFinding]:
    with LockedDuckDB(memory="2GB") as database:
        for table in ("rollouts", "turns", "groups", "tasks", "attempts", *APPENDED):
            database.register(table, stored.view(table))
        database.register("sequences", _sequence_counts(stored))
        for table, key in _ONCE.items():
            twice = (
                f"select {key}, count(*) as n from {table} group by 1 having n > 1 limit {_MOST}"
            )
            for row in database.query(twice).to_pylist():
                problem = f"{key.rpartition('_')[0]} {row[key]} is stored {row['n']} times"
                yield StorageFinding(where=table, problem=problem)
        for table, rules in _QUERIES.items():
            for text, sql in rules.items():
                for row in database.query(f"{sql} limit {_MOST}").to_pylist():
                    yield StorageFinding(where=table, problem=text.format(*row.values()))


def _sequence_counts(stored: StoredRun) -> pa.Table:
    keys = ["sequence_id", "rollout_id", "attempt", "reward"]
    batches = stored.dataset("sequences").to_batches(columns=[*keys, "token_ids"])
    schema = pa.schema(
        [TABLES["sequences"].field(name) for name in keys] + [("num_tokens", pa.int64())]
    )
    counted = []
    for batch in batches:
        num_tokens = pc.list_value_length(batch.column("token_ids")).cast(pa.int64())
        columns = [*(batch.column(name) for name in keys), num_tokens]
        counted.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return pa.Table.from_batches(counted, schema)
