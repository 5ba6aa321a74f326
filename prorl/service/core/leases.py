"""Serves `edge/lease`: durable leases, sent the moment that an INIT worker has credit for them.

Leases are granted in bulk ahead of credit and wait here, already on disk, so that a free INIT slot
costs no fsync. Who got which becomes its first holder; what a lost stream never acked is given up
after a moment unless its worker says that it has it.

Invariants: never more than credit (`Outlet`); a lease that was superseded or cancelled while it
waited here is not sent, one that overtook its cancellation is cancelled at its worker. Bounded by
`room`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import orjson
import pyarrow as pa

from prorl.flight.outlet import Outlet
from prorl.graph import GRAPH
from prorl.protocols import Accept, Channel
from prorl.schema import EDGE_BACK, LEASED
from prorl.service.core.changes import Base, CorePart
from prorl.service.core.images import guest_of, has_image, image_of, waiting_for_guests
from prorl.service.core.lifecycle import EventKind
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.state import RolloutRecord, RunRecord
from prorl.timing import CLAIM_GRACE_S
from prorl.types import AttemptKey, Json, RolloutState
from prorl.waits import wait_limit_s

MIN_AHEAD, MAX_AHEAD = 8, 256

GUESTS_AHEAD = 64
"""Rollouts of a run that may be on their way to its guests, or wait for them: what one guest may
lease at a time. Fewer would have it wait for INIT; more are rows in RUN's memory for nobody.
"""
SEEN_S = wait_limit_s("worker.queued")


_STRUCT = pa.struct(list(LEASED))


class Leases(CorePart):
    def __init__(
        self, base: Base, rollouts: Rollouts, wake: Callable[[], None], tokenizer: str
    ) -> None:
        super().__init__(base)
        self._rollouts, self._wake, self._tokenizer = rollouts, wake, tokenizer
        self._granted: deque[tuple[RolloutRecord, int]] = deque()
        self._for_guests: deque[tuple[float, str]] = deque()
        """The time when each lease for a guest was granted, and its run. `_guests_lack_work`
        removes those older than SEEN_S before it lets one more be granted, so each open run has at
        most GUESTS_AHEAD here.
        """
        self._terms: dict[RunRecord, tuple[str, dict[str, Json]]] = {}
        """The terms by run that is open; those of runs that ended go when another comes."""
        self._streams = 0
        self._window = 0
        self._outlet = Outlet(
            "lease",
            on_credit=self._credit,
            on_sent=self._sent,
            on_lost=self._lost,
            has=self._has,
        )

    @property
    def route(self) -> tuple[str, tuple[Accept, pa.Schema, pa.Schema]]:
        return self._outlet.path, (self._serve, EDGE_BACK, LEASED)

    @property
    def room(self) -> int:
        """Tells how many more leases should be granted now. 0 while at least half of what we want
        ahead is there.
        """
        if not self._streams or not self._window:
            return 0
        ahead = min(MAX_AHEAD, max(MIN_AHEAD, self._window))
        missing = ahead + self._outlet.free_rows - len(self._granted)
        return missing if 2 * missing >= ahead else 0

    @property
    def waiting(self) -> int:
        return len(self._granted)

    def add(self, granted: list[tuple[RolloutRecord, int]]) -> None:
        """Send granted leases whose transaction is durable, as far as there is credit. The rest is
        kept.
        """
        self._granted.extend(granted)
        for record, _ in granted:
            if guest_of(record.group):
                self._for_guests.append((self._clock(), record.run.run_id))
        self.send()

    def overdue(self) -> list[RolloutRecord]:
        now = self._clock()
        return [
            r
            for r, attempt in self._granted
            if _current(r, attempt) and now - r.since > r.run.config.limits.queue_s
        ]

    async def _serve(self, channel: Channel) -> None:
        self._streams += 1
        try:
            await self._outlet.serve(channel)
        finally:
            self._streams -= 1
            for run_id, rollout_id, attempt in self._outlet.unplaceable():
                record = self._rollouts.find(run_id, rollout_id)
                if record is not None and _current(record, attempt):
                    self._rollouts.lost(record, EventKind.RETURN)
            self._wake()

    def _has(self, peer: Mapping[str, Json], image: str) -> bool:
        worker = self._state.workers.get(str(peer.get("worker", "")))
        if worker is not None and worker.status.lease_block_reason:
            return False
        return not image or has_image(self._state, worker, image)

    def room_for(self, record: RolloutRecord) -> int | None:
        """Returns how many leases would soon find room at a node that has the rollout's image. None
        where no node has it.
        """
        if guest_of(record.group) and not self._guests_lack_work(record.run):
            return 0
        image = image_of(record.group)
        if not image:
            return 1
        free = self._outlet.free_for(image)
        if free is None:
            return None
        ahead = sum(image_of(r.group) == image for r, _ in self._granted)
        return max(free, MIN_AHEAD) - ahead

    def _guests_lack_work(self, run: RunRecord) -> bool:
        """Returns whether fewer rollouts of a run than GUESTS_AHEAD wait for its guests, or soon
        will.
        """
        while self._for_guests and self._for_guests[0][0] < self._clock() - SEEN_S:
            self._for_guests.popleft()
        ahead = max(
            run.progress.states[RolloutState.LEASED],
            sum(run_id == run.run_id for _, run_id in self._for_guests),
        )
        return ahead + sum(waiting_for_guests(self._state, run.run_id).values()) < GUESTS_AHEAD

    def _credit(self, free_rows: int) -> None:
        self._window = max(self._window, free_rows)
        self.send()
        self._wake()

    def send(self) -> None:
        free = self._outlet.free_rows
        ready: list[RolloutRecord] = []
        waiting: list[tuple[RolloutRecord, int]] = []
        while self._granted and len(ready) < free:
            record, attempt = self._granted.popleft()
            if not _current(record, attempt):
                continue
            image = image_of(record.group)
            room = self._outlet.free_for(image) if image else 1
            if room is None:
                self._rollouts.lost(record, EventKind.RETURN)
            elif room > sum(image_of(r.group) == image for r in ready) or not image:
                ready.append(record)
            else:
                waiting.append((record, attempt))
        self._granted.extendleft(reversed(waiting))
        if ready:
            needs = [image_of(record.group) for record in ready]
            self._outlet.send(self._batch(ready), needs)

    def _sent(self, keys: list[AttemptKey], hello: Mapping[str, Json]) -> None:
        worker = self._state.workers.get(str(hello.get("worker", "")))
        if worker is not None and worker.incarnation != hello.get("incarnation", ""):
            worker = None  # another incarnation of that name has this stream
        for run_id, rollout_id, attempt in keys:
            record = self._rollouts.find(run_id, rollout_id)
            current = record is not None and _current(record, attempt)
            if worker is None:
                if record is not None and current:
                    self._rollouts.await_claim(record, CLAIM_GRACE_S, EventKind.RETURN)
            elif record is not None and current:
                self._rollouts.add_holder(record, worker, GRAPH.names[0])
            else:
                self._rollouts.stop(worker, AttemptKey(run_id, rollout_id, attempt))

    def _lost(self, keys: Iterable[AttemptKey]) -> None:
        for run_id, rollout_id, attempt in keys:
            record = self._rollouts.find(run_id, rollout_id)
            if record is not None and _current(record, attempt) and not record.lease_confirmed:
                grace_s = max((worker.grace_s for worker in record.holders), default=0.0)
                ours = any(not worker.remote for worker in record.holders)
                end = EventKind.LOST if ours else EventKind.RETURN
                self._rollouts.await_claim(record, max(CLAIM_GRACE_S, grace_s), end)

    def _batch(self, records: list[RolloutRecord]) -> pa.RecordBatch:
        wall, now = self._wall(), self._clock()
        rows = [self._row(record, wall, now) for record in records]
        return pa.RecordBatch.from_arrays(pa.array(rows, _STRUCT).flatten(), schema=LEASED)

    def _terms_of(self, run: RunRecord) -> tuple[str, dict[str, Json]]:
        """Returns what each lease of the run says: its renderer's spec and its limits."""
        if run not in self._terms:
            self._terms = {r: terms for r, terms in self._terms.items() if r.life.state == "open"}
            spec = run.config.renderer.settled(self._tokenizer, run.created_at)
            self._terms[run] = spec.to_json(), asdict(run.config.limits.limits())
        return self._terms[run]

    def _row(self, record: RolloutRecord, wall: float, now: float) -> tuple[Json, ...]:
        group = record.group
        run, config = group.run, group.run.config
        renderer, limits = self._terms_of(run)
        # Weights older than this would make the group stale at its hand-out.
        oldest = run.weights.version - config.max_staleness if config.max_staleness >= 0 else 0
        return (
            run.run_id,
            record.rollout_id,
            group.group_id,
            record.sample_index,
            record.rollout_key,
            record.life.attempt,
            group.task_id,
            group.data_source,
            group.task,
            group.env,
            config.agent,
            renderer,
            orjson.loads(group.sampling),
            {**limits, "queue_s": max(1.0, limits["queue_s"] - (now - record.since))},
            record.backend,
            max(0, oldest),
            config.seed,
            max(0.0, wall - group.accepted_at),
            group.extra,
            config.on_lost_tool_call if config.journal == "node" else "",
            config.routed_experts,
            list(config.train),
        )


def _current(record: RolloutRecord, attempt: int) -> bool:
    return record.life.state is RolloutState.LEASED and record.life.attempt == attempt
