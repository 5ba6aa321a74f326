"""Serves `edge/lease`: durable leases, sent the moment that an INIT worker has credit for them.

Leases are granted in bulk ahead of credit and wait here, already on disk, so that a free INIT slot costs no fsync. Nothing is sent
twice: what was sent on a stream that broke is given up by `Workers.lease_stream_lost`.

Invariants: never more rows or bytes than credit (one row that is larger than a consumer's whole window goes alone); a lease that was
superseded or cancelled while it waited is not sent. Bounded by `room`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import orjson
import pyarrow as pa

from prorl.limits import Clock
from prorl.protocols import Channel
from prorl.schema import LEASED, MAX_BATCH_BYTES
from prorl.service.rollouts import Rollouts
from prorl.service.state import RolloutRecord, RunRecord, State
from prorl.service.workers import Workers
from prorl.types import Json, RolloutState

MIN_AHEAD, MAX_AHEAD = 8, 256
"""Leases granted ahead of credit."""

ROW_BYTES = 1024
"""Of a lease besides its task and extra columns."""


def _size(record: RolloutRecord) -> int:
    return ROW_BYTES + len(record.group.task) + len(record.group.extra)


class _Consumer:
    """One INIT worker's stream and its credit."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.worker = str(channel.peer.get("worker", ""))
        self.rows = self.bytes = 0
        self.window_rows = self.window_bytes = 0

    def add(self, rows: int, size: int) -> None:
        """More credit."""
        self.rows += rows
        self.bytes += size
        self.window_rows = max(self.window_rows, self.rows)
        self.window_bytes = max(self.window_bytes, self.bytes)

    def takes(self, size: int) -> bool:
        """Whether there is credit for a row of that size."""
        return self.rows > 0 and (size <= self.bytes or (size > self.window_bytes and self.bytes == self.window_bytes))


class Leases:
    """The lease edge's serving side."""

    def __init__(self, state: State, rollouts: Rollouts, workers: Workers, clock: Clock, wall: Clock, wake: Callable[[], None]) -> None:
        self._state, self._rollouts, self._workers, self._clock, self._wall = state, rollouts, workers, clock, wall
        self._wake = wake
        self._consumers: list[_Consumer] = []
        self._granted: deque[RolloutRecord] = deque()
        self._limits: dict[RunRecord, dict[str, Json]] = {}

    async def accept(self, channel: Channel) -> None:
        """Serve one consumer for the life of its stream."""
        consumer = _Consumer(channel)
        self._consumers.append(consumer)
        try:
            while (batch := await channel.receive()) is not None:
                for kind, rows, size in zip(*(batch.column(name).to_pylist() for name in ("kind", "rows", "bytes")), strict=True):
                    if kind == "credit":
                        consumer.add(rows, size)
                self.send()
                self._wake()
        finally:
            self._consumers.remove(consumer)
            self._workers.lease_stream_lost(consumer.worker)
            self._wake()

    @property
    def room(self) -> int:
        """How many more leases should be granted now; 0 while at least half of what we want ahead is there."""
        windows = sum(c.window_rows for c in self._consumers if c.worker in self._state.workers)
        if not windows:
            return 0
        ahead = min(MAX_AHEAD, max(MIN_AHEAD, windows))
        missing = ahead + sum(c.rows for c in self._consumers) - len(self._granted)
        return missing if 2 * missing >= ahead else 0

    @property
    def waiting(self) -> int:
        """Leases that are granted and not sent."""
        return len(self._granted)

    def add(self, granted: list[RolloutRecord]) -> None:
        """These are durable."""
        self._granted.extend(granted)
        self.send()

    def send(self) -> None:
        """Send what credit allows."""
        while self._granted and (ready := [c for c in self._consumers if c.rows > 0 and c.worker in self._state.workers]):
            sent = [self._fill(consumer) for consumer in ready]
            if not any(sent):
                return

    def _fill(self, consumer: _Consumer) -> int:
        """Send one batch to a consumer: its share of what waits."""
        worker = self._state.workers[consumer.worker]
        share = -(-len(self._granted) // max(1, len(self._consumers)))
        batch: list[RolloutRecord] = []
        total = 0
        while self._granted and len(batch) < share:
            record = self._granted[0]
            if record.life.state is not RolloutState.LEASED or record.holders:
                self._granted.popleft()
                continue
            size = _size(record)
            if not consumer.takes(size) or (batch and total + size > MAX_BATCH_BYTES):
                break
            self._granted.popleft()
            consumer.rows -= 1
            consumer.bytes -= min(size, consumer.bytes)
            total += size
            self._rollouts.hold(record, worker)
            batch.append(record)
        if batch:
            consumer.channel.send(self._batch(batch))
        return len(batch)

    def overdue(self, now: float) -> list[RolloutRecord]:
        """Leases that have waited here for longer than the run lets a rollout wait."""
        return [r for r in self._granted if r.life.state is RolloutState.LEASED and now - r.since > r.run.config.limits.queue_s]

    def _batch(self, records: list[RolloutRecord]) -> pa.RecordBatch:
        wall, eval_node = self._wall(), self._state.eval_node()
        columns: dict[str, list[Json]] = {name: [] for name in LEASED.names}
        for record in records:
            for name, value in self._row(record, wall, eval_node).items():
                columns[name].append(value)
        return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in LEASED], schema=LEASED)

    def _row(self, record: RolloutRecord, wall: float, eval_node: str) -> dict[str, Json]:
        group, run = record.group, record.group.run
        limits = self._limits.get(run)
        if limits is None:
            limits = self._limits[run] = asdict(run.config.limits.limits())
        left = max(1.0, limits["queue_s"] - (self._clock() - record.since))
        config = run.config
        return {
            "run_id": run.run_id,
            "rollout_id": record.rollout_id,
            "group_id": group.group_id,
            "sample_index": record.sample_index,
            "rollout_key": record.rollout_key,
            "attempt": record.life.attempt,
            "task_id": group.task_id,
            "data_source": group.data_source,
            "task": group.task,
            "env": group.env,
            "agent": config.agent,
            "sampling": orjson.loads(group.sampling),
            "limits": {**limits, "queue_s": left},
            "backend": record.backend,
            "min_version": max(0, run.version - config.max_staleness) if config.max_staleness >= 0 else 0,
            "eval_node": eval_node,
            "run_seed": config.seed,
            "queue_s": max(0.0, wall - group.accepted_at),
            "extra": group.extra,
        }
