"""Tenants side by side on a real core and log, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.config import Quota
from prorl.service.core.state import RolloutRecord, RunRecord
from prorl.service.log.log import ControlLog
from prorl.types import AttemptKey, Json, RolloutState
from tests.service.hand import Hand
from tests.service.world import group, run_config

SLOTS, ROLLOUT_S = 8, 1.0


class Shop(Hand):
    """INIT has `SLOTS` slots, each rollout of which takes `ROLLOUT_S`."""

    def __init__(self, log: ControlLog, quotas: dict[str, Quota]) -> None:
        super().__init__(log, quotas=quotas)
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
            bodies = (group(f"{run.next_group + i}") for i in range(min(500, count - start)))
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
            self.commit([record], record.run.outbox_end)
            self.write()

    def in_hand(self) -> dict[str, int]:
        return {name: run.in_hand for name, run in self.core.state.open.items()}


@contextmanager
def shop(tmp_path: Path, **quotas: Quota) -> Iterator[Shop]:
    log = ControlLog(tmp_path / "control.db")
    try:
        yield Shop(log, quotas)
    finally:
        log.close()


def mean_wait(tmp_path: Path, others: int, **quotas: Quota) -> float:
    """Seconds from acceptance to the lease of 100 rollouts of `ours`, beside a tenant that has
    queued `others` before.
    """
    tmp_path.mkdir()
    with shop(tmp_path, **quotas) as s:
        if others:
            s.open("theirs", others, tenant="big", max_open_groups=10**6)
        ours = s.open("ours", 100, tenant="small", max_open_groups=10**6)
        while ours.rollout_states[RolloutState.QUEUED]:
            s.step()
        waits = [at for key, at in s.leased_at.items() if key.run_id == "ours"]
    assert len(waits) == 100
    return sum(waits) / len(waits)


def test_a_tenant_with_ten_thousand_queued_groups_takes_half_and_no_more(tmp_path: Path) -> None:
    alone = mean_wait(tmp_path / "alone", 0)
    beside_few = mean_wait(tmp_path / "few", 200)
    beside_many = mean_wait(tmp_path / "many", 10_000)
    weighed = mean_wait(tmp_path / "weighed", 10_000, small=Quota(weight=3))
    share = mean_wait(tmp_path / "share", 0, small=Quota(rollouts_in_hand=SLOTS // 2))
    print(f"mean wait {alone:.2f} s alone, {share:.2f} alone on half of the slots,")
    print(f"{beside_few:.2f} beside 200 groups,", end=" ")
    print(f"{beside_many:.2f} beside 10,000; {weighed:.2f} with three times their weight")
    assert beside_many == pytest.approx(beside_few)
    assert beside_many < 2.1 * alone
    assert beside_many < 1.1 * share, "who queues more moves nobody's fair share"
    assert weighed < 1.5 * alone


def test_a_tenant_below_its_share_waits_for_one_rollout_to_end_at_most(tmp_path: Path) -> None:
    """It has fewest in hand, so each slot that comes free is its own: a rollout takes at most twice
    what it takes on an idle service.
    """
    waits: list[float] = []
    with shop(tmp_path) as s:
        s.open("theirs", 1000, tenant="big", max_open_groups=10**6)
        ours = s.open("ours", 0, tenant="small", max_open_groups=10**6)
        s.step()
        for _ in range(20):
            began, first = s.now, ours.next_rollout
            s.add(ours, SLOTS // 2)
            while ours.in_hand or ours.rollout_states[RolloutState.QUEUED]:
                s.step()
            leased = {k.rollout_id: at for k, at in s.leased_at.items() if k.run_id == "ours"}
            waits += [leased[i] - began for i in range(first, first + SLOTS // 2)]
    slowed = (max(waits) + ROLLOUT_S) / ROLLOUT_S
    mean = 1 + sum(waits) / len(waits) / ROLLOUT_S
    print(f"from submission to the end {mean:.2f}x on average, {slowed:.2f}x at most")
    assert max(waits) <= ROLLOUT_S


def test_many_runs_of_one_tenant_share_its_part(tmp_path: Path) -> None:
    with shop(tmp_path) as s:
        for number in range(6):
            s.open(f"big-{number}", 50, tenant="big")
        s.open("small", 50, tenant="small")
        for _ in range(60):
            s.step()
        s.core.pump(SLOTS - len(s.busy))
        in_hand = s.in_hand()
    assert in_hand.pop("small") == SLOTS // 2
    assert max(in_hand.values()) - min(in_hand.values()) <= 1, in_hand


def test_bounds_hold_back_their_tenant_and_nobody_else(tmp_path: Path) -> None:
    with shop(tmp_path, big=Quota(rollouts_in_hand=3)) as s:
        s.open("a", 50, tenant="big")
        s.open("b", 50, tenant="big")
        s.core.pump(SLOTS)
        assert s.in_hand() == {"a": 2, "b": 1}
        s.open("d", 50, tenant="other")
        s.core.pump(SLOTS - 3)
        assert s.in_hand()["d"] == SLOTS - 3


def test_waiting_behind_a_quota_ends_no_rollout(tmp_path: Path) -> None:
    with shop(tmp_path, big=Quota(rollouts_in_hand=1)) as s:
        run = s.open("a", 3, tenant="big", limits={"queue_s": 5.0})
        s.core.pump(SLOTS)
        s.now += 100.0
        s.core.sweep()
        s.core.grants.prune()
        assert (run.expired, run.rollout_states[RolloutState.QUEUED]) == (False, 2)
