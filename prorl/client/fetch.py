"""Getting groups from a store or a replay: by a mapped file on the same host, else by DoGet.

A fetch asks for a plan and then reads exactly that plan's groups. If the plan names a file, the
kernel's boot id is ours and the file opens (containers and other users may not), the groups are
mapped and nothing crosses a socket; else they come by DoGet as one table, which stays in C++ (a
Python loop over batches loses to a busy GIL). Once a plan has told that the server is another host,
DoGet is asked directly. Every call has a deadline and the connection has keepalive, so a frozen
server is an UnavailableError and never a hang.

Not promised: that a client works in a process that was forked after one was used (pyarrow.flight
would hang; every call says so at once instead), and that memory shrinks again: see
`prorl.flight.tune`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
import pyarrow as pa
import pyarrow.flight as fl

from prorl.flight import tune
from prorl.flight.refusals import STREAM_ERRORS, from_flight
from prorl.flight.ticket import Cursor, ReadPlan, Ticket, boot_id, inode
from prorl.flight.wire import call_options, check_peer_schema, guard_fork, open_client
from prorl.net.tls import Credentials
from prorl.schema import ROUTING, STREAM
from prorl.types import Json
from prorl.waits import wait_limit_s

CALL_TIMEOUT_S = wait_limit_s("client.call")

READ_TIMEOUT_S = wait_limit_s("client.read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The result of a ticket: batches of whole groups in the STREAM schema, in delivery order."""

    batches: Iterator[pa.RecordBatch]
    """Read once. From a mapped file they are looked up one by one, so that the first is there at
    once however many follow.
    """
    num_groups: int
    cursor: str
    """After these groups."""
    end: bool
    """Nothing will ever come after them."""
    mapped: bool
    """True if they lie in a mapped file."""
    stalled: str = ""
    """The reason why there are none, if the run does not move."""


def _fetched(plan: ReadPlan, batches: Iterator[pa.RecordBatch], *, is_mapped: bool) -> Fetched:
    return Fetched(
        batches=batches,
        num_groups=plan.num_groups,
        cursor=plan.cursor,
        end=plan.end,
        mapped=is_mapped,
        stalled="" if plan.num_groups else plan.stalled,
    )


class FlightSource:
    """A connection to a store's or replay's Flight endpoint. Synchronous; calls from several
    threads are fine.
    """

    def __init__(
        self,
        location: str,
        token: str = "",
        *,
        host: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`host` is the boot id of this host's kernel, read from it when None. An empty one means
        that no file is mapped.
        """
        tune()
        self.location, self._token = location, token
        self._boot_id = boot_id() if host is None else host
        with self._errors():
            self._client = open_client(location, credentials)

    def fetch(self, ticket: Ticket) -> Fetched:
        """Groups for a ticket; none when nothing came within its `wait_s`. Raises UnavailableError,
        ConflictError, NotFoundError.
        """
        if not self._boot_id:
            return self._fetch_remote(ticket)
        plan, pinned = self._plan(ticket)
        if plan.num_groups == 0:
            return _fetched(plan, iter(()), is_mapped=False)
        mapped = self._map(plan)
        batches = mapped if mapped is not None else iter(self._get(pinned, 0.0).to_batches())
        if plan.boot_id != self._boot_id:
            self._boot_id = ""
        return _fetched(plan, batches, is_mapped=mapped is not None)

    def routed_experts(self, ticket: Ticket) -> pa.Table:
        """Rows of the table `routed_experts` for the groups of a ticket of that layout."""
        return self._get(fl.Ticket(ticket.dumps()), ticket.wait_s, ROUTING)

    def action(self, verb: str, body: Mapping[str, Json] | bytes) -> dict[str, Json]:
        """A DoAction: a JSON object, or bytes as they are, and a JSON object back."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        with self._errors():
            results = list(
                self._client.do_action((verb, data), call_options(self._token, CALL_TIMEOUT_S))
            )
        answer = results[0].body.to_pybytes() if results else b""
        return dict(orjson.loads(answer)) if answer else {}

    def close(self) -> None:
        self._client.close()

    def _plan(self, ticket: Ticket) -> tuple[ReadPlan, fl.Ticket]:
        descriptor = fl.FlightDescriptor.for_command(ticket.dumps())
        with self._errors():
            info = self._client.get_flight_info(
                descriptor, call_options(self._token, ticket.wait_s + CALL_TIMEOUT_S)
            )
        check_peer_schema(info.schema, STREAM, self.location)
        return ReadPlan.parse(info.app_metadata), info.endpoints[
            0
        ].ticket if info.endpoints else None

    def _map(self, plan: ReadPlan) -> Iterator[pa.RecordBatch] | None:
        if not plan.path or not self._boot_id or plan.boot_id != self._boot_id:
            return None
        if inode(plan.path) != plan.inode:
            return None
        try:
            source = pa.memory_map(plan.path)
        except OSError:
            return None
        return _read_mapped(source, plan)

    def _fetch_remote(self, ticket: Ticket) -> Fetched:
        table = self._get(fl.Ticket(ticket.dumps()), ticket.wait_s)
        metadata = table.schema.metadata
        cursor, end = metadata[b"prorl.cursor"].decode(), metadata[b"prorl.end"] == b"true"
        batches = iter(table.to_batches())
        num_groups = (
            Cursor.parse(cursor).seq - int(table.column("delivery_seq")[0].as_py())
            if table.num_rows
            else 0
        )
        return Fetched(
            batches=batches,
            num_groups=num_groups,
            cursor=cursor,
            end=end,
            mapped=False,
            stalled=metadata.get(b"prorl.stalled", b"").decode(),
        )

    def _get(self, ticket: fl.Ticket, wait_s: float, schema: pa.Schema = STREAM) -> pa.Table:
        with self._errors():
            table = self._client.do_get(
                ticket, call_options(self._token, wait_s + READ_TIMEOUT_S)
            ).read_all()
        check_peer_schema(table.schema, schema, self.location)
        return table

    @contextmanager
    def _errors(self) -> Iterator[None]:
        guard_fork()
        # Flight's exceptions keep the stream's buffers alive through their traceback: only what
        # they say goes on.
        try:
            yield
        except STREAM_ERRORS as error:
            raise from_flight(error, self.location) from None


def _read_mapped(source: pa.MemoryMappedFile, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    with source:
        file = source.read_buffer(source.size())
    for offset, length in plan.batches:
        yield pa.ipc.read_record_batch(file.slice(offset, length), STREAM)
