"""Slots of RUN for runs that would wait too long: attempts of others stand still meanwhile.

    less than due for `after_s` -> attempts of the run furthest over its share -> `suspend` to RUN
    a slot is due, or free      -> those that have stood longest go on

Invariants: the attempt stays what and where it is, RUNNING and in RUN's hands, with its sandbox, so
that nothing is charged, sampled or run twice; between two stands of an attempt there is a turn and
`after_s`; only an attempt with a journal stands still, and never one that EVAL or the store has.
Nothing of this is in the log: after a restart RUN says who stands still. Bounded: at most
`STILL_PER_SLOT` attempts for each slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prorl.control import ControlRow, Suspend
from prorl.limits import Clock
from prorl.service.fairness import Candidate, RunLoad, due, fair_slots, short, to_wake, victims
from prorl.service.journal import Journal
from prorl.service.sampler import may_open
from prorl.service.standing import Stand, Suspension
from prorl.service.state import RolloutRecord, RunRecord, State, WorkerRecord
from prorl.service.tenants import TenantLoad
from prorl.types import AttemptKey, RolloutState

STILL_PER_SLOT = 2
"""Those that had slots, and those that INIT had ready for them."""

PATIENCE_S = 10.0
"""An attempt whose present turn lasts longer has its slot still: another one is asked, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What RUN does at this moment."""

    slots: int
    loads: tuple[RunLoad, ...]
    candidates: tuple[Candidate, ...]


class Preemption:
    """Decides at each `look`."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        load: Callable[[], TenantLoad],
        placeable: Callable[[RolloutRecord], bool],
        clock: Clock,
        after_s: float,
    ) -> None:
        self._state, self._journal, self._load, self._clock = state, journal, load, clock
        self._placeable, self._after_s = placeable, after_s
        self._short_since: dict[str, float] = {}
        self.starving: frozenset[str] = frozenset()
        """Runs that have had less than they are due for too long."""
        self._dues: dict[str, int] = {}
        """Slots that they are due."""

    @property
    def room(self) -> int:
        """Leases that they should have now, however many others wait to be sent."""
        runs = [(self._state.open.get(name), wanted) for name, wanted in self._dues.items()]
        return sum(max(0, wanted - run.at_work) for run, wanted in runs if run is not None)

    # ---- time

    def look(self) -> None:
        """Wake those that may go on, and let others give way to runs that starve."""
        if not self._after_s and not any(run.suspended for run in self._state.open.values()):
            return
        seen, now = self._seen(), self._clock()
        self._wake_all(to_wake(seen.slots, seen.loads))
        self._note_short(short(seen.slots, seen.loads), now)
        self._dues = self._due(seen)
        keys = victims(seen.slots, seen.loads, self.starving, seen.candidates)
        still = sum(len(run.suspended) for run in self._state.open.values())
        for key in keys[: max(0, STILL_PER_SLOT * seen.slots - still)]:
            record = self._state.open[key.run_id].rollouts[key.rollout_id]
            record.run.suspended[record] = Suspension(Stand.ASKED, now)
            record.run.num_preempted += 1
            self._tell(record, True)

    def _note_short(self, missing: dict[str, int], now: float) -> None:
        self._short_since = {run_id: self._short_since.get(run_id, now) for run_id in missing}
        due_s = self._after_s or float("inf")
        waited = self._short_since.items()
        self.starving = frozenset(run_id for run_id, since in waited if now - since >= due_s)

    def _due(self, seen: _Seen) -> dict[str, int]:
        shares = fair_slots(seen.slots, seen.loads)
        starving = (load for load in seen.loads if load.run_id in self.starving)
        return {load.run_id: due(shares[load.run_id], load) for load in starving}

    def _wake_all(self, counts: Counter[str]) -> None:
        """So many of each run, and all whose worker leaves."""
        for run in self._state.open.values():
            asleep = [r for r, one in run.suspended.items() if one.stand is not Stand.WAKING]
            leaving = [r for r in asleep if any(w.leaving for w in r.holders)]
            for record in dict.fromkeys(asleep[: counts[run.run_id]] + leaving):
                self._wake(record)

    def _wake(self, record: RolloutRecord) -> None:
        self._tell(record, False)
        if record.run.suspended[record].stand is Stand.STILL:
            record.run.suspended[record] = Suspension(Stand.WAKING, self._clock())
        else:  # it may never have stood still
            self._awake(record)

    def _awake(self, record: RolloutRecord) -> None:
        record.run.suspended.pop(record, None)
        record.woken_at = self._clock()

    def _tell(self, record: RolloutRecord, suspended: bool) -> None:
        for worker in record.holders:
            if worker.role == "run":
                row = ControlRow.of(Suspend(suspended=suspended), **record.key._asdict())
                self._journal.send(worker, row)
        self._journal.urgent = True

    # ---- what RUN says

    def heard(self, worker: WorkerRecord, record: RolloutRecord, suspended: bool) -> None:
        """An attempt stands still, or goes on."""
        if worker not in record.holders or record.life.state is not RolloutState.RUNNING:
            return
        if not suspended:
            self._awake(record)
            return
        before = record.run.suspended.get(record)
        waking = before is None or before.stand is Stand.WAKING
        stand = Stand.WAKING if waking else Stand.STILL
        record.run.suspended[record] = Suspension(stand, self._clock())

    def came(self, worker: WorkerRecord, suspended: Iterable[AttemptKey]) -> None:
        """A RUN worker has come, or come back: its word about who stands still holds.

        Its next life is asked again.
        """
        still, now = set(suspended), self._clock()
        for record in worker.held:
            before = record.run.suspended.get(record)
            if record.key in still:
                record.run.suspended[record] = Suspension(Stand.STILL, now)
            elif before is not None and before.stand is not Stand.WAKING:
                record.run.suspended[record] = Suspension(Stand.ASKED, now)
                self._tell(record, True)
            elif before is not None:
                self._awake(record)

    # ---- what there is

    def _seen(self) -> _Seen:
        workers = self._state.of_role("run")
        staying = [worker for worker in workers if not worker.leaving]
        running = [r for worker in workers for r in worker.held if self._has_slot(r)]
        counts = Counter(record.run.run_id for record in running)
        load = self._load()
        loads = (self._loaded(run, counts[run.run_id], load) for run in self._state.open.values())
        return _Seen(
            slots=sum(worker.slots for worker in staying),
            loads=tuple(one for one in loads if one.wanted),
            candidates=tuple(
                Candidate(r.run.run_id, r.woken_at or r.entered or r.since, r.key)
                for r in running
                if self._may_stand(r)
            ),
        )

    def _has_slot(self, record: RolloutRecord) -> bool:
        if record.life.state is not RolloutState.RUNNING:
            return False
        if any(worker.role == "eval" for worker in record.holders):
            return False
        found = record.run.suspended.get(record)
        late = found is not None and self._clock() - found.since > PATIENCE_S
        return found is None or (late and found.stand is Stand.ASKED)

    def _may_stand(self, record: RolloutRecord) -> bool:
        run = record.run
        if record in run.suspended or run.config.journal != "node" or run.ending:
            return False
        rested = not record.woken_at or self._clock() - record.woken_at >= self._after_s
        return rested and any(w.resumes and not w.leaving for w in record.holders)

    def _loaded(self, run: RunRecord, running: int, load: TenantLoad) -> RunLoad:
        stands = [one.stand for one in run.suspended.values()]
        waking = stands.count(Stand.WAKING)
        wanted = running + len(stands) + self._waiting(run, load)
        bound = load.quota(run).rollouts_in_hand
        return RunLoad(
            run_id=run.run_id,
            tenant=run.config.tenant,
            weight=run.config.weight,
            tenant_weight=load.quota(run).weight,
            running=running,
            wanted=min(wanted, bound) if bound else wanted,
            suspended=len(stands) - waking,
            waking=waking,
        )

    def _waiting(self, run: RunRecord, load: TenantLoad) -> int:
        """Rollouts that would have a slot if there were one."""
        leased = run.rollout_states[RolloutState.LEASED]
        if run.ending or not self._state.able(run) or not self._state.of_role("init"):
            return leased
        ready = len(run.ready) if run.ready and self._placeable(run.ready[0]) else 0
        opens = bool(run.pool) and load.may_open(run) and not run.doomed(run.demand)
        pool = min(len(run.pool), may_open(run.demand)) * run.group_size if opens else 0
        return leased + ready + pool
