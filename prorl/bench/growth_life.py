"""A gateway's mind and its log, driven by hand, with what each step costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prorl.control import (
    CommitPart,
    CommittedRollout,
    ControlRow,
    Decision,
    Hello,
    KeptGroup,
)
from prorl.schema_fields import SCHEMA_VERSION
from prorl.service.bodies import GroupBody, TaskBody
from prorl.service.core import Core
from prorl.service.log import ControlLog
from prorl.service.snapshot import run_snapshot
from prorl.service.state import RolloutRecord, RunRecord
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


def _body(number: int) -> GroupBody:
    task = TaskBody(task_id=f"t{number}", env="noop", prompt="x" * 300)
    return GroupBody(task=task, n=N, key=f"k{number}")


def _fine(task: Task) -> None:
    """Accept any task: admission is not what is measured."""
