"""Opening a run directory, a copied one too: its tables as Arrow datasets, and SQL over them.

Only files that commits name are opened. DuckDB sees registered datasets and nothing else
(`LockedDuckDB`), so that SQL from a user can neither write nor read another file. Views:
`sequences, rollouts, turns, messages, groups, tasks, attempts`, `deliveries` (group_id,
delivery_seq, min_version: the order in which groups were handed out), `scores` (rewards given
later), `trained` (which sequences made which checkpoint), `annotations`, `versions` (published
weights and where they are), `metrics` (what trainers logged, the last of each step), and `partial`
(what attempts that did not commit had sampled, superseded ones too); made of them, `passk` (pass@k
of each group) and `tool_calls` (a row a call).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from prorl.errors import NotFoundError, StorageError
from prorl.schema import APPENDED, ARROW_ERRORS, SCORED, TABLES
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import PARTIAL, Commit, CommitName, PartFile, RunDir
from prorl.storage.files.part_reader import dataset, rows_of
from prorl.types import Json

_DELIVERIES = pa.schema(
    [TABLES["groups"].field(name) for name in ("group_id", "delivery_seq", "min_version")]
)

VIEWS: Mapping[str, pa.Schema] = {
    **TABLES,
    "deliveries": _DELIVERIES,
    **APPENDED,
    PARTIAL: SCORED,
}
"""The views that SQL sees."""


class DerivedView(NamedTuple):
    source: str
    sql: str


DERIVED: Mapping[str, DerivedView] = {
    # 1 - C(n - c, k) / C(n, k), unbiased: Chen et al. 2021, arXiv 2107.03374
    "passk": DerivedView(
        "rollouts",
        """
with members as (
    select run_id, group_id, task_id, data_source, count(*)::bigint as n,
        count(*) filter (reward >= 1)::bigint as c
    from rollouts where valid group by all),
ks as (select *, unnest([1, 2, 4, 8, 16, 32, 64]) as k from members)
select run_id, group_id, task_id, data_source, n, c, k,
    if(n - c < k, 1.0, 1.0 - exp(
        lgamma(n - c + 1) - lgamma(n - c - k + 1) + lgamma(n - k + 1) - lgamma(n + 1)))
    as pass_at_k
from ks where k <= n""",
    ),
    "tool_calls": DerivedView(
        "messages",
        r"""
with parsed as (
    select run_id, rollout_id, attempt, turn, from_json(tool_calls,
        '[{"name": "VARCHAR", "arguments": "JSON", "error": "VARCHAR"}]') as calls
    from messages where role = 'assistant' and tool_calls <> ''),
calls as (
    select run_id, rollout_id, attempt, turn, unnest(calls) as call,
        generate_subscripts(calls, 1) as place
    from parsed),
replies as (
    select run_id, rollout_id, attempt, turn, content, row_number() over (
        partition by run_id, rollout_id, attempt, turn order by "index") as place
    from messages where role = 'tool')
select run_id, rollout_id, attempt, turn, call.name, call.arguments,
    coalesce(call.error, '') as error,
    if(content is null, null, coalesce(
        try_cast(regexp_extract(content, '\[exit status (-?\d+)\]$', 1) as integer), 0))
        as exit_code,
    regexp_matches(content, '\[stopped after \S+ s\]$') as timed_out
from calls left join replies using (run_id, rollout_id, attempt, turn, place)""",
    ),
}
"""The views that are made when SQL names them."""


def sources_of(statement: str) -> set[str]:
    """Views that a statement may read, those that derived ones are made of too, in small letters.

    >>> sorted(sources_of("SELECT avg(pass_at_k) FROM passk"))[-2:]
    ['rollouts', 'select']
    """
    named = {word.lower() for word in _WORD.findall(statement)}
    return named | {DERIVED[name].source for name in DERIVED.keys() & named}


OF_ROLLOUTS = ("rollouts", "sequences", "turns", "messages")
"""Tables whose rows belong to a rollout."""

_THREADS = 4
_WORD = re.compile(r"\w+")


Sources = tuple[Commit, ...] | tuple[str, ...]
"""The sources of a view: the commits of a run, or files that are appended."""


class StoredRun:
    """A run directory as it was when it was opened. Holds no open file. When it was compacted
    since, and the parts that it was opened with are gone, it is opened again: the same rows and
    those that came meanwhile.
    """

    def __init__(self, where: str | Path) -> None:
        """Raises NotFoundError for what is no run directory, SchemaError for a newer one."""
        self.directory = RunDir(where)
        self.manifest: Mapping[str, Json] = self.directory.manifest()
        self.commits: tuple[Commit, ...] = tuple(self.directory.commits())

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id") or self.directory.name)

    def refresh(self) -> None:
        """Take what was committed since it was opened. Raises as the constructor."""
        if self.directory.current_names() == [commit.name for commit in self.commits]:
            return
        known, manifest = self.commits, self.directory.manifest()
        if manifest != self.manifest:  # another run has the name now
            known, self.manifest = (), manifest
        self.commits = tuple(self.directory.commits(known))

    def files(self, table: str) -> list[PartFile]:
        return [
            file
            for commit in self.commits
            for file in commit.files
            if file.table == table and file.rows
        ]

    def dataset(self, table: str) -> ds.Dataset:
        paths = [file.path for file in self.files(table)]
        return dataset(self.directory, paths, TABLES[table])

    def read(self, table: str, columns: list[str] | None = None) -> pa.Table:
        try:
            return self.dataset(table).to_table(columns=columns)
        except ARROW_ERRORS as error:
            if not self._moved():
                raise self.blame(error, [table]) from None
            return self.dataset(table).to_table(columns=columns)

    def rollout(self, rollout_id: int) -> dict[str, pa.Table]:
        """Returns the rows of one rollout in `rollouts`, `sequences`, `turns` and `messages`.
        Raises NotFoundError, StorageError.
        """
        try:
            tables = {table: self.rows_of(table, rollout_id) for table in OF_ROLLOUTS}
        except StorageError as error:
            if not self._moved():
                raise self.blame(error, OF_ROLLOUTS) from None
            tables = {table: self.rows_of(table, rollout_id) for table in OF_ROLLOUTS}
        if not tables["rollouts"].num_rows:
            raise NotFoundError(f"run {self.run_id} has no rollout {rollout_id}")
        return tables

    def rows_of(self, table: str, rollout_id: int) -> pa.Table:
        return rows_of(self.directory, self.files(table), TABLES[table], rollout_id)

    def sources(self, name: str) -> Sources:
        """Returns what a view of `VIEWS` consists of now: equal ones have the same rows."""
        if name in APPENDED:
            return tuple(map(str, AppendedTable(self.directory, name).pieces()))
        return tuple(self._partial_names()) if name == PARTIAL else self.commits

    def view(self, name: str) -> Any:
        """Returns what SQL sees under a name of `VIEWS`: a dataset, or a table made for it."""
        if name in TABLES:
            return self.dataset(name)
        if name == "metrics":
            return self.metrics()
        if name in APPENDED:
            table = AppendedTable(self.directory, name)
            paths = [f"{name}/{piece}" for piece in table.pieces()]
            return dataset(self.directory, paths, table.schema)
        return self.partial() if name == PARTIAL else self.deliveries()

    def metrics(self) -> pa.Table:
        """Returns what trainers logged. A step that was trained again, after a crash, was logged
        again: the last row of each consumer, step and name counts. A replay's rows are its own.
        """
        rows = AppendedTable(self.directory, "metrics").read()
        keys = ["run_id", "consumer", "step", "name"]
        order = pa.array(np.arange(rows.num_rows))
        last = rows.select(keys).append_column("row", order).group_by(keys)
        return rows.take(last.aggregate([("row", "max")]).column("row_max").combine_chunks().sort())

    def attempts(self, rollout_id: int) -> list[dict[str, Json]]:
        """Attempts of a rollout that did not commit: rows of `attempts` in order, each with the
        `messages` and `turns` that `partial` has of it. Raises StorageError.
        """
        rows = self.rows_of("attempts", rollout_id).sort_by("attempt").to_pylist()
        if not rows:
            return []
        played = self.partial(rollout_id).select(["attempt", "messages", "turns"]).to_pylist()
        by_attempt = {row.pop("attempt"): row for row in played}
        nothing: dict[str, Json] = {"messages": [], "turns": []}
        return [{**row, **by_attempt.get(row["attempt"], nothing)} for row in rows]

    def partial(self, rollout_id: int | None = None) -> pa.Table:
        """Returns what attempts that did not commit had sampled, of one rollout or of all, in
        SCORED's shape; each once, if it was sent twice.
        """
        paths = [f"{PARTIAL}/{name}" for name in self._partial_names()]
        try:
            only = None if rollout_id is None else pc.field("rollout_id") == rollout_id
            rows = dataset(self.directory, paths, SCORED).to_table(filter=only)
        except pa.ArrowException as error:
            raise StorageError(f"{self.directory.path(PARTIAL)}: {error}") from None
        keys = pa.table(
            {
                "rollout_id": rows.column("rollout_id"),
                "attempt": rows.column("attempt"),
                "at": pa.array(range(rows.num_rows), pa.int64()),
            }
        )
        once = keys.group_by(["rollout_id", "attempt"]).aggregate([("at", "min")])
        return rows.take(once.column("at_min").combine_chunks().sort())

    def _partial_names(self) -> list[str]:
        names = self.directory.names(PARTIAL)
        return sorted(name for name in names if not name.startswith("."))

    def sql(self, statement: str) -> pa.Table:
        """Run one SELECT over the views. Raises UserError for anything else."""
        (rows,) = self.answers(statement)
        return rows

    def answers(self, *statements: str) -> list[pa.Table]:
        """Answers several queries in one database: to make one costs more than a small SELECT."""
        named = sources_of(" ".join(statements))
        try:
            return self._answers(statements, named)
        except (StorageError, OSError) as error:
            # What is appended may have been merged between our listing and our reading.
            if not self._moved() and not named & set(APPENDED):
                raise self.blame(error, [name for name in TABLES if name in named]) from None
            return self._answers(statements, named)

    def blame(self, error: Exception, tables: Iterable[str] = tuple(TABLES)) -> StorageError:
        """Returns an error that names the missing or damaged parts of these tables."""
        files = [file for table in tables for file in self.files(table)]
        damaged = [file.path for file in files if not is_intact(self.directory, file)]
        if not damaged:
            return StorageError(f"{self.directory.where}: {error}")
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        return StorageError(
            f"{self.directory.where} is damaged: {', '.join(damaged[:3])}{more} does not hold what"
            f" its commit says; `prorl verify` tells more"
        )

    def _moved(self) -> bool:
        """Returns whether the run was compacted since it was opened; it is then opened again."""
        before = self.commits
        opened = before[0].name if before and before[0].first_seq else CommitName(0, 0)
        if self.directory.compacted() != opened:
            self.commits = tuple(self.directory.commits())
        return self.commits is not before

    def _answers(self, statements: Iterable[str], named: Container[str]) -> list[pa.Table]:
        from prorl.storage.read.sql import LockedDuckDB  # DuckDB takes long to import

        with LockedDuckDB(threads=_THREADS, memory="2GB") as database:
            for name, empty in VIEWS.items():
                # A view that is not named is there for DuckDB's suggestions only.
                database.register(name, self.view(name) if name in named else empty.empty_table())
            for name, derived in DERIVED.items():
                database.view(name, derived.sql)
            return [database.query(statement) for statement in statements]

    def deliveries(self) -> pa.Table:
        events = self.read("groups", ["group_id", "event", "delivery_seq", "min_version"])
        delivered = events.filter(pc.equal(events.column("event"), "delivered"))
        return delivered.select(_DELIVERIES.names).sort_by("delivery_seq")

    def decided(self) -> pa.ChunkedArray:
        events = self.read("groups", ["group_id", "event"])
        decisions = events.filter(pc.equal(events.column("event"), "decided"))
        return decisions.column("group_id")

    def delivered(self) -> NDArray[np.int64]:
        """Group ids in delivery order. Raises StorageError for an order with a hole."""
        order = self.deliveries()
        seqs = order.column("delivery_seq").to_numpy()
        if not np.array_equal(seqs, np.arange(len(seqs))):
            raise StorageError(
                f"the delivery order of {self.directory.where} has holes or doubles",
                "each delivery_seq from 0 on, once",
                "`prorl verify` says what is damaged",
            )
        groups: NDArray[np.int64] = order.column("group_id").to_numpy()
        return groups


def is_intact(run: RunDir, file: PartFile) -> bool:
    try:
        content = run.read(file.path)
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == file.sha256


def query(run_dir: str | Path, sql: str) -> pa.Table:
    """One SELECT over the views of a run directory. Raises as `StoredRun` and its `sql`."""
    return StoredRun(run_dir).sql(sql)
