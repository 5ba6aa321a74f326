"""The control log's tables, as SQL.

One row per fact; the gateway's memory is a cache of what is here.

Ids (`group_id`, `rollout_id`, `commit_seq`, `event_seq`, `delivery_seq`) are dense per run. Text
columns hold values of the enums in `prorl.types`; `at` of a group event is microseconds since the
epoch, every other time seconds. A rollout is *stored* when `part` names the part that holds its
row; what else the store owes is in `outbox` (`core/outbox.py`). `runs.counters` is the JSON of
`RunRecord.counters`; `runs.wanted` says that the run is loaded at start. A partial index is used
only by a query that repeats its condition. A version's `note` is the path of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prorl.control import TrajectorySummary

LOG_VERSION = 4
"""Raised by one with every change of the tables below, or of `RunRecord.counters`."""

SUMMARY_COLUMNS = TrajectorySummary.__struct_fields__

TABLES_SQL = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, config TEXT NOT NULL, state TEXT NOT NULL,
    last INTEGER NOT NULL,
    cancelled INTEGER NOT NULL,
    created_at REAL NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL,
    counters TEXT NOT NULL, wanted INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX runs_wanted ON runs (created_at) WHERE wanted = 1;

CREATE TABLE groups (
    run_id TEXT NOT NULL, group_id INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL,
    n INTEGER NOT NULL,
    first_rollout INTEGER NOT NULL, task_id TEXT NOT NULL, data_source TEXT NOT NULL,
    env TEXT NOT NULL, task TEXT NOT NULL,
    sampling TEXT NOT NULL, extra TEXT NOT NULL, accepted_at REAL NOT NULL, state TEXT NOT NULL,
    opened INTEGER NOT NULL,
    reason TEXT NOT NULL, num_valid INTEGER NOT NULL, mean_reward REAL,
    min_version INTEGER NOT NULL, delivery_seq INTEGER NOT NULL,
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX groups_key ON groups (run_id, key);
CREATE UNIQUE INDEX groups_delivery ON groups (run_id, delivery_seq) WHERE delivery_seq >= 0;
CREATE INDEX groups_started ON groups (run_id, group_id) WHERE state = 'open' AND opened = 1;
CREATE INDEX groups_pooled ON groups (run_id, group_id) WHERE state = 'open' AND opened = 0;

CREATE TABLE dataset (
    run_id TEXT NOT NULL, place INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL,
    n INTEGER NOT NULL, task_id TEXT NOT NULL, data_source TEXT NOT NULL, env TEXT NOT NULL,
    task TEXT NOT NULL, sampling TEXT NOT NULL, extra TEXT NOT NULL, resting INTEGER NOT NULL,
    PRIMARY KEY (run_id, place)
) WITHOUT ROWID;
CREATE UNIQUE INDEX dataset_key ON dataset (run_id, key);

CREATE TABLE rollouts (
    run_id TEXT NOT NULL, rollout_id INTEGER NOT NULL, group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL, infra_failures INTEGER NOT NULL,
    worker_losses INTEGER NOT NULL,
    code TEXT NOT NULL, cancel_code TEXT NOT NULL, message TEXT NOT NULL, backend TEXT NOT NULL,
    reward REAL, part TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in SUMMARY_COLUMNS)},
    PRIMARY KEY (run_id, rollout_id)
) WITHOUT ROWID;

CREATE TABLE parts (
    run_id TEXT NOT NULL, commit_seq INTEGER NOT NULL, part TEXT NOT NULL, files TEXT NOT NULL,
    published INTEGER NOT NULL,
    PRIMARY KEY (run_id, commit_seq)
) WITHOUT ROWID;
CREATE UNIQUE INDEX parts_name ON parts (run_id, part);
CREATE INDEX parts_unpublished ON parts (run_id, commit_seq) WHERE published = 0;

CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, kind TEXT NOT NULL,
    ref INTEGER NOT NULL, payload TEXT NOT NULL
);
CREATE INDEX outbox_run ON outbox (run_id, seq);
CREATE INDEX outbox_complete ON outbox (run_id, ref) WHERE kind = 'group_complete';

CREATE TABLE cursors (
    run_id TEXT NOT NULL, consumer TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (run_id, consumer)
) WITHOUT ROWID;

CREATE TABLE backends (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, added_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE versions (
    run_id TEXT NOT NULL, version INTEGER NOT NULL, note TEXT NOT NULL, at REAL NOT NULL,
    published INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, version)
) WITHOUT ROWID;
"""


def insert_sql(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def update_sql(table: str, columns: tuple[str, ...], keys: tuple[str, ...]) -> str:
    """`UPDATE` of `columns` by `keys`; parameters in that order."""
    return (
        f"UPDATE {table} SET {', '.join(f'{name}=?' for name in columns)} WHERE"
        f" {' AND '.join(f'{name}=?' for name in keys)}"
    )


RUN_CHANGES = ("state", "last", "cancelled", "started_at", "finished_at", "counters", "wanted")
RUN_COLUMNS = ("run_id", "config", "created_at", *RUN_CHANGES)
GROUP_FACTS = (
    *("group_id", "key", "digest", "n", "first_rollout", "task_id", "data_source", "env"),
    *("task", "sampling", "extra", "accepted_at"),
)
"""The facts of a group that never change: attributes of `GroupRecord`."""
GROUP_CHANGES = (
    *("state", "opened", "reason", "num_valid", "mean_reward", "min_version"),
    "delivery_seq",
)
GROUP_COLUMNS = ("run_id", *GROUP_FACTS, *GROUP_CHANGES)
ROLLOUT_CHANGES = (
    *("state", "attempt", "infra_failures", "worker_losses", "code", "cancel_code"),
    *("message", "backend", "reward", "part", *SUMMARY_COLUMNS),
)
ROLLOUT_COLUMNS = ("run_id", "rollout_id", "group_id", "sample_index", *ROLLOUT_CHANGES)
DATASET_COLUMNS = (
    *("run_id", "place", "key", "digest", "n", "task_id", "data_source", "env"),
    *("task", "sampling", "extra", "resting"),
)
"""`resting`: no group is made of the task before this epoch."""
INSERT_TASK = insert_sql("dataset", DATASET_COLUMNS)
CURATE_TASK = "UPDATE dataset SET resting = ?, n = coalesce(?, n) WHERE run_id = ? AND key = ?"
INSERT_RUN = insert_sql("runs", RUN_COLUMNS)
UPDATE_RUN = update_sql("runs", RUN_CHANGES, ("run_id",))
INSERT_GROUP = insert_sql("groups", GROUP_COLUMNS)
UPDATE_GROUP = update_sql("groups", GROUP_CHANGES, ("run_id", "group_id"))
INSERT_ROLLOUT = insert_sql("rollouts", ROLLOUT_COLUMNS)
UPDATE_ROLLOUT = update_sql("rollouts", ROLLOUT_CHANGES, ("run_id", "rollout_id"))
TELL_STORE = insert_sql("outbox", ("seq", "run_id", "kind", "ref", "payload"))
DECIDED = "DELETE FROM outbox WHERE run_id = ? AND kind = 'group_complete' AND ref = ?"
STORED = "DELETE FROM outbox WHERE run_id = ? AND seq <= ? AND kind <> 'group_complete'"
INSERT_PART = insert_sql("parts", ("run_id", "commit_seq", "part", "files", "published"))
PUBLISH_PART = update_sql("parts", ("published",), ("run_id", "commit_seq"))
UPSERT_CURSOR = "INSERT OR REPLACE INTO cursors (run_id, consumer, seq, at) VALUES (?, ?, ?, ?)"
ANNOUNCED = "announced"
"""The note of a version whose weights the trainer sent itself: others have their path."""
INSERT_VERSION = insert_sql("versions", ("run_id", "version", "note", "at"))
RUN_TABLES = ("dataset", "parts", "outbox", "cursors", "versions", "runs")
"""Besides groups and rollouts; `runs` last."""
FORGET = {table: f"DELETE FROM {table} WHERE run_id = ?" for table in RUN_TABLES}
FORGET_BEFORE = {
    name: f"DELETE FROM {name}s WHERE run_id = ? AND {name}_id < ?" for name in ("group", "rollout")
}
PUBLISH_VERSION = update_sql("versions", ("published",), ("run_id", "version"))
UPSERT_BACKEND = "INSERT OR REPLACE INTO backends (name, state, added_at) VALUES (?, ?, ?)"
COMMIT_GROUPS = (
    "UPDATE groups SET state = 'committed' WHERE run_id = ? AND delivery_seq >= ?"
    " AND delivery_seq < ? AND delivery_seq >= 0 AND state = 'delivered'"
)

STEPS: Mapping[str, str] = MappingProxyType(
    {
        INSERT_RUN: "log.run",
        INSERT_GROUP: "log.accepted",
        INSERT_PART: "log.committed",
        PUBLISH_PART: "log.published",
        DECIDED: "log.decided",
        UPSERT_CURSOR: "log.cursor",
    }
)
"""Failpoints that a transaction with such a statement passes."""
