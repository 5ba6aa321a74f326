"""Answers trainers over Flight for a store or a replay (shapes: `prorl/flight/ticket.py`).

A plan names groups and the place of each in one hot file, in delivery order; it ends early where
the next group would lie in another file, so that a plan never needs two. `do_get` answers from the
same hot copy with a Table of whole groups, small groups joined up to `JOIN_BYTES`; its schema
metadata carries `prorl.cursor` and `prorl.end` for clients that asked for no plan. Reading parts
and writing the hot copy happen on one thread, which owns `GroupIndex` and `HotCopy`; the loop owns
the orders.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.flight as fl
from msgspec.structs import replace

from prorl.errors import NotFoundError, UserError
from prorl.flight import FlightReads
from prorl.flight.queues import wire_bytes
from prorl.flight.ticket import Cursor, ReadPlan, Ticket, boot_id, inode
from prorl.schema import ROUTING, STREAM
from prorl.schema.sequences import dense
from prorl.storage.files.layout import RunDir
from prorl.storage.serve.delivery import Order, OrderReply, OrderRequest
from prorl.storage.serve.hot import HotCopy, Location
from prorl.storage.write.lineage import append_recorded, read_recorded, recorded_run
from prorl.storage.write.metrics import append_logged, read_logged
from prorl.types import Json

ResultT = TypeVar("ResultT")

JOIN_BYTES = 256 << 10
"""Joining copies, and fresh pages cost more than a message does: only groups that are small beside
a message are joined.
"""

log = logging.getLogger("prorl.storage")


MAX_BYTES = 256 << 20
"""The limit of one read, whatever its ticket says, unless a single group is larger: it lies in
memory whole, and who wants more asks again.
"""

MAX_STORED_RUNS = 8
"""Stored runs that stay open for further requests."""


class GroupReader(Protocol):
    """Describes where the rows of groups come from."""

    def read(self, group_id: int) -> pa.RecordBatch:
        """All sequences of a group in SEQUENCES' shape. Raises NotFoundError, StorageError."""

    def routed_experts(self, group_id: int) -> pa.Table:
        """A group's rows of the table `routed_experts`. Raises as `read`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    order: Order
    index: GroupReader
    directory: RunDir | None = None
    """The directory that `record` may append to."""


class Endpoint:
    """`add` runs, hand `reads()` to a listener, `close()` at the end."""

    def __init__(self, hot_directory: Path, hot_bytes: int) -> None:
        self._runs: dict[str, ServedRun] = {}
        self._hot = HotCopy(hot_directory, hot_bytes)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        """One for the index of each run: who reads a slow run delays nobody else's."""
        self._boot_id = boot_id()
        self.find: Callable[[str], Coroutine[Any, Any, ServedRun | None]] = _nothing
        """Asked for a run that was not added."""
        self._stored_runs: OrderedDict[str, ServedRun] = OrderedDict()
        """Runs that `find` gave, the least recently used first; at most `MAX_STORED_RUNS`."""
        self._finding: dict[str, asyncio.Task[ServedRun | None]] = {}

    def add(self, order: Order, index: GroupReader, directory: RunDir | None = None) -> None:
        """`directory`: what trainers may record in."""
        self._runs[order.run_id] = ServedRun(order=order, index=index, directory=directory)
        self._stored_runs.pop(order.run_id, None)

    def remove(self, run_id: str) -> None:
        """Forget a run: whoever asks for it again gets what `find` gives. Idempotent."""
        self._runs.pop(run_id, None)
        self._end_thread(run_id)

    def reads(self) -> FlightReads:
        """Returns what `FlightNetwork.listen` serves to readers."""
        return FlightReads(
            get=self.get,
            info=self.info,
            actions={
                "commit": self.commit,
                "record": self.record,
                "log": self.log,
                "status": self.status,
            },
            named={"record": recorded_run},
        )

    async def on_thread(self, run_id: str, work: Callable[[], ResultT]) -> ResultT:
        """Work that touches a run's index, on the thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread(run_id), work)

    def soon(self, run_id: str, work: Callable[[], None]) -> None:
        """Queue work on that thread now, before everything that is queued later."""
        self._thread(run_id).submit(work).add_done_callback(_report)

    def _thread(self, run_id: str) -> ThreadPoolExecutor:
        if run_id not in self._threads:
            self._threads[run_id] = ThreadPoolExecutor(1, thread_name_prefix=f"read {run_id}")
        return self._threads[run_id]

    def _end_thread(self, run_id: str) -> None:
        if (thread := self._threads.pop(run_id, None)) is not None:
            thread.shutdown(wait=False)

    async def info(self, command: bytes) -> fl.FlightInfo:
        """`get_flight_info`: hands out groups, with their places and a ticket for the same."""
        ticket = Ticket.parse(command)
        if ticket.layout == "routed_experts":
            raise UserError(
                "a plan of the layout routed_experts", "do_get with the ticket: no file is mapped"
            )
        schema = _shape(_EMPTY, ticket).schema
        run, seq, reply = await self._take(ticket)
        places = await self.on_thread(ticket.run, lambda: self._locate(run, seq, reply))
        num_groups, path = len(places), places[0].path if places else ""
        first, behind = Cursor(ticket.run, seq), Cursor(ticket.run, seq + num_groups)
        same = replace(
            ticket, cursor=str(first), max_groups=num_groups, max_bytes=MAX_BYTES, wait_s=0.0
        )
        plan = ReadPlan(
            cursor=str(behind),
            num_groups=num_groups,
            end=reply.end and num_groups == len(reply.groups),
            stalled=reply.stalled,
            boot_id=self._boot_id,
            path=path,
            inode=inode(path),
            batches=tuple((place.offset, place.length) for place in places),
        )
        return fl.FlightInfo(
            schema,
            fl.FlightDescriptor.for_command(command),
            [fl.FlightEndpoint(same.dumps(), [])] if num_groups else [],
            -1,
            sum(place.length for place in places),
            app_metadata=plan.dumps(),
        )

    async def get(self, data: bytes) -> pa.Table:
        """`do_get`: whole groups in delivery order."""
        ticket = Ticket.parse(data)
        schema = ROUTING if ticket.layout == "routed_experts" else _shape(_EMPTY, ticket).schema
        run, seq, reply = await self._take(ticket)
        packed = await self.on_thread(
            ticket.run,
            lambda: (
                _routing(run, reply)
                if ticket.layout == "routed_experts"
                else [_shape(batch, ticket) for batch in _packed(self._read(run, seq, reply))]
            ),
        )
        cursor = Cursor(ticket.run, seq + len(reply.groups))
        ends = {"prorl.cursor": str(cursor), "prorl.end": "true" if reply.end else "false"}
        ends |= {"prorl.stalled": reply.stalled} if reply.stalled else {}
        return pa.Table.from_batches(packed, schema).replace_schema_metadata(
            {**(schema.metadata or {}), **ends}
        )

    async def commit(self, body: bytes) -> bytes:
        values = _body(body)
        run = await self._run(str(values.get("run", "")))
        cursor = Cursor.parse(str(values.get("cursor", "")), run.order.run_id)
        await run.order.commit(str(values.get("consumer", "primary")), cursor.seq)
        return b"{}"

    async def record(self, body: bytes) -> bytes:
        """Store a checkpoint's lineage, which is durable when this answers."""
        recorded = read_recorded(body)
        run = await self._run(recorded.run)
        if (directory := run.directory) is None:
            return b'{"recorded": false}'
        recorded.check(run.order.delivered)
        work = partial(append_recorded, directory, recorded)
        await on_own_thread(work, f"record {recorded.run}")
        return b'{"recorded": true}'

    async def log(self, body: bytes) -> bytes:
        """Store what a trainer measured in a step, which is durable when this answers."""
        logged = read_logged(body)
        directory = (await self._run(logged.run)).directory
        if directory is None:
            return b'{"logged": false}'
        await on_own_thread(partial(append_logged, directory, logged), f"log {logged.run}")
        return b'{"logged": true}'

    async def status(self, body: bytes) -> bytes:
        """Returns the status of one run, of the only run, or of all."""
        values = _body(body)
        consumer = str(values.get("consumer", "primary"))
        if name := values.get("run"):
            return orjson.dumps(_status((await self._run(str(name))).order, consumer))
        all_runs = [_status(run.order, consumer) for run in self._served.values()]
        return orjson.dumps({**(all_runs[0] if len(all_runs) == 1 else {}), "runs": all_runs})

    @property
    def _served(self) -> dict[str, ServedRun]:
        return {**self._stored_runs, **self._runs}

    async def _run(self, name: str) -> ServedRun:
        run = self._runs.get(name) or self._stored_runs.get(name) or await self._find(name)
        if run is None:
            raise NotFoundError(
                f"no run {name!r} is served here; there are:"
                f" {', '.join(sorted(self._served)) or 'none'}"
            )
        if name in self._stored_runs:
            self._stored_runs.move_to_end(name)
        return run

    async def _find(self, name: str) -> ServedRun | None:
        """Returns what `find` gives. The search is shared and survives a cancelled caller: a
        client whose call ran out asks again and waits for the same.
        """
        task = self._finding.get(name)
        if task is None:
            task = self._finding[name] = asyncio.create_task(self.find(name), name=f"find {name}")
            task.add_done_callback(lambda done: self._keep(name, done))
        run = await asyncio.shield(task)
        return self._runs.get(name) or run

    def _keep(self, name: str, done: asyncio.Task[ServedRun | None]) -> None:
        del self._finding[name]
        if done.cancelled() or done.exception() is not None:
            return
        if (run := done.result()) is not None and name not in self._runs:
            self._stored_runs[name] = run
            while len(self._stored_runs) > MAX_STORED_RUNS:
                self._end_thread(self._stored_runs.popitem(last=False)[0])

    async def _take(self, ticket: Ticket) -> tuple[ServedRun, int, OrderReply]:
        run = await self._run(ticket.run)
        seq = (
            Cursor.parse(ticket.cursor, ticket.run).seq
            if ticket.cursor
            else run.order.committed(ticket.consumer)
        )
        max_bytes = min(ticket.max_bytes, MAX_BYTES)
        request = OrderRequest(seq, ticket.max_groups, max_bytes, ticket.wait_s)
        return run, seq, await run.order.take(request)

    def _locate(self, run: ServedRun, seq: int, reply: OrderReply) -> list[Location]:
        """Returns the longest prefix of groups in one hot file; writes groups that are not hot."""
        places: list[Location] = []
        for delivery_seq, group_id in enumerate(reply.groups, seq):
            key = (run.order.run_id, group_id)
            place = self._hot.find(key) or self._hot.write(
                key, _delivered(run.index.read(group_id), delivery_seq)
            )
            if places and place.path != places[0].path:
                break
            places.append(place)
        return places

    def _read(self, run: ServedRun, seq: int, reply: OrderReply) -> Iterator[pa.RecordBatch]:
        """Yields STREAM batches, one a group; what is not hot comes from the parts."""
        for delivery_seq, group_id in enumerate(reply.groups, seq):
            hot = self._hot.read((run.order.run_id, group_id))
            yield hot if hot is not None else _delivered(run.index.read(group_id), delivery_seq)

    def close(self) -> None:
        """Idempotent."""
        for task in self._finding.values():
            task.cancel()
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._hot.close()


async def on_own_thread(work: Callable[[], ResultT], name: str) -> ResultT:
    """Run work that may take minutes on a thread that nothing else waits for."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


async def _nothing(run_id: str) -> ServedRun | None:
    return None


def _report(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.error("an index could not be kept: %r", error)


def _status(order: Order, consumer: str) -> dict[str, Json]:
    cursor = Cursor(order.run_id, order.committed(consumer))
    return {
        "run": order.run_id,
        "cursor": str(cursor),
        "delivered": order.delivered,
        "end": order.finished,
    }


def _body(body: bytes) -> dict[str, Json]:
    try:
        values = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise UserError("the action's body is not a JSON object", '{"run", "consumer", "cursor"}')
    return values


def _delivered(group: pa.RecordBatch, delivery_seq: int) -> pa.RecordBatch:
    """A group's sequences as a STREAM batch."""
    seqs = pa.array(np.full(group.num_rows, delivery_seq, np.int64))
    return group.add_column(0, STREAM.field(0), seqs).replace_schema_metadata(STREAM.metadata)


def _packed(groups: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small groups joined to batches of up to `JOIN_BYTES`; a larger one alone, as it lies."""
    waiting: list[pa.RecordBatch] = []
    num_bytes = 0
    for group in groups:
        size = wire_bytes(group)
        if waiting and num_bytes + size > JOIN_BYTES:
            yield _joined(waiting)
            waiting, num_bytes = [], 0
        waiting.append(group)
        num_bytes += size
    if waiting:
        yield _joined(waiting)


def _routing(run: ServedRun, reply: OrderReply) -> list[pa.RecordBatch]:
    """Returns one batch per row: each may be megabytes."""
    tables = [run.index.routed_experts(group_id) for group_id in reply.groups]
    return [batch for table in tables for batch in table.to_batches(max_chunksize=1)]


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _shape(batch: pa.RecordBatch, ticket: Ticket) -> pa.RecordBatch:
    """The ticket's layout and columns. Raises UserError for a column that the layout lacks."""
    shaped = dense(batch) if ticket.layout == "dense" else batch
    unknown = [name for name in ticket.columns if name not in shaped.schema.names]
    if unknown:
        raise UserError(
            f"ticket asks for columns {', '.join(unknown)}",
            f"among {', '.join(shaped.schema.names)}",
        )
    return shaped.select(list(ticket.columns)) if ticket.columns else shaped


_EMPTY = pa.RecordBatch.from_pylist([], schema=STREAM)
