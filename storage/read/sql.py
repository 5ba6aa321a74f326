"""A DuckDB that only reads what it was given: one SELECT at a time, stopped at a deadline.

Users' SQL (a run's filter, `prorl sql`) runs inside our processes, so everything that is not a
query over registered tables must fail: external access is off, Python variables are not tables, the
configuration is locked, and a text that is not exactly one SELECT is refused before it is bound
(DuckDB would run the statements before the last one while binding it).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from prorl.errors import ProrlError, StorageError, UserError

_SETTINGS = (
    "set temp_directory = ''",
    "set autoinstall_known_extensions = false",
    "set autoload_known_extensions = false",
    "set python_enable_replacements = false",
    "set enable_external_access = false",
    "set lock_configuration = true",
)

_SOURCE = "reading the stream registered as "
"""The words with which DuckDB begins when it was not the SQL that failed, but what was
registered.
"""


def _error_text(error: duckdb.Error) -> str:
    """Returns DuckDB's message with its suggestions, without its picture of the statement."""
    lines = itertools.takewhile(
        lambda line: not line.startswith("LINE "), str(error).strip().splitlines()
    )
    return "; ".join(line.strip().rstrip(".") for line in lines if line.strip())


def _text(statement: duckdb.Statement) -> str:
    """Removes the semicolon and what follows it, such as a comment, which would end up inside of
    our SQL. Places are bytes.
    """
    text = str(statement.query)
    data = text.encode()
    ends = (at for at, _ in duckdb.tokenize(text) if data[at : at + 1] == b";")
    return data[: next(ends, len(data))].decode()


def _unique(names: Sequence[str]) -> list[str]:
    """Column names made unique as DuckDB makes those of a subquery; a row as a dict needs it.

    >>> _unique(["a", "b", "a", "a_1"])
    ['a', 'b', 'a_1', 'a_1_1']
    """
    unique: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        unique[next(new for new in itertools.chain((name,), numbered) if new not in unique)] = None
    return list(unique)


class LockedDuckDB:
    """An in-memory DuckDB over registered Arrow data. One query at a time; not thread-safe."""

    def __init__(
        self,
        *,
        threads: int = 1,
        memory: str = "512MB",
        error: type[UserError] = UserError,
        label: str = "SQL",
    ) -> None:
        self._error, self._label = error, label
        self._statement_key: tuple[str, int, str] | None = None
        self._statement: duckdb.Statement
        self._connection = duckdb.connect(
            ":memory:", config={"threads": str(threads), "memory_limit": memory}
        )
        for setting in _SETTINGS:
            self._connection.execute(setting)

    def register(self, name: str, source: Any) -> None:
        """An Arrow table, batch or dataset; replaces an earlier one."""
        self._connection.register(name, source)

    def view(self, name: str, sql: str) -> None:
        """Name a SELECT of our own over what is registered."""
        self._connection.execute(f'create or replace view "{name}" as {sql}')

    def bind(self, sql: str) -> Mapping[str, str]:
        """Columns and types that a SELECT would give. Raises `error` when it does not bind."""
        try:
            relation = self._connection.sql(self._parse_select(sql))
            return dict(zip(relation.columns, map(str, relation.types), strict=True))
        except duckdb.Error as error:
            raise self._refuse(error) from None

    def query(
        self,
        sql: str,
        timeout_s: float | None = None,
        *,
        rows: int = 0,
        columns: str = "*",
        late: ProrlError | None = None,
    ) -> pa.Table:
        """Run one SELECT; its first `rows` if given, projected to `columns`. Each column of the
        answer has a name of its own. An answer lies outside DuckDB's memory limit. Raises `error`
        for anything else and for what fails; `late`, or else `error`, for what still runs at
        `timeout_s`; StorageError when what is registered cannot be read.
        """
        statement = self._cut(sql, rows, columns)
        with self._running(timeout_s, late):
            answer = self._connection.sql(statement).to_arrow_table()
        return answer.rename_columns(_unique(answer.column_names))

    def first(
        self, sql: str, timeout_s: float | None, *, rows: int, columns: str
    ) -> list[tuple[Any, ...]]:
        """Queries as `query` does, for a few rows: a table would cost as much as the SELECT."""
        statement = self._cut(sql, rows, columns)
        with self._running(timeout_s):
            return self._connection.execute(statement).fetchall()

    @contextmanager
    def _running(self, timeout_s: float | None, late: ProrlError | None = None) -> Iterator[None]:
        try:
            with self._stopped_after(timeout_s):
                yield
        except duckdb.InterruptException:
            problem = f"{self._label} was stopped after {timeout_s:g} s"
            raise late or self._error(problem, "a query that ends sooner") from None
        except duckdb.Error as error:
            if _SOURCE in str(error):
                raise StorageError(_error_text(error).partition(_SOURCE)[2]) from None
            raise self._refuse(error) from None

    @contextmanager
    def _stopped_after(self, timeout_s: float | None) -> Iterator[None]:
        """Interrupt what runs in the block at `timeout_s`, and nothing that runs after it."""
        if timeout_s is None:
            yield
            return
        timer = threading.Timer(timeout_s, self._connection.interrupt)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _cut(self, sql: str, rows: int, columns: str) -> duckdb.Statement:
        """Returns one parsed statement: a relation over a relation is bound once more for each."""
        if (key := (sql, rows, columns)) != self._statement_key:
            statement = self._parse_select(sql)
            if rows:
                cut = f"select {columns} from (\n{_text(statement)}\n) limit {rows}"
                statement = self._parse_select(cut)
            self._statement_key, self._statement = key, statement
        return self._statement

    def _parse_select(self, sql: str) -> duckdb.Statement:
        try:
            statements = self._connection.extract_statements(sql)
        except duckdb.Error as error:
            raise self._refuse(error) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
            hint = "a PIVOT names its values: ... ON status IN ('completed', 'failed') ..."
            pivots = any(each.type == duckdb.StatementType.MULTI for each in statements)
            raise self._error(
                f"{self._label} holds {kinds}", "exactly one SELECT", hint if pivots else ""
            )
        return statements[0]

    def _refuse(self, error: duckdb.Error) -> UserError:
        return self._error(
            f"{self._label}: {_error_text(error)}", "one SELECT over its tables and columns"
        )

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LockedDuckDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
