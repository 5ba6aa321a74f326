"""Policies of sampling for DAPO over one workload, in virtual time.

A workload is groups, each with its members' rewards and seconds, the same for every policy. Slots
take one rollout at a time, waiting ones in order; a trainer takes `step` informative groups and
trains for `train_s`. `serve` is our own: the gateway's `Core` with its log, told of rollouts that
end when they do, and the store's filter. The rivals are their policies as their sources state them:

- batch then filter: verl's DAPO recipe (`filter_groups`, `recipe/dapo/dapo_ray_trainer.py`): a
  batch of `gen` prompts is sampled to its end and filtered, another while there are too few, and
  what is above the step is cut off; its scripts set `gen` to three steps, its default is one.
- refill within the step: ProRL's client (`async_server_dapo.py`): free slots take the next prompt
  until the step is full; what runs is cancelled and queued again from scratch.
- prime-rl's `orchestrator/scheduler.py`: `factor` times the step's groups always run, across steps;
  nothing is begun while the orchestrator is more than `MAX_ASYNC` steps ahead of the weights.

Not modelled: prefill, what servers lose by more concurrency, and the time of a weight update.
"""

from __future__ import annotations

import heapq
import json
import math
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prorl.config import RunConfig
from prorl.control import (
    CommitPart,
    CommittedRollout,
    ControlRow,
    Decision,
    GroupComplete,
    Hello,
    KeptGroup,
    Kind,
    Rows,
    TrajectorySummary,
)
from prorl.filters import GroupDecision
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.core.core import Core
from prorl.service.core.outbox import read_page
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord, WorkerRecord
from prorl.service.log.log import ControlLog
from prorl.storage.serve.filter import GroupFilter
from prorl.types import AttemptKey, RolloutState, Task

MAX_ASYNC = 2
"""Versions that a group may be behind, ours and prime-rl's."""


TEACHES_NOTHING = ("all_equal", "too_hard", "too_easy")
"""The reasons why a filter of ours drops a group that was sampled to its end, or as good as
that.
"""


class Sampled(NamedTuple):
    """A group: what its members are worth and how long they take."""

    rewards: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def informative(self) -> bool:
        return min(self.rewards) < max(self.rewards)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups one after the other, seeded; from a file if one is named."""

    seed: int = 0
    n: int = 8
    mean_turns: float = 12.0
    spread: float = 0.8
    """Sigma of the log-normal number of turns."""
    turn_s: float = 6.0
    most_s: float = 1000.0
    """A rollout's deadline."""
    uninformative: float = 0.5
    too_hard: float = 0.8
    """The share of those that are too hard: nobody solves them, and it takes longer."""
    file: Path | None = None
    """JSON lines of {"rewards": [...], "seconds": [...]}: used in order, again and again."""

    @cached_property
    def _measured(self) -> list[Sampled]:
        if self.file is None:
            return []
        rows = map(json.loads, self.file.read_text().splitlines())
        return [Sampled(tuple(row["rewards"]), tuple(row["seconds"])) for row in rows]

    @cached_property
    def _drawn(self) -> dict[int, Sampled]:
        return {}

    def group(self, index: int) -> Sampled:
        if self._measured:
            return self._measured[index % len(self._measured)]
        if index not in self._drawn:
            self._drawn[index] = self._draw(index)
        return self._drawn[index]

    def _draw(self, index: int) -> Sampled:
        draw = np.random.default_rng((self.seed, index))
        rate, slower = draw.uniform(0.15, 0.85), 1.0
        if draw.random() < self.uninformative:
            rate = float(draw.random() >= self.too_hard)
            slower = 1.0 if rate else 1.5
        passed = draw.random(self.n) < rate
        if 0 < rate < 1:
            passed[:2] = True, False
        turns = np.ceil(draw.lognormal(math.log(self.mean_turns), self.spread, self.n) * slower)
        seconds = np.minimum(self.most_s, turns * self.turn_s * draw.uniform(0.7, 1.3, self.n))
        return Sampled(tuple(passed.astype(float).tolist()), tuple(seconds.tolist()))


@dataclass(frozen=True, kw_only=True)
class Setup:
    slots: int = 256
    step: int = 32
    """Informative groups that the trainer takes."""
    steps: int = 20
    train_s: float = 60.0


@dataclass(kw_only=True)
class Outcome:
    """Holds what a policy took for the same informative groups."""

    seconds: float = 0.0
    waited_s: float = 0.0
    """In which the trainer had nothing to do."""
    started: int = 0
    """Rollouts."""
    dropped: int = 0
    """The part of them in groups that the filter dropped: no policy here can know it before."""
    trained: int = 0
    worked_s: float = 0.0
    """Rollout seconds of all."""

    @property
    def wasted(self) -> int:
        """Rollouts that were begun for nothing: cut off, cancelled, or stale."""
        return self.started - self.dropped - self.trained

    @property
    def idle_share(self) -> float:
        return self.waited_s / self.seconds


class _Running(NamedTuple):
    end: float
    began: float
    group: int
    member: int


@dataclass
class _Slots:
    """The rivals' rollouts: those that run, and those that wait for a slot."""

    work: Workload
    setup: Setup
    now: float = 0.0
    running: list[_Running] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    missing: dict[int, int] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def free(self) -> int:
        return self.setup.slots - len(self.running) - len(self.waiting)

    def begin(self, group: int) -> None:
        """Queue a group, and start what there is room for."""
        self.missing[group] = self.work.n
        self.waiting.extend((group, member) for member in range(self.work.n))
        self._start()

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.setup.slots:
            group, member = self.waiting.popleft()
            end = self.now + self.work.group(group).seconds[member]
            heapq.heappush(self.running, _Running(end, self.now, group, member))
            self.outcome.started += 1

    def until(self, end: float = math.inf) -> int | None:
        """Go on until a group is complete, whose number that is, or the time has come."""
        while self.running and self.running[0].end <= end:
            done = heapq.heappop(self.running)
            self.now = done.end
            self.outcome.worked_s += done.end - done.began
            self._start()
            self.missing[done.group] -= 1
            if not self.missing[done.group]:
                del self.missing[done.group]
                if not self.work.group(done.group).informative:
                    self.outcome.dropped += self.work.n
                return done.group
        assert end < math.inf, "nothing runs and nothing is waited for"
        self.now = end
        return None

    def cancel(self) -> list[int]:
        """End everything; the groups that were not complete."""
        self.outcome.worked_s += sum(self.now - slot.began for slot in self.running)
        groups = list(self.missing)
        for of_step in (self.running, self.waiting, self.missing):
            of_step.clear()
        return groups

    def train(self) -> None:
        """A step, while nothing is sampled."""
        self.now += self.setup.train_s
        self.outcome.trained += self.setup.step * self.work.n

    def ended(self) -> Outcome:
        self.outcome.seconds = self.now
        self.outcome.waited_s = self.now - self.setup.steps * self.setup.train_s
        return self.outcome


def batch_then_filter(work: Workload, setup: Setup, gen: float = 1.0) -> Outcome:
    slots, fresh = _Slots(work, setup), count()
    for _ in range(setup.steps):
        num_informative = 0
        while num_informative < setup.step:
            for _ in range(round(gen * setup.step)):
                slots.begin(next(fresh))
            while slots.missing:
                num_informative += _informative(work, slots.until())
        slots.train()
    return slots.ended()


def refill_within_step(work: Workload, setup: Setup) -> Outcome:
    slots, fresh, again = _Slots(work, setup), count(), deque[int]()
    for _ in range(setup.steps):
        num_informative = 0
        while num_informative < setup.step:
            while slots.free > 0:
                slots.begin(again.popleft() if again else next(fresh))
            num_informative += _informative(work, slots.until())
        again.extend(slots.cancel())
        slots.train()
    return slots.ended()


def single_batch_ahead(work: Workload, setup: Setup) -> Outcome:
    """slime's `train_async.py`: a batch is sampled to its end while the one before is trained."""
    slots, fresh, trained_at = _Slots(work, setup), count(), 0.0
    for _ in range(setup.steps):
        for _ in range(setup.step):
            slots.begin(next(fresh))
        while slots.missing:
            slots.until()
        slots.outcome.waited_s += max(0.0, slots.now - trained_at)
        slots.now = max(slots.now, trained_at)
        trained_at = slots.now + setup.train_s
        slots.outcome.trained += setup.step * work.n
    slots.outcome.seconds = trained_at
    return slots.outcome


def prime_rl(work: Workload, setup: Setup, factor: float = 1.0) -> Outcome:
    slots, fresh = _Slots(work, setup), count()
    trained_at: list[float] = []
    """The times when the weights of each step came."""
    for step in range(setup.steps):
        batch = 0
        while batch < setup.step:
            if step > MAX_ASYNC and slots.now < (barrier := trained_at[step - 1 - MAX_ASYNC]):
                # Groups that end meanwhile count, and none is begun in their place.
                while (ended := slots.until(barrier)) is not None:
                    batch += _informative(work, ended)
                continue
            while len(slots.missing) < round(factor * setup.step):
                slots.begin(next(fresh))
            batch += _informative(work, slots.until())
        idle_from = trained_at[-1] if trained_at else 0.0
        begins = max(slots.now, idle_from)
        slots.outcome.waited_s += begins - idle_from
        slots.outcome.trained += setup.step * work.n
        trained_at.append(begins + setup.train_s)
    slots.cancel()
    slots.outcome.seconds = trained_at[-1]
    return slots.outcome


def _informative(work: Workload, group: int | None) -> int:
    return int(group is not None and work.group(group).informative)


def serve(work: Workload, setup: Setup, run: Mapping[str, object] | None = None) -> Outcome:
    """Ours: what the real gateway decides, with `run` over the settings of the run."""
    with tempfile.TemporaryDirectory(prefix="prorl-dapo-", dir=_memory()) as folder:
        return _VirtualService(Path(folder), work, setup, run or {}).work()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _VirtualService:
    """A gateway's core in virtual time, with the workers, the store and the trainer played."""

    def __init__(
        self, folder: Path, work: Workload, setup: Setup, more: Mapping[str, object]
    ) -> None:
        self.load, self.setup, self.outcome = work, setup, Outcome()
        self.now = 0.0
        self.log = ControlLog(folder / "control.db")
        clock = lambda: 1.0 + self.now  # noqa: E731  # 0 means never
        self.core = Core(self.log, ["scripted:oracle"], clock, clock, max_queued=1 << 40)
        for role in ("init", "run", "store"):
            hello = Hello(worker=role, roles={role: 1}, schema_version=SCHEMA_VERSION)
            self.core.workers.hello(1, ControlRow.of(hello))
        settings = {
            "run_id": "bench",
            "filter": "dapo",
            "delivery": "stream",
            "target_groups": setup.step * setup.steps,
            "groups_per_step": setup.step,
            "max_uncommitted_groups": setup.step * (1 + MAX_ASYNC),
            "max_open_groups": 4 * setup.step,
            "max_staleness": MAX_ASYNC,
            "epochs": 1_000_000,
            "limits": {"queue_s": 86400},
        }
        self.core.create_run(RunConfig.model_validate({**settings, **more}))
        task = Task(task_id="t", env="noop", prompt="x")
        body = GroupBody(task=task, n=self.load.n, key="0")
        self.core.datasets.add(self.run, self.core.acceptance.check(self.run, [body], {}))
        self.core.runs.end_of_groups(self.run)
        self.filter = GroupFilter(self.run.config.filter)
        self.verdicts: dict[tuple[float | None, ...], GroupDecision] = {}
        self.outbox_seq = 0
        self.parts = count()
        self.running: dict[AttemptKey, tuple[float, RolloutRecord, int]] = {}
        """The time when each began, and the version that it samples with."""
        self.ends: list[tuple[float, AttemptKey]] = []
        self.kept_groups: list[tuple[int, int, int]] = []
        """A heap: version, order, group."""
        self.num_handed = 0
        self.busy_until = math.inf
        """The time until which the trainer is busy; infinite while it waits for groups."""
        self.idle_from = 0.0
        self.stepped = 0

    @property
    def run(self) -> RunRecord:
        return self.core.run("bench")

    def work(self) -> Outcome:
        while self.stepped < self.setup.steps:
            self._settle()
            end = min(self.ends[0][0] if self.ends else math.inf, self.busy_until)
            assert end < math.inf, f"nothing will happen any more: {self.run.demand}"
            tick = self.now + 1.0 if self.run.config.early_stop_valid else math.inf
            self.now = min(end, tick)
            if self.busy_until <= self.now:
                self._train()
            elif self.now == end:
                self._finish(heapq.heappop(self.ends)[1])
        for began, _, _ in self.running.values():
            self.outcome.worked_s += self.now - began
        self.filter.close()
        self.log.close()
        self.outcome.seconds = self.now
        return self.outcome

    def _settle(self) -> None:
        """Say everything that is to be said at this moment."""
        moved = True
        while moved:
            self.core.pump(self.setup.slots - len(self.running))
            self.core.grants.prune()
            self.core.rollouts.cancel_stragglers(self.run)
            moved = self._write()
            moved = self._hand_out() or moved

    def _write(self) -> bool:
        """One transaction and what waited for it; whether anything was said."""
        if self.core.changes.empty:
            return False
        batch = self.core.changes.take()
        self.log.write_now(batch.writes)
        self.core.note_durable(batch)
        for record, attempt in batch.granted:
            if record.life.state is RolloutState.LEASED and record.life.attempt == attempt:
                self._start(record)
        for row in (row for rows in batch.outbox.values() for row in rows):
            if row.kind is Kind.CANCEL and (running := self.running.pop(row.key, None)) is not None:
                self.outcome.worked_s += self.now - running[0]
        self._hear()
        return True

    def _sampled(self, group: GroupRecord) -> Sampled:
        return self.load.group(int(group.key.partition("/")[0]))  # the dataset has one task

    def _start(self, record: RolloutRecord) -> None:
        worker: WorkerRecord = self.core.state.workers["run"]
        self.core.rollouts.started(worker, record, record.life.attempt, "run")
        took = self._sampled(record.group).seconds[record.sample_index]
        self.running[record.key] = self.now, record, self.run.weights.version
        heapq.heappush(self.ends, (self.now + took, record.key))
        self.outcome.started += 1

    def _finish(self, key: AttemptKey) -> None:
        attempt = self.running.pop(key, None)
        if attempt is None:
            return  # it was cancelled
        began, record, version = attempt
        self.outcome.worked_s += self.now - began
        self.core.commits.reserve(self.core.state.workers["store"], [key])
        tokens = round(self.now - began)
        row = CommittedRollout(
            rollout_id=key.rollout_id,
            attempt=key.attempt,
            reward=self._sampled(record.group).rewards[record.sample_index],
            summary=TrajectorySummary(
                min_version=version, max_version=version, num_trained=1, num_sampled=tokens
            ),
        )
        part = CommitPart(part=f"p{next(self.parts)}", rollouts=(row,), outbox_upto=self.outbox_seq)
        self.core.commits.commit(self.run, part)
        self.core.commits.published(self.run, self.run.commits.next_commit - 1)

    def _hear(self) -> None:
        page = read_page(self.log, self.outbox_seq)
        self.outbox_seq = page.upto
        complete = [row.read(GroupComplete) for row in page.rows if row.kind is Kind.GROUP_COMPLETE]
        for row in page.rows:
            if row.kind is Kind.ROWS:
                self._note(row.read(Rows))
        if complete:
            self.core.groups.propose(self.run, map(self._decision, complete))

    def _decision(self, group: GroupComplete) -> Decision:
        rewards = tuple(member.reward for member in group.members)
        if rewards not in self.verdicts:  # the filter sees nothing else
            self.verdicts[rewards] = self.filter.decide([group])[0]
        verdict = self.verdicts[rewards]
        versions = [
            record.stored.summary.min_version
            for record in self.run.groups[group.group_id].rollouts
            if record.stored.summary.min_version >= 0
        ]
        return Decision(
            group_id=group.group_id,
            kept=verdict.kept,
            reason=verdict.reason,
            min_version=min(versions, default=-1),
        )

    def _note(self, rows: Rows) -> None:
        for event in rows.events:
            if event.event == "decided" and event.kept:
                entry = event.min_version, event.event_seq, event.group_id
                heapq.heappush(self.kept_groups, entry)
            elif event.event == "decided" and event.reason in TEACHES_NOTHING:
                self.outcome.dropped += event.num_members

    def _hand_out(self) -> bool:
        """Returns whether the trainer, which waits for its step's groups, got some."""
        missing = self.setup.step - self.num_handed
        if self.busy_until < math.inf or not missing or not self.kept_groups:
            return False
        groups = [
            heapq.heappop(self.kept_groups) for _ in range(min(missing, len(self.kept_groups)))
        ]
        handed = self.core.groups.handout(self.run, [KeptGroup(g, v) for v, _, g in groups])
        self.num_handed += len(handed.delivered)
        if self.num_handed == self.setup.step:
            self.outcome.waited_s += self.now - self.idle_from
            self.busy_until = self.now + self.setup.train_s
        return True

    def _train(self) -> None:
        """The step is over: commit, publish."""
        run = self.run
        self.stepped, self.num_handed, self.busy_until = self.stepped + 1, 0, math.inf
        self.idle_from = self.now
        self.outcome.trained += self.setup.step * self.load.n
        self.core.groups.cursor(run, "primary", run.delivery.next_delivery)
        self.core.versions.publish(run, self.core.versions.give(run, 0, "weights"))
