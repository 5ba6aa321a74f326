"""Runs side by side on a real core and log, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.service.core.state import RolloutRecord, RunRecord
from prorl.service.log.log import ControlLog
from prorl.types import AttemptKey, Json, RolloutState
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore

SLOTS, ROLLOUT_S = 8, 1.0


class Shop(SteppedCore):
    """INIT has `SLOTS` slots, each rollout of which takes `ROLLOUT_S`."""

    def __init__(self, log: ControlLog) -> None:
        super().__init__(log)
        self.come("init", "store")
        self.busy: list[tuple[float, int, RolloutRecord]] = []
        self.leased_at: dict[AttemptKey, float] = {}

    def open(self, name: str, count: int, **config: Json) -> RunRecord:
        """A run with so many groups of one."""
        self.core.create_run(run_config(run_id=name, **config))
        self.add(self.core.run(name), count)
        return self.core.run(name)

    def add(self, run: RunRecord, count: int) -> None:
        for start in range(0, count, 500):
            bodies = (
                group(f"{run.accepted.next_group + i}") for i in range(min(500, count - start))
            )
            self.submit(*bodies, run=run)

    def step(self) -> None:
        """Lease what there is room for; then the next rollout to end is committed."""
        self.core.pump(SLOTS - len(self.busy))
        for run in self.core.state.open.values():
            for record in run.rollouts.values():
                if record.life.state is RolloutState.LEASED and record.key not in self.leased_at:
                    self.leased_at[record.key] = self.now
                    end = self.now + ROLLOUT_S
                    heapq.heappush(self.busy, (end, len(self.leased_at), record))
        self.write()
        if self.busy:
            self.now, _, record = heapq.heappop(self.busy)
            self.commit([record], record.run.outbox.end)
            self.write()

    def in_hand(self) -> dict[str, int]:
        return {name: run.in_hand for name, run in self.core.state.open.items()}


@contextmanager
def shop(tmp_path: Path) -> Iterator[Shop]:
    log = ControlLog(tmp_path / "control.db")
    try:
        yield Shop(log)
    finally:
        log.close()


def mean_wait(tmp_path: Path, others: int) -> float:
    """Seconds from acceptance to the lease of 100 rollouts of `ours`, beside a run that has queued
    `others` before.
    """
    tmp_path.mkdir()
    with shop(tmp_path) as s:
        if others:
            s.open("theirs", others, max_open_groups=10**6)
        ours = s.open("ours", 100, max_open_groups=10**6)
        while ours.counts[RolloutState.QUEUED]:
            s.step()
        waits = [at for key, at in s.leased_at.items() if key.run_id == "ours"]
    assert len(waits) == 100
    return sum(waits) / len(waits)


def test_a_run_with_ten_thousand_queued_groups_takes_half_and_no_more(tmp_path: Path) -> None:
    alone = mean_wait(tmp_path / "alone", 0)
    beside_few = mean_wait(tmp_path / "few", 200)
    beside_many = mean_wait(tmp_path / "many", 10_000)
    print(f"mean wait {alone:.2f} s alone, {beside_few:.2f} beside 200 groups,", end=" ")
    print(f"{beside_many:.2f} beside 10,000")
    assert beside_many == pytest.approx(beside_few)
    assert beside_many < 2.1 * alone


def test_a_run_below_its_share_waits_for_at_most_a_single_rollout(tmp_path: Path) -> None:
    """It has fewest in hand, so each slot that comes free is its own: a rollout takes at most twice
    what it takes on an idle service.
    """
    waits: list[float] = []
    with shop(tmp_path) as s:
        s.open("theirs", 1000, max_open_groups=10**6)
        ours = s.open("ours", 0, max_open_groups=10**6)
        s.step()
        for _ in range(20):
            began, first = s.now, ours.accepted.next_rollout
            s.add(ours, SLOTS // 2)
            while ours.in_hand or ours.counts[RolloutState.QUEUED]:
                s.step()
            leased = {k.rollout_id: at for k, at in s.leased_at.items() if k.run_id == "ours"}
            waits += [leased[i] - began for i in range(first, first + SLOTS // 2)]
    slowed = (max(waits) + ROLLOUT_S) / ROLLOUT_S
    mean = 1 + sum(waits) / len(waits) / ROLLOUT_S
    print(f"from submission to the end {mean:.2f}x on average, {slowed:.2f}x at most")
    assert max(waits) <= ROLLOUT_S


def test_open_runs_share_the_slots_evenly(tmp_path: Path) -> None:
    with shop(tmp_path) as s:
        for number in range(3):
            s.open(f"run-{number}", 50)
        for _ in range(60):
            s.step()
        s.core.pump(SLOTS - len(s.busy))
        in_hand = s.in_hand()
    assert sum(in_hand.values()) == SLOTS
    assert max(in_hand.values()) - min(in_hand.values()) <= 1, in_hand
