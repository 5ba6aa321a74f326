"""What one more rollout costs the gateway after many others: nothing may grow with history.

Others are a thousand, ten thousand, a hundred thousand; in the full form a million. The gateway's
mind and its log, driven by hand: every step is what the gateway does on its one loop, so the
longest step is how long that loop was blocked (the transaction runs on a thread of its own and is
counted apart). CPU milliseconds per item and of the longest step; `ratio` is the cost at the
smallest size divided by the cost at this one: below 0.67 it has grown by more than half.

Logs of all sizes are open at once and take turns, so that whatever else the machine does is in
every figure alike. `grown.py` makes their histories. A restart of the store is what it reads back
of an open run, per rollout of it; `repeats` of the others are the rounds.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prorl.bench.grown import SEED, repeat, stores
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.config import RunConfig
from prorl.control import (
    CommitPart,
    CommittedRollout,
    ControlRow,
    Decision,
    Hello,
    KeptGroup,
)
from prorl.process import settle_heap
from prorl.schema_fields import SCHEMA_VERSION
from prorl.service.bodies import GroupBody, TaskBody
from prorl.service.core import Core
from prorl.service.log import ControlLog
from prorl.service.snapshot import run_snapshot
from prorl.service.state import RolloutRecord, RunRecord
from prorl.service.submissions import PIECE
from prorl.types import AttemptKey, Task

SIZES = (1_000, 10_000, 100_000)
FULL = (*SIZES, 1_000_000)
SMALL = 10_000
"""A log of at most so many is made anew in every round: it would not stay that small."""

ROUNDS, QUICK_ROUNDS = 8, 4
MORE = 1_000
"""Rollouts that come to each log in a round."""

CANCELLED, IN_HAND = 4_000, 2_000
N = 8
CHUNK = PIECE // N
"""Groups of a request that are accepted in one step."""

WINDOW = 32
"""Groups in hand."""

MEMORY = 8_000
"""Rollouts whose memory is counted."""


class Meter:
    """CPU seconds, items and longest step of each operation."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.items: defaultdict[str, int] = defaultdict(int)
        self.longest_ms: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, what: str, items: int) -> Iterator[None]:
        """One step on the loop."""
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
    """One run of a log: what happens to its rollouts."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self.log, self.meter = ControlLog(path), meter
        self.core = self._start()

    @property
    def run(self) -> RunRecord:
        """The run."""
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
        """So many more."""
        run, missing = self.run, rollouts // N
        while missing:
            first, count = run.next_group, min(CHUNK, missing)
            bodies = [_body(first + i) for i in range(count)]
            with self.meter("accept", N * count):
                checked = self.core.acceptance.check(run, bodies, _fine, {})
                self.core.acceptance.groups(run, checked)
            self.write(N * count)
            missing -= count

    def work(self) -> None:
        """Lease, commit, decide, hand out and ack all that wait, a window at a time."""
        run = self.run
        while run.next_delivery < run.next_group:
            with self.meter("lease", N * WINDOW):
                self.core.pump(N * WINDOW)
            given = [r for r in run.rollouts.values() if r.life.state == "leased"]
            self.write(len(given))
            with self.meter("commit", len(given)):
                self._commit(given)
            self.write(len(given))
            wanted = sorted({record.group.group_id for record in given})
            with self.meter("decide", len(wanted)):
                self.core.groups.propose(run, [Decision(group_id=g, kept=True) for g in wanted])
            self.write(len(given))
            with self.meter("hand out", len(wanted)):
                self.core.groups.handout(run, [KeptGroup(g, 0, 1) for g in wanted])
            self.write(len(given))
            with self.meter("ack", 1):
                self.core.groups.cursor(run, "primary", run.next_delivery)
            self.write(len(given))

    def _commit(self, given: Sequence[RolloutRecord]) -> None:
        """A part with these, as INIT held them and the store asks for them."""
        run = self.run
        init, store = (self.core.state.workers[role] for role in ("init", "store"))
        keys = [AttemptKey(run.run_id, r.rollout_id, r.life.attempt) for r in given]
        for record in given:
            self.core.rollouts.hold(record, init)
        self.core.commits.reserve(store, keys)
        rows = tuple(CommittedRollout(rollout_id=k.rollout_id, attempt=1, reward=1.0) for k in keys)
        part = CommitPart(
            part=f"p{run.next_commit}",
            rollouts=rows,
            tasks_upto=run.next_group,
            group_events_upto=run.next_event,
        )
        self.core.commits.commit(run, part)
        self.core.commits.published(run, run.next_commit - 1)

    def commit_rest(self) -> None:
        """What the log knows and no part holds: the events of the last hand-outs."""
        run = self.run
        part = CommitPart(part="rest", tasks_upto=run.next_group, group_events_upto=run.next_event)
        self.core.commits.commit(run, part)
        self.core.commits.published(run, run.next_commit - 1)
        self.write(0)

    def take(self, rollouts: int) -> None:
        """Lease so many, into the hands of INIT."""
        self.core.pump(rollouts)
        self.write(rollouts)
        for record in self.run.rollouts.values():
            if record.life.state == "leased":
                self.core.rollouts.hold(record, self.core.state.workers["init"])

    def cancel(self, what: str, rollouts: int) -> None:
        """So many; the store decides what has ended meanwhile."""
        run, before = self.run, self.run.rollout_states["cancelled"]
        with self.meter(what, rollouts):
            self.core.cancel_run(run)
        while run.rollout_states["cancelled"] - before < rollouts:
            with self.meter(what, 0):
                self.core.grants.prune()
            self.write(CHUNK)
            ended = [g.group_id for g in run.groups.values() if not g.pending]
            self.core.groups.propose(run, [Decision(group_id=g, kept=False) for g in ended])
            for group_id in ended:
                run.groups.pop(group_id, None)

    def restart(self, what: str) -> None:
        """Restart the gateway from its log."""
        with self.meter(what, 1):
            self.core = self._start()

    def snapshot(self, what: str) -> None:
        """What a store that has come is told, without the tasks that it does not have."""
        self.run.tasks_stored = self.run.next_group
        with self.meter(what, 1):
            run_snapshot(self.log, self.run, 0.0)


class Size:
    """Logs with so many rollouts: all of them done, and all of them waiting in the pool."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size, self.meter = size, Meter()
        self._folder = folder
        self._lives: dict[str, Life] = {}

    def live(self, what: str) -> Life:
        """The log of that kind; a small one is made again for every round."""
        if what not in self._lives:
            path = self._folder / f"{what}-{self.size}" / "control.db"
            _make(path, what, self.size)
            self._lives[what] = Life(path, self.meter)
        return self._lives[what]

    def round(self) -> None:
        """Everything once."""
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
        """Remove the logs."""
        for what, life in self._lives.items():
            life.log.close()
            shutil.rmtree(self._folder / f"{what}-{self.size}")
        self._lives.clear()

    def end(self) -> None:
        """What can be done once only."""
        self.live("pooled").cancel("cancel, all of it pooled", min(CANCELLED, self.size))
        done = self.live("done")
        done.accept(IN_HAND)
        done.take(IN_HAND)
        done.cancel("cancel, in hand", IN_HAND)
        self.close()


def _make(path: Path, what: str, size: int) -> None:
    """A closed log of one run with `size` rollouts."""
    life = Life(path, Meter())
    life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
    life.accept(SEED)
    if what == "done":
        life.work()
        life.commit_rest()
    life.log.close()
    repeat(path, size // SEED)
    life = Life(path, Meter())
    life.core.journal.mark_run(life.run)  # with its counts
    life.write(0)
    life.log.close()


def _longest(meter: Meter, size: int) -> Figure:
    """The longest step of what the loop does while it serves.

    Transactions have a thread of their own, and a restart comes before anybody is served.
    """
    steps = {
        what: took
        for what, took in meter.longest_ms.items()
        if what != "transaction" and not what.startswith("restart")
    }
    slowest = max(steps, key=lambda what: steps[what])
    return Figure(
        what=f"longest step at {size:,}",
        value=steps[slowest],
        unit="ms",
        note=f"{slowest}; bar: at most 50",
    )


def _memory() -> list[Figure]:
    """Bytes of Python's that stay for one more rollout, by where it is in its life."""
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        life = Life(Path(folder) / "control.db", meter)
        life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=MEMORY))
        finished = _finished(life)
        with _bytes_each("pooled", MEMORY) as pooled:
            life.accept(MEMORY)
        with _bytes_each("open", MEMORY) as open_:
            life.core.pump(MEMORY)
            life.write(MEMORY)
        life.log.close()
    return [*pooled, *open_, *finished]


def _finished(life: Life) -> list[Figure]:
    """What the second of two equal batches leaves: after the first, tables have their size."""
    held = []
    tracemalloc.start()
    for _ in range(2):
        life.accept(MEMORY)
        life.work()
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    each = (held[1] - held[0]) / MEMORY
    return [Figure(what="memory of one more finished rollout", value=each, unit="B", note="bar: 0")]


@contextmanager
def _bytes_each(what: str, count: int) -> Iterator[list[Figure]]:
    rows: list[Figure] = []
    gc.collect()
    tracemalloc.start()
    yield rows
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rows.append(Figure(what=f"memory of one more {what} rollout", value=held / count, unit="B"))


def _body(number: int) -> GroupBody:
    task = TaskBody(task_id=f"t{number}", env="noop", prompt="x" * 300)
    return GroupBody(task=task, n=N, key=f"k{number}")


def _fine(task: Task) -> None:
    """Accept any task: admission is not what is measured."""


def _figures(sizes: list[Size]) -> Iterator[Figure]:
    first: dict[str, float] = {}
    for size in sizes:
        meter = size.meter
        yield _longest(meter, size.size)
        for what in meter.items:
            cost = meter.cost_ms(what)
            yield Figure(
                what=f"{what} at {size.size:,}",
                value=cost,
                unit="ms",
                cpu_s=meter.cpu_s[what],
                ratio=first.setdefault(what, cost) / cost if cost else None,
                note=f"longest step {meter.longest_ms[what]:.1f} ms",
            )


async def run(quick: bool) -> Report:
    """Measure; `quick` stops at ten thousand."""
    settle_heap()  # as the gateway's process does
    rows = _memory()
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        sizes = [Size(Path(folder), size) for size in (SIZES[:2] if quick else FULL)]
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for size in sizes:
                size.round()
        for size in sizes:
            size.end()
        rows += _figures(sizes)
    rows += stores(SIZES[:2] if quick else FULL)
    return Report(bench="growth", machine=machine(), rows=tuple(rows))
