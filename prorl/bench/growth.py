"""What one more rollout costs the gateway when a thousand, ten thousand, a hundred thousand (in the
full form a million) came before it: nothing may grow with history.

The gateway's mind and its log, driven by hand: every step is what the gateway does on its one loop,
so the longest step is how long that loop was blocked (the transaction runs on a thread of its own
and is counted apart). CPU milliseconds per item and of the longest step; `ratio` is the cost at the
smallest size divided by the cost at this one: below 0.67 it has grown by more than half.
"""

from __future__ import annotations

import gc
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.bench.report import Figure, Report, machine
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
from prorl.service.app import PIECE
from prorl.service.bodies import GroupBody, TaskBody
from prorl.service.core import Core
from prorl.service.log import ControlLog
from prorl.service.snapshot import run_snapshot
from prorl.service.state import RunRecord
from prorl.types import AttemptKey, Task

SIZES = (1_000, 10_000, 100_000)
FULL = (*SIZES, 1_000_000)
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
    """One run from its first group to its last ack."""

    def __init__(self, log: ControlLog, meter: Meter, size: int) -> None:
        self.log, self.meter, self.groups = log, meter, size // N
        self.core = self._start()

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

    def accept(self, run: RunRecord, begin: int = 0) -> None:
        """All groups of the run, from `begin` on."""
        for first in range(begin, self.groups, CHUNK):
            bodies = [_body(first + i) for i in range(min(CHUNK, self.groups - first))]
            with self.meter("accept", N * len(bodies)):
                checked = self.core.acceptance.check(run, bodies, _fine, {})
                self.core.acceptance.groups(run, checked)
            self.write(N * len(bodies))

    def work(self, run: RunRecord) -> None:
        """Lease, commit, decide, hand out and ack, a window at a time."""
        init, store = (self.core.state.workers[role] for role in ("init", "store"))
        while run.next_delivery < self.groups:
            with self.meter("lease", N * WINDOW):
                self.core.pump(N * WINDOW)
            given = [r for r in run.rollouts.values() if r.life.state == "leased"]
            self.write(len(given))
            with self.meter("commit", len(given)):
                keys = [AttemptKey(run.run_id, r.rollout_id, r.life.attempt) for r in given]
                for record in given:
                    self.core.rollouts.hold(record, init)
                self.core.commits.reserve(store, keys)
                rows = tuple(
                    CommittedRollout(rollout_id=k.rollout_id, attempt=1, reward=1.0) for k in keys
                )
                part = CommitPart(
                    part=f"p{run.next_commit}",
                    rollouts=rows,
                    tasks_upto=run.next_group,
                    group_events_upto=run.next_event,
                )
                self.core.commits.commit(run, part)
                self.core.commits.published(run, run.next_commit - 1)
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

    def cancel(self, run: RunRecord) -> None:
        """A pool that never starts; the store decides what has ended meanwhile."""
        with self.meter("cancel", 0):
            self.core.cancel_run(run)
        more, items = True, N * self.groups
        while more:
            with self.meter("cancel", items):
                more, items = self.core.grants.prune(), 0
            self.write(CHUNK)
            ended = [g.group_id for g in run.groups.values() if not g.pending]
            self.core.groups.propose(run, [Decision(group_id=g, kept=False) for g in ended])
            for group_id in ended:
                run.groups.pop(group_id, None)
            more = more or bool(run.pool)

    def restart(self, what: str) -> None:
        """Restart the gateway from its log."""
        with self.meter(what, 1):
            self.core = self._start()

    def snapshot(self, what: str, run_id: str) -> None:
        """What a store that has come is told, without the tasks that it does not have."""
        run = self.core.run(run_id)
        run.tasks_stored = run.next_group
        with self.meter(what, 1):
            run_snapshot(self.log, run, 0.0)


def _longest(meter: Meter, size: int) -> Figure:
    """Of what the loop does while it serves: transactions have a thread of their own, and a restart
    comes before anybody is served.
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
        log = ControlLog(Path(folder) / "control.db")
        life = Life(log, meter, MEMORY)
        life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=MEMORY))
        life.groups = WINDOW
        life.accept(life.core.run("a"))
        life.work(life.core.run("a"))  # what is made once is there now
        life.groups += MEMORY // N
        with _bytes_each("pooled", MEMORY) as pooled:
            life.accept(life.core.run("a"), WINDOW)
        with _bytes_each("finished", MEMORY) as finished:
            life.work(life.core.run("a"))
        life.core.create_run(RunConfig(run_id="b", max_open_groups=MEMORY))
        life.groups = MEMORY // N
        life.accept(life.core.run("b"))
        with _bytes_each("open", MEMORY) as open_:
            life.core.pump(MEMORY)
            life.write(MEMORY)
        log.close()
    return [*pooled, *open_, *finished]


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


async def run(quick: bool) -> Report:
    """Measure; `quick` stops at ten thousand."""
    settle_heap()  # as the gateway's process does
    rows = _memory()
    first: dict[str, float] = {}
    for size in SIZES[:2] if quick else FULL:
        meter = Meter()
        with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
            log = ControlLog(Path(folder) / "control.db")
            life = Life(log, meter, size)
            life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
            life.accept(life.core.run("a"))
            life.restart("restart, all of it pooled")
            life.snapshot("store's snapshot, all of it pooled", "a")
            life.work(life.core.run("a"))
            life.restart("restart, all of it done")
            life.snapshot("store's snapshot, all of it done", "a")
            life.core.create_run(RunConfig(run_id="b"))
            life.accept(life.core.run("b"))
            life.cancel(life.core.run("b"))
            log.close()
        rows.append(_longest(meter, size))
        for what in meter.items:
            cost = meter.cost_ms(what)
            rows.append(
                Figure(
                    what=f"{what} at {size:,}",
                    value=cost,
                    unit="ms",
                    cpu_s=meter.cpu_s[what],
                    ratio=first.setdefault(what, cost) / cost if cost else None,
                    note=f"longest step {meter.longest_ms[what]:.1f} ms",
                )
            )
    return Report(bench="growth", machine=machine(), rows=tuple(rows))
