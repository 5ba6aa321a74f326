"""The messages between a trainer and a Flight endpoint: tickets, plans, cursors.

The endpoint serves a run: a store or a replay.

    get_flight_info(FlightDescriptor.for_command(Ticket))
        -> FlightInfo: one endpoint, app_metadata = ReadPlan
        waits up to `wait_s` for the first group; hands groups out (they get their delivery_seq)
        before it answers
    do_get(endpoint.ticket)
        -> the groups of that plan as a Table in the STREAM schema, batches of whole groups under
        2 MiB; the endpoint's ticket is a `Ticket` too: its cursor is the plan's first group, its
        `max_groups` the plan's number of groups
    do_get(Ticket)
        -> the same without a plan, for clients without our code; an empty Table when nothing came
        in time
    do_action("commit", {"run", "consumer", "cursor"})
        -> {}: everything before `cursor` is trained and durable
    do_action("record", an Arrow stream of `prorl.schema.TRAINED`) -> {"recorded"}
    do_action("log", a step's metrics) -> {"logged"}
        both false if the run cannot be written to, as in a replay; `storage/write/` reads them
    do_action("status", {"run", "consumer"})
        -> {"run", "cursor", "delivered", "end"}: see `storage/serve/service.py`

`ReadPlan.batches` locates the plan's groups in a file on the server's host: [offset, length] of one
encapsulated IPC message (metadata and body, as `pyarrow.ipc.read_message` takes it) per group, in
the STREAM schema, in delivery order. A client whose kernel has the same `boot_id` and that can read
`path` maps the file and never calls do_get; first it compares `inode`, since containers of one
kernel may have another file at that path. `path` is empty when there is no such file. Such a file
only grows and is never truncated: unlinking it is safe.

A cursor is the text `RUN@SEQ`; SEQ is the delivery_seq of the next group. An empty cursor in a
ticket means the last committed cursor of this consumer, else the start. This module defines shapes
only; the endpoint's behaviour is described in `storage/serve/endpoint.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta

from prorl.errors import ConflictError, UserError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Layout = Literal["packed", "dense", "routed_experts"]
"""`packed`: the STREAM schema.

`dense`: with mask and logprobs of full length (`prorl.schema.sequences.dense`). `routed_experts`:
the groups' rows of that table instead, by `do_get` alone; none where the run has none.
"""


class Cursor(NamedTuple):
    """A place in a run's one delivery order.

    >>> Cursor.parse("demo@12").seq, str(Cursor("demo", 12))
    (12, 'demo@12')
    """

    run: str
    seq: int

    @classmethod
    def parse(cls, text: str, run: str = "") -> Cursor:
        """Read a cursor from its text `RUN@SEQ`.

        Raises UserError for another text, ConflictError for a cursor of another run than `run`.
        """
        name, _, seq = text.rpartition("@")
        if not name or not seq.isdecimal():
            raise UserError(f"cursor {text!r}", "RUN@SEQ, as a batch's `cursor` says")
        if run and name != run:
            raise ConflictError(
                f"cursor {text!r} belongs to run {name!r}", f"a cursor of run {run!r}"
            )
        return cls(name, int(seq))

    def __str__(self) -> str:
        return f"{self.run}@{self.seq}"


class _JsonMessage(msgspec.Struct, frozen=True, kw_only=True):
    """JSON in a Flight ticket, command or FlightInfo.app_metadata."""

    def dumps(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def _read(cls, data: bytes, kind: str, hint: str = "") -> Self:
        """Raises UserError that says what is wrong with it."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            text = f"{kind} {data[:200].decode(errors='replace')}: {error}"
            expected = f"a JSON object with keys of {', '.join(cls.__struct_fields__)}"
            raise UserError(text, expected, hint) from None


class Ticket(_JsonMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bounded request for whole groups of one run, in delivery order."""

    run: Annotated[str, Meta(min_length=1)]
    consumer: str = "primary"
    """Only `primary` moves backpressure and staleness; each name has its own committed cursor."""
    cursor: str = ""
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """The limit of Arrow data; at least one group comes, however large it is."""
    max_groups: Annotated[int, Meta(ge=0)] = 0
    """0 = no bound."""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """For the first group."""
    columns: tuple[str, ...] = ()
    """The columns of the STREAM schema; empty = all."""
    layout: Layout = "packed"

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        ticket = cls._read(data, "ticket")
        if ticket.cursor:
            Cursor.parse(ticket.cursor, ticket.run)
        return ticket


class ReadPlan(_JsonMessage, frozen=True, kw_only=True):
    """The answer to a ticket: which groups, and where they lie on the server's host."""

    cursor: str
    """After these groups; equal to the ticket's when there are none."""
    num_groups: int
    end: bool
    """Nothing will ever come after `cursor`: the run is finished, or the replay is at its end."""
    stalled: str = ""
    """The reason why there are no groups, if the run does not move."""
    boot_id: str = ""
    path: str = ""
    inode: tuple[int, int] = (0, 0)
    """Device and inode of the file."""
    batches: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, data: bytes) -> ReadPlan:
        """Read FlightInfo.app_metadata; keys of a later version are ignored."""
        return cls._read(data, "the endpoint's plan", "is this a prorl store or replay?")


def inode(path: str) -> tuple[int, int]:
    """Device and inode of a file; zeros where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def boot_id() -> str:
    """Id of this kernel's boot, equal for all processes of one host; empty where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
