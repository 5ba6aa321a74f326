"""A gateway's mind and its log, driven by hand, with what each step costs.

`repeat` makes the log of a long run in seconds: a thousand rollouts live through the gateway's own
core, then SQL repeats their rows under ids of their own.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import orjson

from prorl.control import (
    CommitPart,
    CommittedRollout,
    ControlRow,
    Decision,
    Hello,
    KeptGroup,
)
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.core.core import Core
from prorl.service.core.outbox import read_page, run_news
from prorl.service.core.state import RunRecord
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.service.submissions import PIECE
from prorl.types import AttemptKey, Task

N = 8
CHUNK = PIECE // N
"""Groups of a request that are accepted in one step."""
WINDOW = 32
"""Groups in hand."""


class Meter:
    """CPU seconds, items and longest step of each operation."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.items: defaultdict[str, int] = defaultdict(int)
        self.longest_ms: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, what: str, items: int) -> Iterator[None]:
        began = time.thread_time()
        yield
        took = time.thread_time() - began
        self.cpu_s[what] += took
        self.items[what] += items
        self.longest_ms[what] = max(self.longest_ms[what], 1000 * took)

    def cost_ms(self, what: str) -> float:
        """CPU milliseconds that one item cost."""
        return 1000 * self.cpu_s[what] / max(1, self.items[what])


class Life:
    def __init__(self, path: Path, meter: Meter) -> None:
        self.log, self.meter = ControlLog(path), meter
        self.core = self._start()

    @property
    def run(self) -> RunRecord:
        return self.core.run("a")

    def _start(self) -> Core:
        core = Core(self.log, ["scripted:oracle"], max_queued=1 << 40)
        for role in ("init", "store"):
            hello = Hello(worker=role, role=role, schema_version=SCHEMA_VERSION)
            core.workers.hello(1, ControlRow.of(hello))
        return core

    def write(self, items: int) -> None:
        """A transaction, and what waited for it."""
        with self.meter("journal", items):
            batch = self.core.journal.take()
        with self.meter("transaction", items):
            self.log.write_now(batch.writes)
        with self.meter("journal", 0):
            self.core.durable(batch)

    def accept(self, rollouts: int) -> None:
        run, missing = self.run, rollouts // N
        while missing:
            first, count = run.accepted.next_group, min(CHUNK, missing)
            bodies = [
                GroupBody(
                    task=Task(task_id=f"t{number}", env="noop", prompt="x" * 300),
                    n=N,
                    key=f"k{number}",
                )
                for number in range(first, first + count)
            ]
            with self.meter("accept", N * count):
                checked = self.core.acceptance.check(run, bodies, {})
                self.core.acceptance.groups(run, checked)
            self.write(N * count)
            missing -= count

    def work(self, in_hand: int = N * WINDOW) -> None:
        """Lease all that wait, so many in hand; commit, decide, hand out and ack, in windows."""
        run, workers = self.run, self.core.state.workers
        credit = N * WINDOW

        def lease() -> None:
            with self.meter("lease", credit):
                self.core.pump(credit)
            self.write(credit)

        for _ in range(in_hand // credit - 1):
            lease()
        while run.delivery.next_delivery < run.accepted.next_group:
            lease()
            leased = (r for r in run.rollouts.values() if r.life.state == "leased")
            given = list(islice(leased, credit))
            with self.meter("commit", len(given)):
                for record in given:
                    self.core.rollouts.hold(record, workers["init"])
                keys = [AttemptKey(run.run_id, r.rollout_id, r.life.attempt) for r in given]
                self.core.commits.reserve(workers["store"], keys)
                self._commit(f"p{run.commits.next_commit}", keys)
            self.write(len(given))
            wanted = sorted({record.group.group_id for record in given})
            with self.meter("decide", len(wanted)):
                self.core.groups.propose(run, [Decision(group_id=g, kept=True) for g in wanted])
            self.write(len(given))
            with self.meter("hand out", len(wanted)):
                self.core.groups.handout(run, [KeptGroup(g, 0) for g in wanted])
            self.write(len(given))
            with self.meter("ack", 1):
                self.core.groups.cursor(run, "primary", run.delivery.next_delivery)
            self.write(len(given))

    def commit_rest(self) -> None:
        """What the log knows and no part holds: the events of the last hand-outs."""
        self._commit("rest", ())
        self.write(0)

    def _commit(self, part: str, keys: Iterable[AttemptKey]) -> None:
        run = self.run
        rows = tuple(CommittedRollout(rollout_id=k.rollout_id, attempt=1, reward=1.0) for k in keys)
        commit = CommitPart(part=part, rollouts=rows, outbox_upto=run.outbox.end)
        self.core.commits.commit(run, commit)
        self.core.commits.published(run, run.commits.next_commit - 1)

    def take(self, rollouts: int) -> None:
        self.core.pump(rollouts)
        self.write(rollouts)
        for record in self.run.rollouts.values():
            if record.life.state == "leased":
                self.core.rollouts.hold(record, self.core.state.workers["init"])

    def cancel(self, what: str, rollouts: int) -> None:
        """So many; the store decides what has ended meanwhile."""
        run, before = self.run, self.run.counts["cancelled"]
        with self.meter(what, rollouts):
            self.core.cancel_run(run)
        while run.counts["cancelled"] - before < rollouts:
            with self.meter(what, 0):
                self.core.grants.prune()
            self.write(CHUNK)
            ended = [g.group_id for g in run.groups.values() if not g.members.pending]
            self.core.groups.propose(run, [Decision(group_id=g, kept=False) for g in ended])
            for group_id in ended:
                run.groups.pop(group_id, None)

    def restart(self, what: str) -> None:
        with self.meter(what, 1):
            self.core = self._start()

    def snapshot(self, what: str) -> None:
        """What a store that has come is told, without the tasks that it does not have."""
        with self.meter(what, 1):
            run_news(self.log, self.run)
            read_page(self.log, self.run.outbox.end)


AS_THEY_ARE = {
    *("life.paused", "life.problem", "accepted.group_size", "outbox.end", "outbox.stored"),
    *("weights.version", "weights.allocated_version", "pace.rate"),
}
"""Counts of a run that do not grow with it."""


def repeat(path: Path, times: int) -> None:
    """Make a closed log's only run `times` as long as it is: its rows again and again.

    Its marks (stored, acked) and its counts are where they would be.
    """
    # Columns of each table, which rows are the run's own, and what becomes of those columns that
    # name something in the `k`-th repetition.
    tables = {
        "groups": (
            sql.GROUP_COLUMNS,
            "group_id < :groups",
            {
                "group_id": "group_id + :k * :groups",
                "key": "key || '/' || :k",
                "first_rollout": "first_rollout + :k * :rollouts",
                "delivery_seq": "delivery_seq + (delivery_seq >= 0) * :k * :groups",
            },
        ),
        "rollouts": (
            sql.ROLLOUT_COLUMNS,
            "rollout_id < :rollouts",
            {
                "rollout_id": "rollout_id + :k * :rollouts",
                "group_id": "group_id + :k * :groups",
            },
        ),
        "parts": (
            ("run_id", "commit_seq", "part", "files", "published"),
            "commit_seq < :parts + 1",
            {"commit_seq": "commit_seq + :k * :parts", "part": "part || '/' || :k"},
        ),
    }
    log = sqlite3.connect(path, isolation_level=None)
    log.execute("PRAGMA synchronous=OFF")
    by = {name: log.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
    for k in range(1, times):
        log.execute("BEGIN")
        for table, (columns, own, changed) in tables.items():
            values = ", ".join(changed.get(name, name) for name in columns)
            log.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table}"
                f" WHERE {own}",
                {**by, "k": k},
            )
        log.execute("COMMIT")
    counters = orjson.loads(log.execute("SELECT counters FROM runs").fetchone()[0])
    for part, counts in counters.items():
        for name, count in counts.items():
            if isinstance(count, dict):
                counts[name] = {state: times * of_state for state, of_state in count.items()}
            elif name == "next_commit":
                counts[name] = (count - 1) * times + 1
            elif f"{part}.{name}" not in AS_THEY_ARE:
                counts[name] = count * times
    log.execute("UPDATE runs SET counters = ?", (orjson.dumps(counters).decode(),))
    log.execute("UPDATE cursors SET seq = seq * ?", (times,))
    log.close()
