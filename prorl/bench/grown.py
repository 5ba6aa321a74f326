"""Control logs as long runs leave them, made in seconds: a thousand rollouts live through the
gateway's own core, then SQL repeats their rows under ids of their own. And what a store reads back
of such a run.
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
    ((run_id,),) = log.execute("SELECT run_id FROM runs").fetchall()
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
                f" WHERE run_id = :run AND {ends[table]} < :first",
                {**by, "k": k, "first": first[table], "run": run_id},
            )
        log.execute("COMMIT")
    log.execute(
        "UPDATE runs SET counters = '', tasks_stored = tasks_stored * ?,"
        " events_stored = events_stored * ?",
        (times, times),
    )
    log.execute("UPDATE cursors SET seq = seq * ?", (times,))
    log.close()


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
    best = {size: min(cost) for size, cost in costs.items()}
    first = next(iter(best.values()))
    return [
        Figure(
            what=f"restart of the store at {size:,}",
            value=cost,
            unit="ms",
            repeats=tuple(costs[size]),
            ratio=first / cost,
            note="per rollout of the open run, least of all rounds; not on the loop",
        )
        for size, cost in best.items()
    ]


async def _unasked(consumer: str, groups: list[KeptGroup]) -> HandedOut:
    return HandedOut()


async def _nothing(consumer: str, seq: int) -> None:
    pass
