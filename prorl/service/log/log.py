"""The control log: ROOT/control.db, SQLite in WAL mode with `synchronous=FULL`.

One writer: `write` runs a list of statements as one transaction, on one thread, and returns when it
is on disk; what happens meanwhile shares the next one (group commit). Reads use a second
connection, from the loop; they see what is durable, nothing else.

Invariants: one process at a time (a lock file beside the log); a log of another version is refused
before anything is written; after an error of a write nothing more is written (dirty pages may be
gone: the process ends and starts again from the log), unless the disk refused it as a whole. Not
promised: network file systems (SQLite's WAL needs shared memory).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import prorl
from prorl.errors import ConflictError, DiskRefusedError, SchemaError, StorageError
from prorl.linux import locks
from prorl.linux.failpoints import failpoint
from prorl.linux.files import make_folder
from prorl.service.log.log_schema import LOG_VERSION, RUN_TABLES, STEPS, TABLES_SQL

Write = tuple[str, Sequence[Sequence[Any]]]

CHECKPOINT_PAGES = 4000
"""The WAL is copied into the database when it has that many 4 KiB pages."""
SHRINK_PAGES = 4000
"""Fewer free pages are not worth a copy of the file: 16 MB are some ten thousand rollouts."""


_REFUSED = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
_UNWRITTEN = frozenset(
    {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE}
)


class ControlLog:
    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self.path = path
        self._lock = lock_log(path.with_suffix(".lock"))
        with ExitStack() as refusal:
            refusal.callback(os.close, self._lock)
            try:
                self._writer = refusal.enter_context(closing(connect(path)))
                _prepare(self._writer, path)
                _shrink(self._writer)
                self._reader = refusal.enter_context(closing(connect(path)))
                self._reader.execute("PRAGMA query_only=ON")
            except sqlite3.Error as error:
                raise _failed(path, error) from error
            refusal.pop_all()
        ((self.owner,),) = self.read("SELECT value FROM meta WHERE key = 'owner'")
        """The name of this root, unlike any other's: directories that it makes carry it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control-log")
        self._broken: StorageError | None = None
        self._closed = False
        self.transactions = 0

    async def write(self, writes: Sequence[Write]) -> None:
        """Run all statements as one durable transaction. Raises DiskRefusedError when nothing of it
        was written and it may be tried again; any other StorageError from then on always.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self.write_now, writes)

    def write_now(self, writes: Sequence[Write]) -> None:
        """Write a transaction and wait for it; only from one thread at a time."""
        if self._broken is not None:
            raise self._broken
        connection = self._writer
        try:
            connection.execute("BEGIN IMMEDIATE")
            for statement, rows in writes:
                connection.executemany(statement, rows)
            failpoint("log.begun")
            connection.execute("COMMIT")
            failpoint("log.written")
            for statement, _ in writes:
                if statement in STEPS:
                    failpoint(STEPS[statement])
        except (sqlite3.Error, OSError) as error:
            failed = _failed(self.path, error)
            if isinstance(failed, DiskRefusedError):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            else:
                self._broken = failed
            raise failed from error
        self.transactions += 1

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._reader.execute(statement, parameters).fetchall()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._reader.close()
        self._writer.close()
        os.close(self._lock)


def lock_log(path: Path) -> int:
    """Take a root for this process. Raises ConflictError when another one has it."""
    try:
        return locks.take(path)
    except BlockingIOError:
        raise ConflictError(
            f"{path.parent} is in use by another gateway",
            "one service per root",
            "stop it or use another root",
        ) from None


def forget_run(path: Path, run_id: str) -> None:
    """Remove a run from a log, whatever it says of it: its name is free again. Raises ConflictError
    while a service works on the root, StorageError.
    """
    lock = lock_log(path.with_suffix(".lock"))
    try:
        with closing(connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for table in ("groups", "rollouts", *RUN_TABLES):
                connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))
            connection.execute("COMMIT")
            _shrink(connection)
    except sqlite3.Error as error:
        raise StorageError(f"control log {path}: {error}") from error
    finally:
        os.close(lock)


def _shrink(connection: sqlite3.Connection) -> None:
    """Gives the pages of deleted runs back to the disk, where they are most of the file. While a
    service works, later runs use them again: the file stays as large as it was at most.
    """
    ((free,),) = connection.execute("PRAGMA freelist_count")
    ((total,),) = connection.execute("PRAGMA page_count")
    if free >= SHRINK_PAGES and 2 * free > total:
        with suppress(sqlite3.OperationalError):  # a copy of the rest finds no room on the disk
            connection.execute("VACUUM")


def connect(path: Path) -> sqlite3.Connection:
    with ExitStack() as refusal:
        try:
            connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            refusal.callback(connection.close)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        except sqlite3.Error as error:
            raise _failed(path, error) from error
        refusal.pop_all()
    return connection


def _failed(path: Path, error: Exception) -> StorageError:
    """The error of a log; a quota and a read-only file system look to SQLite like a failed write. A
    failed fsync is none of these: what it should have written may be gone.
    """
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _REFUSED or code in _UNWRITTEN:
        return DiskRefusedError(f"control log {path} cannot be written now: {error}")
    return StorageError(f"control log {path}: {error}")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a fresh log, or check the version of one that is there."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        connection.executescript(
            f"BEGIN; {TABLES_SQL} INSERT INTO meta VALUES ('version', '{LOG_VERSION}'),"
            f" ('owner', '{uuid.uuid4().hex}'), ('prorl', '{prorl.__version__}'); COMMIT;"
        )
        return
    try:
        version = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()[0]
        log_version = int(version)
    except (sqlite3.Error, TypeError, ValueError):
        problem = f"{path} is not a control log of prorl"
        raise SchemaError(problem, "a root made by `prorl`") from None
    if log_version != LOG_VERSION:
        writer = connection.execute("SELECT value FROM meta WHERE key = 'prorl'").fetchone()
        hint = f"use prorl {writer[0] if writer else 'as it was'}, which made it, or another root"
        raise SchemaError(
            f"control log {path} has version {log_version}", f"version {LOG_VERSION}", hint
        )
