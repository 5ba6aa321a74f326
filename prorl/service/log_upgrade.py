"""A control log of an older prorl becomes one of today, in one transaction.

Whoever is killed meanwhile leaves the log as it was.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import orjson

from prorl.config import RunConfig, parse
from prorl.errors import SchemaError, StorageError
from prorl.service.candidates import run_digest
from prorl.service.log import connect, lock_log, log_version
from prorl.service.log_schema import LOG_VERSION

MIGRATIONS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: (
            "ALTER TABLE versions ADD COLUMN published INTEGER NOT NULL DEFAULT 0",
            "DROP INDEX IF EXISTS groups_state",
        ),
        2: (
            "ALTER TABLE runs ADD COLUMN counters TEXT NOT NULL DEFAULT ''",
            "DROP INDEX rollouts_unstored",
            "CREATE INDEX groups_started ON groups (run_id, group_id)"
            " WHERE state = 'open' AND opened = 1",
            "CREATE INDEX groups_pooled ON groups (run_id, group_id)"
            " WHERE state = 'open' AND opened = 0",
            "CREATE INDEX groups_kept ON groups (run_id, group_id) WHERE state = 'kept'",
            "CREATE INDEX rollouts_ended ON rollouts (run_id, group_id)"
            " WHERE part = '' AND state IN ('failed', 'cancelled')",
            "CREATE INDEX parts_unpublished ON parts (run_id, commit_seq) WHERE published = 0",
        ),
    }
)
"""Version -> what makes it the next one. Written once; what a later version needs is added."""


def upgrade_log(path: Path, step: Callable[[str], None] = lambda name: None) -> int:
    """Bring a log up; the version that it had. No service may work on the root.

    Raises ConflictError when one does, SchemaError for a newer log and for what is none,
    StorageError.
    """
    lock = lock_log(path.with_suffix(".lock"))
    try:
        with closing(connect(path)) as connection:
            found = log_version(connection, path)
            _check_not_newer(path, found)
            if found < LOG_VERSION:
                _migrate(connection, found, step)
            return found
    except sqlite3.Error as error:
        raise StorageError(f"control log {path}: {error}") from error
    finally:
        os.close(lock)


def _check_not_newer(path: Path, found: int) -> None:
    if found > LOG_VERSION:
        raise SchemaError(
            f"control log {path} has version {found}",
            f"version {LOG_VERSION}",
            "upgrade prorl to read it",
        )


def _migrate(connection: sqlite3.Connection, found: int, step: Callable[[str], None]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for version in range(found, LOG_VERSION):
        for statement in MIGRATIONS[version]:
            connection.execute(statement)
            step(statement)
    for run_id, text in connection.execute("SELECT run_id, config FROM runs").fetchall():
        # Whoever asks for the run again sends what it sent then: equal to what we make of it now.
        config = parse(RunConfig, orjson.loads(text), f"run {run_id} of the log")
        values = (config.model_dump_json(), run_digest(config), run_id)
        connection.execute("UPDATE runs SET config = ?, digest = ? WHERE run_id = ?", values)
        step(f"config of {run_id}")
    connection.execute("UPDATE meta SET value = ? WHERE key = 'version'", (str(LOG_VERSION),))
    step("version")
    connection.execute("COMMIT")
    step("committed")
