"""Decides which rollout is leased next, which groups leave a run's pool, and ends those that will
never start.

Each lease goes to the open run with the fewest rollouts in hand, so that a long queue takes its
fair share and no more. Endings in bulk are cut into pieces, so that no step costs more than
`END_BATCH` rollouts, however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from prorl.service.core.changes import Base, CorePart
from prorl.service.core.images import image_of
from prorl.service.core.lifecycle import Event, EventKind
from prorl.service.core.recover import load_groups
from prorl.service.core.rollouts import END_BATCH, Rollouts
from prorl.service.core.runs import RunLifecycle
from prorl.service.core.sampler import may_open
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord
from prorl.types import RolloutState

UNDECIDED = 4000
"""Groups of a run in memory at which ending more waits for the store to decide some."""

_NOBODY = "no worker took it within {:g} s"


_NOWHERE = "no node had the image {!r} within {:g} s"

LOOKS_AGAIN_S = 2.0
"""Until a rollout whose image no node has is tried again: nodes come seldom."""

PLACEMENT_SCAN = 64
"""The number of rollouts whose nodes have no room just now that one `pump` passes over, in each
run.
"""


RoomFor = Callable[[RolloutRecord], int | None]
"""Returns how many like it would soon find room; None where no node has what it needs."""


def anywhere(_: RolloutRecord) -> int | None:
    return 1


class LeaseGrants(CorePart):
    def __init__(self, base: Base, rollouts: Rollouts, runs: RunLifecycle) -> None:
        super().__init__(base)
        self._rollouts, self._runs = rollouts, runs

    def pump(self, room: int, room_for: RoomFor = anywhere) -> None:
        """Grant up to `room` leases, each to the open run with the fewest rollouts in hand. Groups
        start as the sampler allows: a run of long rollouts does not come to own every slot.
        """
        if room <= 0:
            return
        clock = self._clock()
        runs = [
            (run.in_hand, place, run)
            for place, run in enumerate(self._state.open.values())
            if run.queues.has_waiting(clock)
        ]
        heapq.heapify(runs)
        while room > 0 and runs:
            _, place, run = runs[0]
            if self._grant_next(run, room_for):
                heapq.heapreplace(runs, (run.in_hand, place, run))
                room -= 1
            else:
                heapq.heappop(runs)

    def prune(self) -> bool:
        """End up to `END_BATCH` rollouts of runs that are cancelled or have enough: first those in
        hand, then those that will never start. Returns whether there are more.
        """
        room = END_BATCH
        for run in self._state.open.values():
            if run.queues.ending:
                room = self._rollouts.end_more(run, room)
                self._changes.urgent = True
            pool_end = run.pool_end(run.demand) if run.queues.pool else None
            while pool_end and run.queues.pool and room > 0 and len(run.groups) < UNDECIDED:
                group = self._load(run, run.queues.next_group())
                room -= group.n
                why = _NOBODY.format(run.config.limits.queue_s) if run.grants.expired else ""
                for rollout in group.rollouts:
                    if rollout.life.state is RolloutState.QUEUED:
                        self._rollouts.apply(rollout, pool_end, why)
                self._changes.urgent = True
            if room <= 0:
                return True
        return False

    def _load(self, run: RunRecord, group_id: int) -> GroupRecord:
        """Returns a group of the pool, which is in memory from now on. Where it is read from the
        log, groups behind it are read too.
        """
        if group_id not in run.groups:
            for loaded in load_groups(self._log, run, group_id, run.ahead, self._clock()):
                if loaded.group_id not in run.groups:
                    run.add(loaded)
        group = run.groups[group_id]
        self._changes.evict_when_idle(group)
        return group

    def _grant_next(self, run: RunRecord, room_for: RoomFor) -> bool:
        record = self._next_placeable(run, room_for)
        if record is None:
            return False
        backend = self._state.acquire(record, avoid=(record.failed_on,) if record.failed_on else ())
        if backend is None:
            run.queues.put_back([record])
            return False
        self._rollouts.assign(record, backend)
        run.grants.granted_at, run.grants.expired = self._clock(), False
        self._runs.start(run)
        self._rollouts.apply(record, Event(kind=EventKind.LEASE))
        self._changes.urgent = True
        return True

    def _next_placeable(self, run: RunRecord, room_for: RoomFor) -> RolloutRecord | None:
        """Returns the run's next rollout that a node can take. Rollouts that no node can take now
        are passed over, so that they hold up none behind them.
        """
        full: list[RolloutRecord] = []
        placeable = None
        while placeable is None and len(full) < PLACEMENT_SCAN:
            record = self._next(run)
            if record is None:
                break
            room = room_for(record)
            if room is None:
                self._rollouts.note_unplaced(record)
                run.queues.queue_again(record, self._clock(), LOOKS_AGAIN_S)
                continue
            self._rollouts.note_placeable(record)
            if room > 0:
                placeable = record
            else:
                full.append(record)
        run.queues.put_back(full)
        return placeable

    def _next(self, run: RunRecord) -> RolloutRecord | None:
        while not run.queues.ending:
            while (record := run.queues.next_member()) is not None:
                if record.life.state is RolloutState.QUEUED:
                    return record
            demand = run.demand if run.queues.pool else None
            if demand is None or run.pool_end(demand) or not may_open(demand):
                return None
            group = self._load(run, run.queues.next_group())
            if group.members.pending:
                self._rollouts.start_group(group)
                run.queues.add_members(group.rollouts)
        return None

    def expire(self, run: RunRecord, now: float, num_in_hand: int) -> None:
        """End rollouts that have waited for longer than `limits.queue_s`. Time counts while the run
        wants leases and gets none: not while its own backpressure or other runs hold it up, nor
        while its queue moves.

        `num_in_hand`: the rollouts in hand of all open runs.
        """
        budget_s = run.config.limits.queue_s
        for record in [*run.queues.ready, *(record for _, _, record in run.queues.delayed)]:
            since = record.unplaced_at
            queued = record.life.state is RolloutState.QUEUED
            if queued and since is not None and since <= now - budget_s:
                why = _NOWHERE.format(image_of(record.group), budget_s)
                self._rollouts.apply(record, Event(kind=EventKind.EXPIRE), why)
                self._changes.urgent = True
        may_start = run.queues.pool and may_open(run.demand)
        wants_no_lease = not (run.queues.ready or may_start)
        behind_others = num_in_hand > run.in_hand
        if wants_no_lease or behind_others:
            run.grants.granted_at = now
        if now - run.grants.granted_at <= budget_s:
            return
        run.grants.expired = (
            bool(run.queues.pool) and now - run.queues.pool.first_since() > budget_s
        )
        for record in [r for r in run.queues.ready if r.life.state is RolloutState.QUEUED]:
            if now - record.since > budget_s:
                self._rollouts.apply(record, Event(kind=EventKind.EXPIRE), _NOBODY.format(budget_s))
        self._changes.urgent = True
