"""Measures the cost of one more rollout for the gateway after many others: nothing may grow with
history.

Others are a thousand, ten thousand, a hundred thousand; in the full form a million. The gateway's
mind and its log, driven by hand: every step is what the gateway does on its one loop, so the
longest step is how long that loop was blocked (the transaction runs on a thread of its own and is
counted apart). CPU milliseconds per item and of the longest step; `ratio` is the cost at the
smallest size divided by the cost at this one: below 0.67 it has grown by more than half.

Logs of all sizes are open at once and take turns, so that whatever else the machine does is in
every figure alike.
A restart of the store is what it reads back
of an open run, per rollout of it; `repeats` of the others are the rounds.
"""

from __future__ import annotations

import gc
import shutil
import sqlite3
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import orjson

from prorl.analysis.synthetic_runs import make_run
from prorl.bench.report import Figure, Report
from prorl.config import RunConfig
from prorl.control import (
    CommitPart,
    CommittedRollout,
    ControlRow,
    Decision,
    HandedOut,
    Hello,
    KeptGroup,
)
from prorl.process import settle_heap
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.core.core import Core
from prorl.service.core.outbox import read_page, run_news
from prorl.service.core.state import RunRecord
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.service.submissions import ACCEPT_BATCH
from prorl.storage.files.layout import RunDir
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.delivery import LiveOrder
from prorl.storage.serve.history import History
from prorl.storage.serve.liverun import read_back
from prorl.storage.serve.replay import FactBook
from prorl.types import AttemptKey, Task

SIZES = (1_000, 10_000, 100_000)
FULL = (*SIZES, 1_000_000)
SMALL = 10_000
"""A log of at most so many is made anew in every round: it would not stay that small."""

ROUNDS, QUICK_ROUNDS = 8, 4
MORE = 1_000
"""Rollouts that come to each log in a round."""

CANCELLED, IN_HAND = 4_000, 2_000
SEED = 1_000
"""Rollouts that live; SQL repeats their rows."""

COMMITS = 64
"""Commits, or packs of them, that a store reads back."""

STORE_ROUNDS = 3

MEMORY = 8_000
"""Rollouts whose memory is counted."""

N = 8
CHUNK = ACCEPT_BATCH // N
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
    def __call__(self, step: str, items: int) -> Iterator[None]:
        began = time.thread_time()
        yield
        took = time.thread_time() - began
        self.cpu_s[step] += took
        self.items[step] += items
        self.longest_ms[step] = max(self.longest_ms[step], 1000 * took)

    def cost_ms(self, step: str) -> float:
        """CPU milliseconds that one item cost."""
        return 1000 * self.cpu_s[step] / max(1, self.items[step])


class GrowingRun:
    def __init__(self, path: Path, meter: Meter) -> None:
        self.log, self.meter = ControlLog(path), meter
        self.core = self._start()

    @property
    def run(self) -> RunRecord:
        return self.core.run("a")

    def _start(self) -> Core:
        core = Core(self.log, ["scripted:oracle"], max_queued=1 << 40)
        for role in ("init", "store"):
            hello = Hello(worker=role, roles={role: 1}, schema_version=SCHEMA_VERSION)
            core.workers.hello(1, ControlRow.of(hello))
        return core

    def write(self, items: int) -> None:
        """A transaction, and what waited for it."""
        with self.meter("changes", items):
            batch = self.core.changes.take()
        with self.meter("transaction", items):
            self.log.write_now(batch.writes)
        with self.meter("changes", 0):
            self.core.note_durable(batch)

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
            batch = list(islice(leased, credit))
            with self.meter("commit", len(batch)):
                for record in batch:
                    self.core.rollouts.add_holder(record, workers["init"], "init")
                keys = [AttemptKey(run.run_id, r.rollout_id, r.life.attempt) for r in batch]
                self.core.commits.reserve(workers["store"], keys)
                self._commit(f"p{run.commits.next_commit}", keys)
            self.write(len(batch))
            group_ids = sorted({record.group.group_id for record in batch})
            with self.meter("decide", len(group_ids)):
                self.core.groups.propose(run, [Decision(group_id=g, kept=True) for g in group_ids])
            self.write(len(batch))
            with self.meter("hand out", len(group_ids)):
                self.core.groups.handout(run, [KeptGroup(g, 0) for g in group_ids])
            self.write(len(batch))
            with self.meter("ack", 1):
                self.core.groups.cursor(run, "primary", run.delivery.next_delivery)
            self.write(len(batch))

    def commit_rest(self) -> None:
        """Commits what the log has and no part holds: the events of the last hand-outs."""
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
                self.core.rollouts.add_holder(record, self.core.state.workers["init"], "init")

    def cancel(self, step: str, rollouts: int) -> None:
        """Cancels so many rollouts; the store decides what has ended meanwhile."""
        run, before = self.run, self.run.counts["cancelled"]
        with self.meter(step, rollouts):
            self.core.cancel_run(run)
        while run.counts["cancelled"] - before < rollouts:
            with self.meter(step, 0):
                self.core.grants.prune()
            self.write(CHUNK)
            ended = [g.group_id for g in run.groups.values() if not g.members.pending]
            self.core.groups.propose(run, [Decision(group_id=g, kept=False) for g in ended])
            for group_id in ended:
                run.groups.pop(group_id, None)

    def restart(self, step: str) -> None:
        with self.meter(step, 1):
            self.core = self._start()

    def snapshot(self, step: str) -> None:
        """Reads what a new store is sent, without the tasks that it does not have."""
        with self.meter(step, 1):
            run_news(self.log, self.run)
            read_page(self.log, self.run.outbox.end)


AS_THEY_ARE = {
    *("life.paused", "life.problem", "accepted.group_size", "outbox.end", "outbox.stored"),
    *("weights.version", "weights.allocated_version", "pace.rate"),
}
"""Counts of a run that do not grow with it."""


def repeat(path: Path, times: int) -> None:
    """Make a closed log's only run `times` as long as it is: its rows again and again.

    Its marks (stored, committed) and its counts are where they would be.
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


class Size:
    """Logs with so many rollouts: all of them done, and all of them waiting in the pool."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size, self.meter = size, Meter()
        self._folder = folder
        self._grown: dict[str, GrowingRun] = {}

    def live(self, kind: str) -> GrowingRun:
        if kind not in self._grown:
            path = self._folder / f"{kind}-{self.size}" / "control.db"
            grown = GrowingRun(path, Meter())
            grown.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
            grown.accept(SEED)
            if kind == "done":
                grown.work()
                grown.commit_rest()
            grown.log.close()
            repeat(path, self.size // SEED)
            grown = GrowingRun(path, Meter())
            grown.core.changes.mark_run(grown.run)  # with its counts
            grown.write(0)
            grown.log.close()
            self._grown[kind] = GrowingRun(path, self.meter)
        return self._grown[kind]

    def round(self) -> None:
        done = self.live("done")
        done.restart("restart, all of it done")
        done.snapshot("store's snapshot, all of it done")
        done.accept(MORE)
        done.work()
        pooled = self.live("pooled")
        pooled.restart("restart, all of it pooled")
        pooled.snapshot("store's snapshot, all of it pooled")
        if self.size <= SMALL:
            self.close()

    def close(self) -> None:
        for kind, grown in self._grown.items():
            grown.log.close()
            shutil.rmtree(self._folder / f"{kind}-{self.size}")
        self._grown.clear()

    def end(self) -> None:
        """Does what can be done once only."""
        self.live("pooled").cancel("cancel, all of it pooled", min(CANCELLED, self.size))
        done = self.live("done")
        done.accept(IN_HAND)
        done.take(IN_HAND)
        done.cancel("cancel, in hand", IN_HAND)
        self.close()


def _memory() -> Iterator[Figure]:
    """Yields the bytes of Python's that stay for one more rollout, by where it is in its life."""
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        grown = GrowingRun(Path(folder) / "control.db", Meter())
        grown.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=MEMORY))
        sizes = []
        tracemalloc.start()
        for _ in range(2):  # after the first batch, tables have their size
            grown.accept(MEMORY)
            grown.work()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        finished = [sizes[1] - sizes[0]]
        with _traced_memory() as pooled:
            grown.accept(MEMORY)
        with _traced_memory() as leased:
            grown.core.pump(MEMORY)
            grown.write(MEMORY)
        grown.log.close()
    for name, growth, note in (
        ("pooled", pooled, ""),
        ("open", leased, ""),
        ("finished", finished, "bar: 0"),
    ):
        name = f"memory of one more {name} rollout"
        yield Figure(name=name, value=growth[0] / MEMORY, unit="B", note=note)


@contextmanager
def _traced_memory() -> Iterator[list[int]]:
    """Measures the bytes that the block leaves behind."""
    sizes: list[int] = []
    gc.collect()
    tracemalloc.start()
    yield sizes
    gc.collect()
    sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()


def _figures(sizes: list[Size]) -> Iterator[Figure]:
    first: dict[str, float] = {}
    for size in sizes:
        meter = size.meter
        # Transactions have a thread of their own, and a restart comes before anybody is served.
        serving = [w for w in meter.items if w != "transaction" and not w.startswith("restart")]
        slowest = max(serving, key=meter.longest_ms.__getitem__)
        yield Figure(
            name=f"longest step at {size.size:,}",
            value=meter.longest_ms[slowest],
            unit="ms",
            note=f"{slowest}; bar: at most 50",
        )
        for step in meter.items:
            cost = meter.cost_ms(step)
            yield Figure(
                name=f"{step} at {size.size:,}",
                value=cost,
                unit="ms",
                cpu_s=meter.cpu_s[step],
                ratio=first.setdefault(step, cost) / cost if cost else None,
                note=f"longest step {meter.longest_ms[step]:.1f} ms",
            )


async def run(quick: bool) -> Report:
    """Measure; `quick` stops at ten thousand."""
    settle_heap()  # as the gateway's process does
    rows = list(_memory())
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        sizes = [Size(Path(folder), size) for size in (SIZES[:2] if quick else FULL)]
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for size in sizes:
                size.round()
        for size in sizes:
            size.end()
        rows += _figures(sizes)
    rows += _stores(SIZES[:2] if quick else FULL)
    return Report(bench="growth", rows=tuple(rows))


def _stores(sizes: Iterable[int]) -> Iterator[Figure]:
    """Yields what a store that has died reads of an open run before it serves, off its loop."""

    async def no_handout(groups: list[KeptGroup]) -> HandedOut:
        return HandedOut()

    async def no_cursor(consumer: str, seq: int) -> None:
        pass

    costs: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        for size in costs:
            make_run(Path(folder) / str(size), size, min(COMMITS, size // SEED), tokens=16)
        for _ in range(STORE_ROUNDS):
            for size, cost in costs.items():
                run = RunDir(str(Path(folder) / str(size)))
                order = LiveOrder("a", size=abs, handout=no_handout, save_cursor=no_cursor)
                began = time.process_time()
                read_back(GroupIndex(run), FactBook(), order, History())
                cost.append(1000 * (time.process_time() - began) / size)
    first = min(next(iter(costs.values())))
    for size, cost in costs.items():
        yield Figure(
            name=f"restart of the store at {size:,}",
            value=min(cost),
            unit="ms",
            repeats=tuple(cost),
            ratio=first / min(cost),
            note="per rollout of the open run, least of all rounds; not on the loop",
        )
