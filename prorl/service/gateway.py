"""The gateway's process: one loop that owns the core and everything around it.

That is the log's one writer, the control streams, the lease edge.

    control rows, HTTP requests, time -> Core -> Journal -> one transaction -> what waited for it:
    replies, cancels, leases, acks

One transaction is in flight at a time; whatever happens meanwhile shares the next one. Urgent
changes start it at once; progress alone waits up to `LAZY_S`. When the log cannot be written the
process ends: it starts again from what is durable.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prorl.backends.catalogue import is_server
from prorl.config import ServiceConfig
from prorl.control import (
    Ack,
    BackendsTold,
    ControlRow,
    Kind,
    Paused,
    Problem,
    Silent,
    Stuck,
    Welcome,
    from_batch,
    to_batch,
)
from prorl.errors import FencedError, StorageError, UserError
from prorl.flight import handover
from prorl.limits import Clock, steady
from prorl.linux.disk import disk_full
from prorl.protocols import Channel, Network
from prorl.schema import CONTROL
from prorl.service.core import Core
from prorl.service.journal import LogBatch
from prorl.service.leases import Leases
from prorl.service.log import ControlLog
from prorl.service.probes import Probes
from prorl.service.publish import Publisher
from prorl.service.servers import Servers
from prorl.service.snapshot import run_snapshot, wanted
from prorl.service.state import REMOTE_GRACE_S, UPSTREAM, RunRecord, WorkerRecord
from prorl.service.versions import keep_version
from prorl.service.watchdog import ProgressWatchdog
from prorl.service.workers import CLAIM_GRACE_S
from prorl.storage.layout import RunDir

LAZY_S = 0.1
"""How long changes that nobody waits for may wait for company in a transaction."""

SWEEP_TICKS = 3
"""`sweep` runs each so many lazy ticks."""

WATCH_TICKS = 10

log = logging.getLogger("prorl.service")

_REQUESTS = frozenset(
    {
        Kind.RESERVE,
        Kind.COMMIT,
        Kind.PUBLISHED,
        Kind.PROPOSE,
        Kind.HANDOUT,
        Kind.CURSOR,
        Kind.FAILOVER,
    }
)
_SUPERSEDED = Welcome(worker="", endpoints={}, superseded=True)
"""What an earlier life of a worker hears."""

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)


class Gateway:
    """Serves one root. `run()` works until it is cancelled."""

    def __init__(
        self,
        config: ServiceConfig,
        control_log: ControlLog,
        network: Network,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.config = config
        wall = steady(wall, clock)
        self.core = Core(
            control_log,
            config.backends,
            clock,
            wall,
            max_queued=config.max_queued_rollouts,
            quotas=config.tenants,
            claim_grace_s=REMOTE_GRACE_S if config.journal_sync else CLAIM_GRACE_S,
            preempt_after_s=config.preempt_after_s,
        )
        self._watchdog = ProgressWatchdog(self.core.state, clock)
        self._log, self._network, self.wall = control_log, network, wall
        self.handovers = handover.Handovers(config.root / "handover")
        self.handovers.open()
        self.leases = Leases(
            self.core.state,
            self.core.rollouts,
            clock,
            wall,
            self.wake,
            config.tokenizer,
            self.handovers,
        )
        self.core.grants.placeable = self.leases.placeable
        self.leases.starving = lambda: self.core.preemption.starving
        self.servers = Servers(config, lambda name: name in self.core.state.balancer.states)
        self.publisher = Publisher(
            self.core,
            self.durable,
            self._tell_paused,
            self.servers.key_of,
            model=config.model,
            record=lambda record: keep_version(
                RunDir(config.run_directory(record.run_id)), record, wall()
            ),
        )
        self.core.watched.on_change = self.backends_changed
        self._channels: dict[WorkerRecord, Channel] = {}
        self._live_store: WorkerRecord | None = None
        """The store that has its snapshots and gets messages."""
        self._sessions = 0
        self._acks: dict[WorkerRecord, int] = {}
        self._dirty = asyncio.Event()
        self._lazy_due = False
        self._waiters: list[asyncio.Future[None]] = []
        self._closing: set[asyncio.Future[None]] = set()

    async def listen(self) -> str:
        """Serve the lease edge and control streams. Returns the location."""
        path, route = self.leases.route
        routes = {path: route, "control": (self._control, CONTROL, CONTROL)}
        routes[handover.PATH] = self.handovers.route
        if self.config.listener is not None:
            await self._network.listen(self.config.listener.bound(1), routes)
        return await self._network.listen(self.config.gateway_flight, routes)

    async def run(self) -> None:
        """Carry the journal out, watch the time.

        Raises StorageError when the log cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commit_forever(), name="commit")
                group.create_task(self._tick_forever(), name="tick")
                probes = Probes(
                    self.core.watched, self.servers.try_call, is_loading=self.publisher.is_loading
                )
                group.create_task(probes.watch(), name="probe backends")
                group.create_task(self.publisher.watch(), name="watch weights")
        finally:
            await self.publisher.close()

    def wake(self) -> None:
        """Something may have to be written or said now."""
        self._dirty.set()

    async def durable(self) -> None:
        """Wait until everything that has happened so far is on disk. Raises StorageError."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.wake()
        await waiter

    # ---- the journal

    async def _commit_forever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self.core.pump(self.leases.room)
            if self.core.grants.prune():
                self.wake()  # the rest after this transaction
            if (
                self.core.journal.urgent
                or self._waiters
                or (self._lazy_due and not self.core.journal.empty)
            ):
                await self._commit()

    async def _commit(self) -> None:
        self._lazy_due = False
        batch = self.core.journal.take()
        waiters, self._waiters = self._waiters, []
        try:
            if batch.writes:
                await self._log.write(batch.writes)
        except StorageError as error:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
            raise
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        await self._dispatch(batch)

    async def _dispatch(self, batch: LogBatch) -> None:
        """Everything that waited for this transaction."""
        self.core.durable(batch)
        self._acks |= batch.acks
        if batch.to_store and self._live_store:
            batch.outbox.setdefault(self._live_store, []).extend(batch.to_store)
        for worker, rows in batch.outbox.items():
            if worker not in batch.snapshots:
                self._send(worker, rows)
        self.leases.add(batch.granted)
        for worker in batch.snapshots:
            # A store that asks in the same breath as it comes must know every run before it hears
            # the answer: else it takes an open run for a finished one.
            rows = batch.outbox.get(worker, [])
            first = sum(row.kind is Kind.WELCOME for row in rows[:1])
            self._send(worker, rows[:first])
            await self._introduce(worker)
            self._send(worker, rows[first:])

    async def _introduce(self, store: WorkerRecord) -> None:
        """Tell a store that has come what the log holds; from here on it gets messages.

        Long histories take long to read: the loop serves others meanwhile. Nothing becomes durable
        until it is done, so that what is read is the log of one moment.
        """
        for run in list(self.core.state.runs.values()):
            if not self.core.workers.current(store):
                return
            if wanted(run):
                rows = await asyncio.to_thread(run_snapshot, self._log, run, self.wall())
                self._send(store, rows)
        if not self.core.workers.current(store):
            return
        self._live_store = store
        for run in self.core.state.open.values():
            self._tell_stuck(run)

    def _send(self, worker: WorkerRecord, rows: list[ControlRow]) -> None:
        channel = self._channels.get(worker)
        if channel is not None and rows:
            channel.send(to_batch(rows))

    def backends_changed(self) -> None:
        """Tell RUN who is gone and who may have the key; who waits for a backend looks again."""
        for worker in self.core.state.of_role("run"):
            self._send(worker, [self._backends_told()])
        self.wake()

    def _backends_told(self) -> ControlRow:
        pool = [name for name in self.core.state.balancer.states if is_server(name)]
        told = BackendsTold(gone=tuple(self.core.watched.gone()), keyed=tuple(sorted(pool)))
        return ControlRow.of(told)

    def _tell_paused(self, backend: str, paused: bool) -> None:
        for worker in self.core.state.of_role("run"):
            self._send(worker, [ControlRow.of(Paused(backend=backend, paused=paused))])

    # ---- control streams

    async def _control(self, channel: Channel) -> None:
        worker: WorkerRecord | None = None
        try:
            while (batch := await channel.receive()) is not None:
                for row in from_batch(batch):
                    if worker is None:
                        worker = self._hello(channel, row)
                        if worker is None:
                            return
                    elif not self.core.workers.current(worker):
                        return  # it was replaced, or counts as dead: it can change nothing
                    else:
                        self._hear(worker, row)
                self.wake()
        finally:
            if worker is not None:
                self._gone(worker)

    def _hello(self, channel: Channel, row: ControlRow) -> WorkerRecord | None:
        """The session that begins; None for an earlier life of a worker, which is told so."""
        if row.kind is not Kind.HELLO:
            raise UserError(f"a control stream began with {row.kind.value!r}", "hello")
        self._sessions += 1
        try:
            worker = self.core.workers.hello(self._sessions, row)
        except FencedError as error:
            log.warning("%s", error)
            channel.send(to_batch([ControlRow.of(_SUPERSEDED, re=row.seq)]))
            return None
        for earlier in [w for w in self._channels if w.name == worker.name]:
            self._cut(earlier)
        self._channels[worker] = channel
        if worker.role == "store":
            self._live_store = None
        if worker.role == "run":
            self._send(worker, [self._backends_told()])
        about = {"role": worker.role, "worker_pid": worker.pid}
        log.info("worker %s came", worker.name, extra=about)
        return worker

    def _hear(self, worker: WorkerRecord, row: ControlRow) -> None:
        try:
            self.core.control(worker, row)
        except _MALFORMED as error:
            log.warning(
                "worker %s: a %s row makes no sense: %r", worker.name, row.kind.value, error
            )
            if row.kind in _REQUESTS:
                problem = Problem(message=str(error))
                answer = ControlRow.of(problem, re=row.seq, run_id=row.run_id, code="invalid")
                self._send(worker, [answer])

    def _cut(self, worker: WorkerRecord) -> None:
        """It counts as dead from now on, whatever its stream still brings."""
        channel = self._channels[worker]
        self._gone(worker)
        closing = asyncio.ensure_future(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _gone(self, worker: WorkerRecord) -> None:
        if self._channels.pop(worker, None) is not None:
            if self._live_store is worker:
                self._live_store = None
            log.info("worker %s has gone", worker.name, extra={"held": len(worker.held)})
        self.core.workers.gone(worker)
        self.wake()

    # ---- time

    async def _tick_forever(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(LAZY_S)
            tick += 1
            if tick % SWEEP_TICKS == 0:
                self._sweep()
            if tick % WATCH_TICKS == 0:
                self._watch()
            self._ack()
            self._lazy_due = True
            self.wake()

    def _ack(self) -> None:
        """Tell workers which of their events are durable.

        Nobody waits for it, so it need not travel often.
        """
        acks, self._acks = self._acks, {}
        for worker, seq in acks.items():
            if self.core.workers.current(worker):
                self._send(worker, [ControlRow.of(Ack(), re=seq)])

    def _sweep(self) -> None:
        for worker in self.core.workers.silent():
            log.warning("worker %s is silent; it counts as dead", worker.name)
            self._cut(worker)
        for worker in self.core.workers.hushed(SWEEP_TICKS * LAZY_S):
            self._pass_by(worker)
        for record in self.leases.overdue():
            self.core.rollouts.failed(
                record, record.life.attempt, "queue_deadline", "no worker took its lease in time"
            )
        self.handovers.prune(self.core.rollouts.may_go_on)
        self.leases.prune()
        self.core.sweep()

    def _pass_by(self, worker: WorkerRecord) -> None:
        """Whoever supplies it gives what it has not taken to others of its role."""
        if len(self.core.state.of_role(worker.role)) == 1:
            return
        log.info("worker %s is silent: its work goes to others", worker.name)
        if worker.role == "init":
            self.leases.cut(worker)
        silent = ControlRow.of(Silent(worker=worker.name, incarnation=worker.incarnation))
        for supplier in self.core.state.of_role(UPSTREAM.get(worker.role, "")):
            self._send(supplier, [silent])

    def _watch(self) -> None:
        for run in self._watchdog.look(disk_full(self.config.root)):
            log.warning("run %s %s", run.run_id, f"is stuck: {run.stuck}" if run.stuck else "moves")
            self._tell_stuck(run)

    def _tell_stuck(self, run: RunRecord) -> None:
        """Trainers hear it from the store, instead of rows."""
        if self._live_store is not None and run.config.delivery == "stream":
            row = ControlRow.of(Stuck(reason=run.stuck), run_id=run.run_id)
            self._send(self._live_store, [row])
