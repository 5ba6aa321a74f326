"""Control logs as long runs leave them, made in seconds: a few thousand rollouts live through the
gateway's own core, then SQL repeats their rows under ids of their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from prorl.service import log_schema as sql

DONE: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = MappingProxyType(
    {
        "groups": (
            sql.GROUP_COLUMNS,
            {
                "group_id": "group_id + :k * :groups",
                "key": "key || '/' || :k",
                "first_rollout": "first_rollout + :k * :rollouts",
                "delivery_seq": "delivery_seq + (delivery_seq >= 0) * :k * :groups",
            },
        ),
        "rollouts": (
            sql.ROLLOUT_COLUMNS,
            {
                "rollout_id": "rollout_id + :k * :rollouts",
                "group_id": "group_id + :k * :groups",
            },
        ),
        "group_events": (
            sql.EVENT_COLUMNS,
            {
                "event_seq": "event_seq + :k * :events",
                "group_id": "group_id + :k * :groups",
                "delivery_seq": "delivery_seq + (delivery_seq >= 0) * :k * :groups",
            },
        ),
        "parts": (
            ("run_id", "commit_seq", "part", "files", "published"),
            {"commit_seq": "commit_seq + :k * :parts", "part": "part || '/' || :k"},
        ),
    }
)
"""Columns of each table, and what becomes of those that name something in the `k`-th repetition."""


def repeat(path: Path, times: int) -> None:
    """Make a closed log's only run `times` as long as it is: its rows again and again, its marks
    (stored, acked) where they would be. Its counts are counted anew at the next start.
    """
    log = sqlite3.connect(path, isolation_level=None)
    log.execute("PRAGMA synchronous=OFF")
    sizes = {
        "groups": "SELECT count(*) FROM groups",
        "rollouts": "SELECT count(*) FROM rollouts",
        "events": "SELECT count(*) FROM group_events",
        "parts": "SELECT count(*) FROM parts",
    }
    by = {name: log.execute(statement).fetchone()[0] for name, statement in sizes.items()}
    ends = {"groups": "group_id", "rollouts": "rollout_id"}
    ends |= {"group_events": "event_seq", "parts": "commit_seq"}
    first = {"group_events": by["events"], "parts": by["parts"] + 1} | {
        name: by[name] for name in ("groups", "rollouts")
    }
    for k in range(1, times):
        log.execute("BEGIN")
        for table, (columns, changed) in DONE.items():
            values = ", ".join(changed.get(name, name) for name in columns)
            log.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table}"
                f" WHERE {ends[table]} < :first",
                {**by, "k": k, "first": first[table]},
            )
        log.execute("COMMIT")
    log.execute(
        "UPDATE runs SET counters = '', tasks_stored = tasks_stored * ?,"
        " events_stored = events_stored * ?",
        (times, times),
    )
    log.execute("UPDATE cursors SET seq = seq * ?", (times,))
    log.close()
