"""Getting groups from a store or a replay: by a mapped file on the same host, else by DoGet. Knows Flight, not runs or trainers.

A fetch asks for a plan and then reads exactly that plan's groups. If the plan names a file, the kernel's boot id is ours and the file opens
(containers and other users may not), the groups are mapped and nothing crosses a socket; else they come by DoGet as one table,
which stays in C++ (a Python loop over batches loses to a busy GIL). Every call has a deadline and the connection has keepalive, so a
frozen server is an UnavailableError and never a hang.

Not promised: that a client works after `fork` in a process that used it (pyarrow.flight does not), and that memory shrinks
again: see `keep_pages`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.flight as flight

from prorl.errors import ConflictError, NotFoundError, UnavailableError, UserError
from prorl.flight.ticket import Cursor, Plan, Ticket, boot_id
from prorl.schema import SEQUENCES, STREAM
from prorl.types import Json

CALL_TIMEOUT_S = 30.0
"""Of one call, besides the time that a ticket asks the server to wait."""

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a ticket gave: record batches of whole groups in the STREAM schema, in delivery order."""

    batches: tuple[pa.RecordBatch, ...]
    cursor: str
    """After these groups."""
    end: bool
    mapped: bool
    """Whether they lie in a mapped file."""


class FlightSource:
    """A connection to a store's or replay's Flight endpoint. Synchronous; calls from several threads are fine."""

    def __init__(self, location: str, token: str = "", *, same_host: bool = True) -> None:
        keep_pages()
        self.location = location
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        self._boot_id = boot_id() if same_host else ""
        with _flight_errors(location):
            self._client = flight.FlightClient(location, generic_options=_KEEPALIVE)

    def fetch(self, ticket: Ticket) -> Fetched:
        """Groups for a ticket; none when nothing came within its `wait_s`. Raises UnavailableError, ConflictError, NotFoundError."""
        plan, pinned = self._plan(ticket)
        if plan.num_groups == 0:
            return Fetched(batches=(), cursor=plan.cursor, end=plan.end, mapped=False)
        mapped = self._map(plan)
        batches = mapped if mapped is not None else self._get(pinned)
        return Fetched(batches=batches, cursor=plan.cursor, end=plan.end, mapped=mapped is not None)

    def action(self, verb: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """A DoAction with a JSON object both ways."""
        with _flight_errors(self.location):
            results = list(self._client.do_action((verb, orjson.dumps(body)), self._options()))
        answer = results[0].body.to_pybytes() if results else b""
        return dict(orjson.loads(answer)) if answer else {}

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def _plan(self, ticket: Ticket) -> tuple[Plan, flight.Ticket]:
        descriptor = flight.FlightDescriptor.for_command(ticket.dumps())
        with _flight_errors(self.location):
            info = self._client.get_flight_info(descriptor, self._options(ticket.wait_s))
        return Plan.parse(info.app_metadata), info.endpoints[0].ticket if info.endpoints else None

    def _map(self, plan: Plan) -> tuple[pa.RecordBatch, ...] | None:
        if not plan.path or not self._boot_id or plan.boot_id != self._boot_id:
            return None
        try:
            source = pa.memory_map(plan.path)
        except OSError:
            return None
        after = Cursor.parse(plan.cursor).seq
        with source:
            return tuple(_read_at(source, at, length, after - plan.num_groups + i) for i, (at, length) in enumerate(plan.batches))

    def _get(self, ticket: flight.Ticket) -> tuple[pa.RecordBatch, ...]:
        with _flight_errors(self.location):
            table = self._client.do_get(ticket, self._options()).read_all()
        return tuple(batch for batch in table.to_batches() if batch.num_rows)

    def _options(self, wait_s: float = 0.0) -> flight.FlightCallOptions:
        # Buffers of large or oddly framed messages arrive at odd addresses; only those are copied to aligned ones.
        aligned = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
        return flight.FlightCallOptions(timeout=wait_s + CALL_TIMEOUT_S, headers=self._headers, read_options=aligned)


def _read_at(source: pa.MemoryMappedFile, offset: int, length: int, delivery_seq: int) -> pa.RecordBatch:
    source.seek(offset)
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(source.read_buffer(length)), SEQUENCES)
    seqs = pa.array(np.full(batch.num_rows, delivery_seq, np.int64))
    return pa.RecordBatch.from_arrays([seqs, *batch.columns], schema=STREAM)


@contextmanager
def _flight_errors(location: str) -> Iterator[None]:
    # Flight's exceptions keep the stream's buffers alive through their traceback: only their text goes on.
    try:
        yield
    except (flight.FlightUnavailableError, flight.FlightTimedOutError, flight.FlightCancelledError) as error:
        raise UnavailableError(f"{location}: {_text(error)}") from None
    except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as error:
        raise UserError(f"{location} refused the token: {_text(error)}", "the token of the service's root", "set PRORL_TOKEN") from None
    except pa.ArrowKeyError as error:
        raise NotFoundError(_text(error)) from None
    except flight.FlightServerError as error:
        code = bytes(error.extra_info or b"")
        raise (ConflictError if code == b"conflict" else UnavailableError)(_text(error)) from None
    except pa.ArrowInvalid as error:
        raise UserError(_text(error)) from None


def _text(error: Exception) -> str:
    return str(error).split(". gRPC client debug context", 1)[0].split(". Detail:", 1)[0].strip()


@cache
def keep_pages() -> bool:
    """Keep glibc from giving freed pages back: each received batch would fault them in again, which halves the throughput.

    The price is a resident size that stays at its high-water mark. `PRORL_MALLOPT=0` leaves malloc alone; other C
    libraries have no such switch. Returns whether it is set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.get("PRORL_MALLOPT") == "0":
        return False
    wanted = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20), (_M_ARENA_MAX, 1))
    return all(mallopt(name, value) for name, value in wanted)
