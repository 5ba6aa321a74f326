"""Attempts that lost their backend in the middle wait here for another, with all that they have.

A failure is evidence first (`backend_watch.py`), then the attempt is assigned anew: not to the one
that failed it when there is another, not to one with older weights than it has seen. With no able
backend it waits; its attempt is neither charged nor ended. Attempts that wait are served before new
leases. Bounded by RUN's slots: one entry for an attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from prorl.control import Assigned, ControlRow, Failover, Payload, Problem
from prorl.service.core.backend_watch import BackendWatch
from prorl.service.core.changes import Base, CorePart
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.state import IN_HAND, RolloutRecord, WorkerRecord
from prorl.types import AttemptKey

Reply = Callable[[WorkerRecord, ControlRow, Payload, str], None]


class Reassignments(CorePart):
    def __init__(self, base: Base, watched: BackendWatch, rollouts: Rollouts, reply: Reply) -> None:
        super().__init__(base)
        self._watched, self._rollouts, self._reply = watched, rollouts, reply
        self._waiting: dict[AttemptKey, tuple[WorkerRecord, ControlRow, Failover]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ask(self, worker: WorkerRecord, row: ControlRow) -> None:
        failover = row.read(Failover)
        record = self._current(failover.attempt)
        if record is None:
            self._reply(worker, row, Problem(message="the attempt has ended"), "fenced")
            return
        if record.backend == failover.backend:
            self._watched.reported(
                failover.backend,
                failover.trouble,
                failover.faults,
                failover.calls,
                failover.message,
            )
            self._state.balancer.release(record)
        self._waiting[failover.attempt] = (worker, row, failover)
        self.serve()

    def serve(self) -> None:
        in_vain: set[tuple[str, tuple[str, ...], int]] = set()
        for key, (worker, row, failover) in list(self._waiting.items()):
            record = self._current(key)
            if record is None or self._state.workers.get(worker.name) is not worker:
                del self._waiting[key]  # a worker that came back asks again
                continue
            need = (key.run_id, record.run.config.backends, failover.min_version)
            if need in in_vain:
                continue
            name = self._assign(record, failover)
            if name is None:
                if not self._state.able(record.run, failover.min_version):
                    in_vain.add(need)
                continue
            del self._waiting[key]
            self._reply(worker, row, Assigned(backend=name), "")

    def _assign(self, record: RolloutRecord, failover: Failover) -> str | None:
        name = self._state.acquire(
            record, avoid=(failover.backend,), min_version=failover.min_version
        )
        if name is not None:
            self._rollouts.assign(record, name)
        return name

    def _current(self, key: AttemptKey) -> RolloutRecord | None:
        record = self._rollouts.find(key.run_id, key.rollout_id)
        if record is None or record.life.attempt != key.attempt or record.life.state not in IN_HAND:
            return None
        return record
