"""Stored runs in a notebook:

    runs = prorl.open("prorl-runs/*")
    runs.sql("select run_id, avg(reward) from rollouts group by all").df()

One SELECT at a time over the tables of all runs together, each with its `run_id`; nothing else is
within reach of the SQL. Paths, globs and URLs of run directories, also copied ones.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import duckdb
import pyarrow as pa

from prorl.analysis.annotations import annotate
from prorl.errors import NotFoundError, StorageError, UserError
from prorl.helper.child import Answer, serve
from prorl.helper.pool import pool
from prorl.helper.process import HelperError, HelperProgram, Late
from prorl.pluralize import pluralize
from prorl.schema import TABLES
from prorl.storage.files.runs import below, is_run, is_url, list_runs
from prorl.storage.read.catalog import DERIVED, VIEWS, StoredRun, is_intact, sources_of
from prorl.storage.read.sql import LockedDuckDB
from prorl.types import Json


class Runs:
    """Stored runs as they were when they were opened. Holds no open file."""

    def __init__(self, runs: Iterable[StoredRun]) -> None:
        self.runs = tuple(runs)

    def __repr__(self) -> str:
        return f"{pluralize(len(self.runs), 'run')}: {', '.join(run.run_id for run in self.runs)}"

    def sql(self, statement: str) -> duckdb.DuckDBPyRelation:
        """`table` for people: `.df()`, `.pl()`, `.arrow()`, or asked further."""
        return duckdb.from_arrow(self.table(statement))

    def table(self, statement: str, timeout_s: float | None = None) -> pa.Table:
        """One SELECT over the views. Raises UserError for anything else. With `timeout_s` a process
        of its own opens the runs anew, and is killed when that is over.
        """
        if timeout_s is not None:
            places = tuple(run.directory.where for run in self.runs)
            return _within(timeout_s, places, statement)
        if len(self.runs) == 1:
            return self.runs[0].sql(statement)
        with LockedDuckDB(threads=4, memory="2GB") as database:
            named = sources_of(statement)
            for name in VIEWS:
                _view(database, name, self.runs if name in named else self.runs[:1])
            for name, derived in DERIVED.items():
                database.view(name, derived.sql)
            try:
                return database.query(statement)
            except StorageError as error:
                raise self._blame(error) from None

    def annotate(self, rows: Iterable[Mapping[str, Json]], *, author: str) -> int:
        """Append annotations to the one run that is open here; how many. They are rows of
        `rollout_id`, `label`, `value`, `comment`, `turn`. Raises UserError.
        """
        if len(self.runs) != 1:
            raise UserError(f"annotations on {len(self.runs)} runs", "one open run")
        return annotate(self.runs[0], rows, author=author)

    def _blame(self, error: StorageError) -> StorageError:
        """The damaged run among them, if it is one's damage."""
        for run in self.runs:
            if any(not is_intact(run.directory, f) for name in TABLES for f in run.files(name)):
                return run.blame(error)
        return error


PROGRAM = HelperProgram(__spec__.name, memory_bytes=0, most=1)
"""A query over one huge value cannot be interrupted, only killed."""


def _within(timeout_s: float, places: tuple[str, ...], statement: str) -> pa.Table:
    with tempfile.TemporaryDirectory(prefix="prorl-sql-") as folder:
        path = f"{folder}/answer.arrow"
        asking = _ask((places, statement, path), timeout_s)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(asking)
        else:  # in a notebook, whose loop we may not run
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, asking).result()
        with pa.memory_map(path) as file:
            return pa.ipc.open_file(file).read_all()


async def _ask(question: tuple[tuple[str, ...], str, str], timeout_s: float) -> None:
    try:
        helpers = await pool(PROGRAM)
        await helpers.ask(question, label="SQL", wall_s=timeout_s, again=False)
    except Late:
        problem = f"SQL was stopped after {timeout_s:g} s"
        raise UserError(problem, "a query that ends sooner") from None
    except HelperError as error:
        raise UserError(str(error), "a query that needs less") from None


def _view(database: LockedDuckDB, name: str, runs: Iterable[StoredRun]) -> None:
    parts = []
    for number, run in enumerate(runs):
        source = run.view(name)
        has = "run_id" in source.schema.names
        label = "'" + run.run_id.replace("'", "''") + "'"
        columns = f"* replace ({label} as run_id)" if has else f"{label} as run_id, *"
        database.register(f"{name}_{number}", source)
        parts.append(f"select {columns} from {name}_{number}")
    database.view(name, " union all by name ".join(parts))


def open_runs(*where: str | Path) -> Runs:
    """Open run directories: paths, globs of paths, roots (all their runs), URLs. Raises
    NotFoundError when nothing is there.
    """
    places = [place for pattern in where for place in _places(str(pattern))]
    if not places:
        raise NotFoundError(f"no run at {', '.join(map(str, where)) or 'nothing'}")
    return Runs(StoredRun(place) for place in dict.fromkeys(places))


def _places(pattern: str) -> list[str]:
    if is_run(pattern):
        return [pattern]
    if is_url(pattern):
        root = pattern.removesuffix("*").rstrip("/")
        return [below(root, name) for name in list_runs(root)]
    if any(mark in pattern for mark in "*?["):
        return sorted(path for path in glob(pattern) if is_run(path))
    return [below(pattern, name) for name in list_runs(pattern)]


def prepare() -> Answer:
    return _answer


def _answer(question: tuple[tuple[str, ...], str, str]) -> None:
    places, statement, path = question
    table = open_runs(*places).table(statement)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    serve(prepare)
