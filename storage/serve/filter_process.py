"""A user's filter in a helper (`prorl/helper`): what it breaks there breaks nothing here.

DuckDB in this process would share everybody's memory with a user's SQL: an answer lies outside
DuckDB's own limit, and one large value cannot be interrupted while it is made. An answer has three
outcomes: rows; ConfigError, which the SQL itself is the reason of (it does not bind, fails, is late
or needs too much), and FilterLostError, of which it is not (its process was killed or frozen, or
did not start in time): ask again.

Not thread-safe: made, asked and closed on one thread, without a running loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from prorl.errors import ConfigError, UnavailableError
from prorl.helper.child import Answer, serve
from prorl.helper.pool import Helpers
from prorl.helper.process import Died, HelperProgram, Late, Raised
from prorl.waits import wait_limit_s

MEMORY_BYTES = 512 << 20
"""Above what the process has before it runs SQL; DuckDB itself is told half of it."""

MAX_ANSWER_BYTES = 32 << 20

GRACE_S = wait_limit_s("store.filter_grace")

PROGRAM = HelperProgram(__spec__.name, memory_bytes=MEMORY_BYTES, most=1, nice=5)


class FilterLostError(UnavailableError):
    """The filter's process was lost, and not by its SQL."""


class FilterProcess:
    def __init__(self, sql: str, timeout_s: float) -> None:
        self._sql, self._timeout_s = sql, timeout_s
        self._runner = asyncio.Runner()
        self._helpers: Helpers | None = None

    @property
    def helpers(self) -> Helpers:
        """The process, once it was asked; for tests."""
        assert self._helpers is not None
        return self._helpers

    def columns(self, empty: Mapping[str, pa.Table]) -> Mapping[str, str]:
        """Names and types that the SQL gives over tables like these. Raises as `answer`."""
        types: Mapping[str, str] = self._ask(empty, 0, "")
        return types

    def answer(
        self, tables: Mapping[str, pa.Table], limit: int, projection: str
    ) -> list[tuple[Any, ...]]:
        """Returns the first `limit` rows. Raises ConfigError, FilterLostError."""
        content: bytes = self._ask(tables, limit, projection)
        try:
            with pa.ipc.open_stream(content) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise ConfigError(f"filter: its answer is damaged: {error}", "one SELECT") from None
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def _ask(self, tables: Mapping[str, pa.Table], limit: int, projection: str) -> Any:
        streams = {name: _stream(rows) for name, rows in tables.items()}
        question = (self._sql, streams, self._timeout_s, limit, projection)
        try:
            return self._runner.run(self._once(question))
        except Late as error:
            if error.at_start:
                raise FilterLostError(f"filter: {error}") from None
            problem = f"filter was stopped after {self._timeout_s:g} s"
            raise ConfigError(problem, "a query that ends sooner") from None
        except Died as error:  # twice in a row
            if error.was_killed:
                raise FilterLostError(f"filter: {error}") from None
            problem = f"filter ended its process (it may use {MEMORY_BYTES >> 20} MiB)"
            raise ConfigError(problem, "a query that needs less") from None
        except Raised as error:
            if error.at_start:
                raise FilterLostError(f"filter: {error}") from None
            raise ConfigError(f"filter: {error.words}", "a query that needs less") from None

    async def _once(self, question: Any) -> Any:
        if self._helpers is None:
            self._helpers = Helpers(PROGRAM)
        return await self._helpers.ask(question, label="it", wall_s=self._timeout_s + GRACE_S)

    def close(self) -> None:
        if self._helpers is not None:
            self._runner.run(self._end(self._helpers))
            self._helpers = None
        self._runner.close()

    async def _end(self, helpers: Helpers) -> None:
        helpers.close()


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue().to_pybytes())


def prepare() -> Answer:
    """A database that nothing but a question's rows is in."""
    from prorl.storage.read.sql import LockedDuckDB  # DuckDB takes long to import

    database = LockedDuckDB(memory=f"{MEMORY_BYTES >> 21}MiB", error=ConfigError, label="filter")

    def answer(question: tuple[str, dict[str, bytes], float, int, str]) -> Any:
        sql, streams, timeout_s, limit, projection = question
        for name, rows in streams.items():
            with pa.ipc.open_stream(rows) as reader:
                database.register(name, reader.read_all())
        if not limit:
            return dict(database.bind(sql))
        return _small(database.query(sql, timeout_s, rows=limit, columns=projection))

    return answer


def _small(rows: pa.Table) -> bytes:
    if rows.nbytes > MAX_ANSWER_BYTES:
        raise ConfigError(f"filter gave {rows.nbytes:,} bytes", f"at most {MAX_ANSWER_BYTES:,}")
    return _stream(rows)


if __name__ == "__main__":
    serve(prepare)
