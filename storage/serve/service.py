"""The store: takes SCORED rows from every EVAL, makes them durable, serves trainers.

It decides groups, too. One per service at first.

    async with serving(config, network, trainers) as (store, work): await work

`network` carries control and edges (Flight between processes, local in one loop); `trainers` is the
Flight network whose TCP endpoint answers plans, reads, commits and status. The store keeps no
truth: killed at any moment, the next one starts from the control log's outbox and from what is sent
again. A run that is finished and read to its end is closed after a while
(`StoreConfig.close_after_s`): its threads, its DuckDB and its index go, and whoever asks for it
again is served from its directory, like a run that the log no longer tells of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from prorl.config import NAME, ServiceConfig
from prorl.control import (
    ControlRow,
    Endpoints,
    Handout,
    Kind,
    Reserve,
    RunNews,
    RunRejected,
    Stats,
)
from prorl.errors import (
    ConflictError,
    ForeignDirectoryError,
    NotFoundError,
    ProrlError,
    SchemaError,
)
from prorl.flight import FlightNetwork
from prorl.flight.control_client import ControlClient, this_incarnation
from prorl.flight.inlet import Inlet, ReceivedRow
from prorl.protocols import Network
from prorl.storage.files.runs import is_run
from prorl.storage.keep.compact import leftovers
from prorl.storage.keep.tidy import tidy
from prorl.storage.serve.endpoint import Endpoint, ServedRun, on_own_thread
from prorl.storage.serve.liverun import LiveRun
from prorl.storage.serve.replay import open_replay
from prorl.types import AttemptKey
from prorl.waits import wait_limit_s

log = logging.getLogger("prorl.storage")

WORKER = "store-0"
SLOTS = 512
"""Rows in hand, written or not."""

WINDOW_BYTES = 128 << 20

STRAY_S = wait_limit_s("store.stray")

DRAIN_S = wait_limit_s("store.drain")

HOT = ".hot"
"""Below the root: no run can have that name."""


class Store:
    def __init__(
        self, config: ServiceConfig, network: Network, endpoint: Endpoint, location: str
    ) -> None:
        self.config, self.location = config, location
        self._endpoint = endpoint
        self._runs: dict[str, LiveRun] = {}
        self._retired_rows = 0
        self._run_came = asyncio.Event()
        self._foreign: dict[str, str] = {}
        """The reason why runs are not served that the log knew, as long as we live."""
        identity = this_incarnation(
            roles={"store": SLOTS}, worker=WORKER, node=config.node_id, location=location
        )
        self.control = ControlClient(
            network,
            config.gateway_flight,
            identity,
            attempts=lambda: {"store": self._attempt_keys()},
            stats=lambda: {"store": self._stats()},
            on=self._handlers(),
        )
        self._inlet = Inlet(network, "scored", identity, slots=SLOTS, window_bytes=WINDOW_BYTES)
        self._group: asyncio.TaskGroup | None = None
        self._run_tasks: set[asyncio.Task[None]] = set()

    @property
    def runs(self) -> Mapping[str, LiveRun]:
        return self._runs

    def _handlers(self) -> dict[Kind, Callable[[ControlRow], None]]:
        return {
            Kind.ENDPOINTS: lambda row: self._inlet.set_upstreams(
                row.read(Endpoints).locations.get("eval", ())
            ),
            Kind.RUN: self._on_run,
            **dict.fromkeys(
                (Kind.ROWS, Kind.TERMINAL, Kind.GROUP_COMPLETE, Kind.STALLED),
                self._of_a_run,
            ),
        }

    def _of_a_run(self, row: ControlRow) -> None:
        run = self._runs.get(row.run_id)
        if run is None:
            # Retired; what is new comes with the outbox of our next session.
            log.warning(
                "news of a run that is closed", extra={"run": row.run_id, "kind": row.kind.value}
            )
        else:
            run.handle_control(row)

    def _attempt_keys(self) -> Iterable[AttemptKey]:
        return [key for run in self._runs.values() for key in run.writer.in_flight]

    def _stats(self) -> Stats:
        done = self._retired_rows + sum(run.rows_committed for run in self._runs.values())
        return Stats(slots=SLOTS, busy=self._inlet.in_hand, done=done, sources=self._inlet.sources)

    def _on_run(self, row: ControlRow) -> None:
        assert self._group is not None
        news = row.read(RunNews)
        run = self._runs.get(row.run_id)
        if run is not None:
            run.update(news)
            return
        run = self._runs[row.run_id] = LiveRun(
            self.config.run_directory(row.run_id),
            row.run_id,
            news,
            self.control,
            self._endpoint,
            self.config.store,
        )
        work = self._live(run)
        try:
            task = self._group.create_task(work, name=f"run {row.run_id}")
        except RuntimeError:  # we are ending: our next incarnation is told of it again
            work.close()
            return
        self._run_tasks.add(task)
        task.add_done_callback(self._run_tasks.discard)
        self._run_came.set()
        self._run_came = asyncio.Event()

    async def _live(self, run: LiveRun) -> None:
        """Run a run until it retires or this store drains. A run whose directory is not ours, or is
        of another version, ends untouched.
        """
        try:
            await run.run()
        except (ForeignDirectoryError, SchemaError) as error:
            log.error("run %s: %s", run.run_id, error)
            self._foreign[run.run_id] = str(error)
            await self.control.request(RunRejected(reason=str(error)), run_id=run.run_id)
        del self._runs[run.run_id]
        self._retired_rows += run.rows_committed
        self._endpoint.remove(run.run_id)

    async def run(self) -> None:
        """Work until `drain`. Raises what only a new start can mend."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self.control.start()
            obeying = group.create_task(self.control.wait(), name="control")
            clearing = group.create_task(self._clear(), name="clear")
            while received := await self._inlet.take():
                for row in received:
                    if row.key.run_id in self._runs:
                        self._add(row)
                    else:
                        group.create_task(self._stray(row))
            obeying.cancel()
            clearing.cancel()

    async def _clear(self) -> None:
        """Remove, once, what compactions of an ended service have replaced."""
        await asyncio.sleep(self.config.store.keep_replaced_s)
        root = self.config.store.url or self.config.root
        for name in await asyncio.to_thread(leftovers, root):
            if name not in self._runs:
                where, grace_s = self.config.run_directory(name), self.config.store.keep_replaced_s
                await tidy(where, grace_s, everything=False)

    def _add(self, received: ReceivedRow) -> None:
        self._runs[received.key.run_id].writer.add(
            received.key, received.row, lambda: self._inlet.ack([received.key]), received.num_bytes
        )

    async def _stray(self, received: ReceivedRow) -> None:
        """Hold a row of a run that the log has not told of yet, until it does or the gateway says
        that the row's fate is decided.
        """
        while received.key.run_id not in self._runs:
            came = self._run_came
            try:
                async with asyncio.timeout(STRAY_S):
                    await came.wait()
            except TimeoutError:
                answer = await self.control.request(
                    Reserve(attempts=(received.key,)), run_id=received.key.run_id
                )
                if answer.refused:
                    reason = answer.refused[0].reason
                    log.info("a row of no open run", extra={"key": received.key, "reason": reason})
                    self._inlet.ack([received.key])
                    return
        self._add(received)

    async def find(self, run_id: str) -> ServedRun | None:
        """Returns a run to serve: the live one or, where the log tells of none, one from its
        directory.
        """
        with suppress(NotFoundError):
            # The reply comes after every run that the log had for us.
            await self.control.request(Handout(), run_id=run_id)
        if (run := self._runs.get(run_id)) is not None:
            await run.ready.wait()
            return ServedRun(order=run.order, index=run.index, directory=run.index.run)
        if (why := self._foreign.get(run_id)) is not None:
            raise ConflictError(why)
        if not NAME.fullmatch(run_id):
            return None
        return await on_own_thread(lambda: self._open(run_id), f"open {run_id}")

    def _open(self, run_id: str) -> ServedRun | None:
        directory = self.config.run_directory(run_id)
        if not is_run(directory):
            return None
        order, index = open_replay(directory)
        return ServedRun(order=order, index=index, directory=index.run)

    async def drain(self) -> None:
        """Take nothing new, make durable and ack what is here; `run` returns."""
        self._inlet.stop()
        for run in self._runs.values():
            run.drain()
        if self._run_tasks:
            await asyncio.wait(self._run_tasks, timeout=DRAIN_S)
        await self._inlet.close()

    async def close(self) -> None:
        await self._inlet.close()
        await self.control.close()


@asynccontextmanager
async def serving(
    config: ServiceConfig, network: Network, trainers: FlightNetwork
) -> AsyncIterator[tuple[Store, asyncio.Task[None]]]:
    """A store and its work: await the task to learn why it cannot go on. Leaving the block drains
    it; the networks stay open.
    """
    endpoint = Endpoint(config.root / HOT, config.store.hot_bytes)
    location = await _listen(config, trainers, endpoint)
    store = Store(config, network, endpoint, location)
    endpoint.find = store.find
    work = asyncio.create_task(store.run(), name="store")
    try:
        yield store, work
    finally:
        await store.drain()
        await store.close()
        work.cancel()
        with suppress(asyncio.CancelledError, ProrlError, ExceptionGroup):
            await work
        endpoint.close()


async def _listen(config: ServiceConfig, trainers: FlightNetwork, endpoint: Endpoint) -> str:
    location = await trainers.listen(f"grpc://{config.host}:0", {}, endpoint.reads())
    if config.listener is not None:
        await trainers.listen(config.listener.bound(2), {}, endpoint.reads())
    return location
