"""The gateway: one loop that owns the core, the log's one writer, control streams, the lease edge.

    control rows, HTTP requests, time -> Core -> Journal -> one transaction -> what waited for it:
    replies, cancels, leases, acks

One transaction is in flight at a time; whatever happens meanwhile shares the next one. Urgent
changes start it at once; progress alone waits up to `LAZY_S`. While the disk says no the
transaction waits, and status, health and metrics are answered. When the log cannot be written for
another reason the process ends: it starts again from what is durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from prorl.backends.catalogue import is_server
from prorl.config import ServiceConfig
from prorl.control import (
    REQUESTS,
    BackendStatus,
    ControlRow,
    Kind,
    Paused,
    Problem,
    Stalled,
    Welcome,
    from_batch,
)
from prorl.errors import ConflictError, DiskRefusedError, FencedError, StorageError, UserError
from prorl.flight.control_client import send_rows
from prorl.limits import Clock, steady
from prorl.linux.files import disk_full
from prorl.net.access import check_node
from prorl.protocols import Channel, Network
from prorl.schema import CONTROL
from prorl.service.core.changes import LogBatch
from prorl.service.core.core import Core
from prorl.service.core.leases import Leases
from prorl.service.core.manifest import refusal_of
from prorl.service.core.outbox import read_page, run_news
from prorl.service.core.proofs import Proofs
from prorl.service.core.state import RunRecord, WorkerRecord
from prorl.service.core.watchdog import ProgressWatchdog
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.service.pool.servers import Servers
from prorl.service.pool.weights import keep_version
from prorl.service.probes import Probes
from prorl.service.publish import WeightPublisher
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.retention import drop_run
from prorl.timing import CLAIM_GRACE_S, WORKER_GRACE_S, now

LAZY_S = 0.1
"""The seconds that changes that nobody waits for may wait for company in a transaction."""

SWEEP_TICKS = 3

WATCH_TICKS = 10

DELETE_BATCH = 5_000
"""Rollouts or groups of a run that one transaction removes."""

DISK_AGAIN_S = 1.0
"""Until a disk that said no is asked again."""

log = logging.getLogger("prorl.service")

_SUPERSEDED = Welcome(endpoints={}, superseded=True)

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)


def _refuse(waiters: list[asyncio.Future[None]], error: StorageError) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)


class Gateway:
    def __init__(
        self,
        config: ServiceConfig,
        control_log: ControlLog,
        network: Network,
        clock: Clock = now,
        wall: Clock | None = None,
    ) -> None:
        self.config = config
        wall = wall or steady(time.time, time.monotonic)
        self.core = Core(
            control_log,
            config.backends,
            clock,
            wall,
            max_queued=config.max_queued_rollouts,
            claim_grace_s=WORKER_GRACE_S if config.journal_sync else CLAIM_GRACE_S,
            refusal_of=partial(refusal_of, config),
            on_backends=self.backends_changed,
        )
        self._watchdog = ProgressWatchdog(self.core.state, clock)
        self._log, self._network, self.wall = control_log, network, wall
        self.leases = Leases(self.core.base, self.core.rollouts, self.wake, config.tokenizer)
        self.proofs = Proofs(wall)
        self.servers = Servers(config, lambda name: name in self.core.state.balancer.states)
        self.publisher = WeightPublisher(
            self.core,
            self.durable,
            self._tell_paused,
            self.servers,
            config.model,
            keep=lambda row: keep_version(RunDir(config.run_directory(row.run_id)), row, wall()),
        )
        self._channels: dict[WorkerRecord, Channel] = {}
        self._sent_upto: dict[WorkerRecord, int] = {}
        """The store's session that knows the runs, and up to where it was told the outbox."""
        self._sessions = 0
        self._dirty = asyncio.Event()
        self._lazy_due = False
        self.trouble = ""
        self._waiters: list[asyncio.Future[None]] = []
        self._closing: set[asyncio.Future[None]] = set()

    async def listen(self) -> str:
        """Serve the lease edge and control streams. Returns the location."""
        path, route = self.leases.route
        routes = {path: route, "control": (self._control, CONTROL, CONTROL)}
        if self.config.listener is not None:
            await self._network.listen(self.config.listener.bound(1), routes)
        return await self._network.listen(self.config.gateway_flight, routes)

    async def run(self) -> None:
        """Write pending changes, watch the time. Raises StorageError when the log cannot be
        written.
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
            await self.proofs.close()
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

    async def delete_run(self, run: RunRecord) -> None:
        """Remove a run with all that is stored of it. Raises ConflictError for one that is needed.
        Bit by bit, since commits wait for each transaction; the log's line of it goes last, so that
        what was interrupted can be said again.
        """
        if self.config.store.url:
            raise UserError(
                f"data of run {run.run_id!r} in {self.config.store.url}", "a local disk"
            )
        if run.has_work:
            raise ConflictError(
                f"run {run.run_id!r} is {run.life.state}, and its store is at work on it",
                "one that has ended, stored and read to its end",
                "cancel it, or commit its stream",
            )
        directory = Path(self.config.run_directory(run.run_id))
        if run.life.state != "failed" and directory.exists():  # that of a failed run is another's
            await self.durable()  # it asks the log on disk, where the end may not be written yet
            await asyncio.to_thread(drop_run, directory)
        for name, end in (
            ("rollout", run.accepted.next_rollout),
            ("group", run.accepted.next_group),
        ):
            for start in range(0, end, DELETE_BATCH):
                row = (run.run_id, start + DELETE_BATCH)
                self.core.changes.insert(sql.FORGET_BEFORE[name], row)
                await self.durable()
        for statement in sql.FORGET.values():
            self.core.changes.insert(statement, (run.run_id,))
        await self.durable()
        self.core.state.runs.pop(run.run_id, None)

    # ---- pending changes

    async def _commit_forever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self.core.pump(self.leases.room, self.leases.room_for)
            if self.core.grants.prune():
                self.wake()  # the rest after this transaction
            if (
                self.core.changes.urgent
                or self._waiters
                or (self._lazy_due and not self.core.changes.empty)
            ):
                await self._commit()

    async def _commit(self) -> None:
        self._lazy_due = False
        batch = self.core.changes.take()
        waiters, self._waiters = self._waiters, []
        try:
            while batch.writes and not await self._written(batch, waiters):
                await asyncio.sleep(DISK_AGAIN_S)
        except StorageError as error:
            _refuse(waiters, error)
            raise
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        await self._dispatch(batch)

    async def _written(self, batch: LogBatch, waiters: list[asyncio.Future[None]]) -> bool:
        """Returns whether the batch is in the log; not while the disk says no. Whoever waits hears
        so; what is only read or watched is answered meanwhile.
        """
        try:
            await self._log.write(batch.writes)
        except DiskRefusedError as error:
            if not self.trouble:
                log.error("%s; waiting", error)
            self.trouble = str(error)
            _refuse([*waiters, *self._waiters], error)
            self._waiters.clear()
            return False
        if self.trouble:
            log.warning("the disk takes writes again")
            self.trouble = ""
        return True

    async def _dispatch(self, batch: LogBatch) -> None:
        self.core.note_durable(batch)
        stores = self.core.state.of_role("store")
        for worker, rows in batch.outbox.items():
            if not worker.is_store:
                self._send(worker, rows)
        self.leases.add(batch.granted)
        if batch.granted:
            await asyncio.sleep(0)  # they leave before the outbox is read, which takes longer
        for store in stores:
            rows = batch.outbox.get(store, [])
            if store in self._sent_upto:
                self._send(store, rows)
                await self._tell_store(store, batch.runs)
            elif rows and rows[0].kind is Kind.WELCOME:
                # A store that asks in the same breath as it comes must know every run before it
                # hears the answer: else it takes an open run for a finished one.
                self._send(store, rows[:1])
                self._sent_upto = {store: 0}
                await self._tell_store(
                    store, [run for run in self.core.state.runs.values() if run.has_work]
                )
                self._send(store, rows[1:])
                for run in self.core.state.open.values():
                    self._tell_stuck(run)

    async def _tell_store(self, store: WorkerRecord, runs: Iterable[RunRecord]) -> None:
        """Sends the store these runs, and what the outbox has behind the session's cursor. Much
        takes long to read: the loop serves others meanwhile. Nothing becomes durable until it is
        done, so that what is read is the log of one moment.
        """
        for run in runs:
            self._send(store, run_news(self._log, run))
        page = read_page(self._log, self._sent_upto[store])
        while store in self._sent_upto:
            self._send(store, page.rows)
            self._sent_upto[store] = page.upto
            if not page.more:
                return
            page = await asyncio.to_thread(read_page, self._log, page.upto)

    def _send(self, worker: WorkerRecord, rows: list[ControlRow]) -> None:
        channel = self._channels.get(worker)
        if channel is not None and rows:
            send_rows(channel, rows)

    def backends_changed(self) -> None:
        """Tell RUN who is gone and who may have the key; who waits for a backend looks again."""
        for worker in self.core.state.of_role("run"):
            self._send(worker, [self._backend_status()])
        self.wake()

    def _backend_status(self) -> ControlRow:
        pool = [name for name in self.core.state.balancer.states if is_server(name)]
        status = BackendStatus(
            unreachable=tuple(self.core.watched.unreachable()), keyed=tuple(sorted(pool))
        )
        return ControlRow.of(status)

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
                self._handle_disconnect(worker)

    def _hello(self, channel: Channel, row: ControlRow) -> WorkerRecord | None:
        """The session that begins; None for an earlier incarnation of a worker, which is told
        so.
        """
        if row.kind is not Kind.HELLO:
            raise UserError(f"a control stream began with {row.kind.value!r}", "hello")
        if channel.node:
            hello = row.read_hello("a node's hello")
            about = {"worker": hello.worker, "node": hello.node, "roles": hello.roles}
            check_node(channel.node, about)
        self._sessions += 1
        try:
            worker = self.core.workers.hello(self._sessions, row)
        except FencedError as error:
            log.warning("%s", error)
            send_rows(channel, [ControlRow.of(_SUPERSEDED, re=row.seq)])
            return None
        for earlier in [w for w in self._channels if w.name == worker.name]:
            self._cut(earlier)
        self._channels[worker] = channel
        if "run" in worker.roles:
            paused = [Paused(backend=name, paused=True) for name in self.publisher.paused.names()]
            self._send(worker, [self._backend_status(), *map(ControlRow.of, paused)])
        came = {"roles": [*worker.roles], "worker_pid": worker.pid}
        log.info("worker %s came", worker.name, extra=came)
        return worker

    def _hear(self, worker: WorkerRecord, row: ControlRow) -> None:
        try:
            self.core.control(worker, row)
        except _MALFORMED as error:
            log.warning(
                "worker %s: a %s row makes no sense: %r", worker.name, row.kind.value, error
            )
            if row.kind in REQUESTS:
                problem = Problem(message=str(error))
                answer = ControlRow.of(problem, re=row.seq, run_id=row.run_id, code="invalid")
                self._send(worker, [answer])

    def _cut(self, worker: WorkerRecord) -> None:
        """It counts as dead from now on, whatever its stream still brings."""
        channel = self._channels[worker]
        self._handle_disconnect(worker)
        closing = asyncio.ensure_future(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _handle_disconnect(self, worker: WorkerRecord) -> None:
        if self._channels.pop(worker, None) is not None:
            self._sent_upto.pop(worker, None)
            log.info("worker %s has gone", worker.name, extra={"held": len(worker.in_flight)})
        self.core.workers.handle_disconnect(worker)
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
            self._lazy_due = True
            self.wake()

    def _sweep(self) -> None:
        for worker in self.core.workers.silent():
            log.warning("worker %s is silent; it counts as dead", worker.name)
            self._cut(worker)
        for record in self.leases.overdue():
            self.core.rollouts.failed(
                record, record.life.attempt, "queue_deadline", "no worker took its lease in time"
            )
        self.leases.send()
        self.core.sweep()

    def _watch(self) -> None:
        for run in self._watchdog.look(self.trouble or disk_full(self.config.root)):
            if run.idle and not run.stalled:
                log.info("run %s is idle: %s", run.run_id, run.idle)
            else:
                words = f"is stalled: {run.stalled}" if run.stalled else "moves"
                log.warning("run %s %s", run.run_id, words)
            self._tell_stuck(run)

    def _tell_stuck(self, run: RunRecord) -> None:
        """Trainers hear it from the store, instead of rows."""
        row = ControlRow.of(Stalled(reason=run.stalled or run.idle), run_id=run.run_id)
        for store in self._sent_upto if run.config.delivery == "stream" else ():
            self._send(store, [row])
