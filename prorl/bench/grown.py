"""Control logs as long runs leave them, made in seconds; what a store reads back of such a run.

A thousand rollouts live through the gateway's own core, then SQL repeats their rows under ids of
their own.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from prorl.bench.report import Figure
from prorl.bench.stored import make_run
from prorl.control import HandedOut, KeptGroup
from prorl.service import log_schema as sql
from prorl.storage.delivery import LiveOrder
from prorl.storage.facts import FactBook
from prorl.storage.groups import GroupIndex
from prorl.storage.layout import RunDir
from prorl.storage.liverun import read_back

SEED = 1_000
"""Rollouts that SQL repeats."""

COMMITS = 64
"""Commits, or packs of them, that a store reads back."""

ROUNDS = 3

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

SIZES = {
    "groups": "groups",
    "rollouts": "rollouts",
    "events": "group_events",
    "parts": "parts",
}
"""Parameter of a statement -> the table whose rows it counts."""

MARKS = """
UPDATE runs SET counters = '', tasks_stored = tasks_stored * :times,
    events_stored = events_stored * :times
"""

FIRST_LIFE = {
    "groups": "group_id < :groups",
    "rollouts": "rollout_id < :rollouts",
    "group_events": "event_seq < :events",
    "parts": "commit_seq < :parts + 1",
}
"""Which rows of a table are the run's own."""


def repeat(path: Path, times: int) -> None:
    """Make a closed log's only run `times` as long as it is: its rows again and again.

    Its marks (stored, acked) are where they would be. Its counts are counted anew at the next
    start.
    """
    log = sqlite3.connect(path, isolation_level=None)
    log.execute("PRAGMA synchronous=OFF")
    by = {name: _count(log, table) for name, table in SIZES.items()}
    ((run_id,),) = log.execute("SELECT run_id FROM runs").fetchall()
    for k in range(1, times):
        log.execute("BEGIN")
        for table in DONE:
            _repeat_table(log, table, {**by, "k": k, "run": run_id})
        log.execute("COMMIT")
    log.execute(MARKS, {"times": times})
    log.execute("UPDATE cursors SET seq = seq * ?", (times,))
    log.close()


def _count(log: sqlite3.Connection, table: str) -> int:
    return int(log.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _repeat_table(log: sqlite3.Connection, table: str, by: Mapping[str, int | str]) -> None:
    """The rows of a table's first life once more, under ids of their own."""
    columns, changed = DONE[table]
    values = ", ".join(changed.get(name, name) for name in columns)
    log.execute(
        f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table}"
        f" WHERE run_id = :run AND {FIRST_LIFE[table]}",
        by,
    )


def stores(sizes: Iterable[int]) -> list[Figure]:
    """What a store that has died reads of an open run before it serves, off its loop."""
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        for size in costs:
            make_run(Path(folder) / str(size), size, min(COMMITS, size // SEED), tokens=16)
        for _ in range(ROUNDS):
            for size, cost in costs.items():
                run = RunDir(str(Path(folder) / str(size)))
                order = LiveOrder("a", size=abs, handout=_unasked, save_cursor=_nothing)
                began = time.process_time()
                read_back(GroupIndex(run), FactBook(), order)
                cost.append(1000 * (time.process_time() - began) / size)
    first = min(next(iter(costs.values())))
    return [_row(size, cost, first) for size, cost in costs.items()]


def _row(size: int, costs: list[float], first: float) -> Figure:
    """The row of a size; `first` is what the smallest one cost."""
    return Figure(
        what=f"restart of the store at {size:,}",
        value=min(costs),
        unit="ms",
        repeats=tuple(costs),
        ratio=first / min(costs),
        note="per rollout of the open run, least of all rounds; not on the loop",
    )


async def _unasked(consumer: str, groups: list[KeptGroup]) -> HandedOut:
    return HandedOut()


async def _nothing(consumer: str, seq: int) -> None:
    pass
