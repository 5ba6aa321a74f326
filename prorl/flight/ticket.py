"""What a trainer and a Flight endpoint say to each other: tickets, plans, cursors.

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
    do_action("status", {"run", "consumer"})
        -> {"run", "cursor", "delivered", "end"}: see `storage/serve/service.py`

`ReadPlan.batches` locates the plan's groups in a file on the server's host: [offset, length] of one
encapsulated IPC message (metadata and body, as `pyarrow.ipc.read_message` takes it) per group, in
the STREAM schema, in delivery order. A client whose kernel has the same `boot_id` and that can read
`path` maps the file, if it is the one that `inode` names (containers of one kernel may have another
file at that path), and never calls do_get. `path` is empty when there is no such file. Such a file
only grows and is never truncated: unlinking it is safe.

A cursor is the text `RUN@SEQ`; SEQ is the delivery_seq of the next group. An empty cursor in a
ticket means: where this consumer committed last, else the start. This module promises shapes, not
behaviour: the endpoint's promises stand in `storage/serve/endpoint.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import orjson

from prorl.errors import ConflictError, UserError
from prorl.types import Json

Layout = Literal["packed", "dense", "routing"]
"""`packed`: the STREAM schema.

`dense`: with mask and logprobs of full length (`prorl.schema.sequences.dense`). `routing`: the
groups' rows of the table `routing` instead, by `do_get` alone; none where the run has none.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A bounded request for whole groups of one run, in delivery order."""

    run: str
    consumer: str = "primary"
    """Only `primary` moves backpressure and staleness; each name has its own committed cursor."""
    cursor: str = ""
    max_bytes: int = 64 << 20
    """Of Arrow data; at least one group comes, however large it is."""
    max_groups: int = 0
    """0 = no bound."""
    wait_s: float = 10.0
    """For the first group."""
    columns: tuple[str, ...] = ()
    """Of the STREAM schema; empty = all."""
    layout: Layout = "packed"

    def dumps(self) -> bytes:
        """The bytes of a Flight ticket, command or FlightInfo.app_metadata."""
        return orjson.dumps(self)

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """Read a ticket or command. Raises UserError that says what is wrong with it."""
        values = json_object(data, "ticket")
        _check_values(values, cls.__dataclass_fields__)
        ticket = cls(**{**values, "columns": tuple(values.get("columns", ()))})
        if not ticket._is_in_range:
            raise UserError(
                f"ticket {data.decode(errors='replace')}",
                "max_bytes >= 1, max_groups >= 0, wait_s in 0..3600, a known layout",
            )
        if ticket.cursor:
            Cursor.parse(ticket.cursor, ticket.run)
        return ticket

    @property
    def _is_in_range(self) -> bool:
        counts = self.max_bytes >= 1 and self.max_groups >= 0
        return counts and 0 <= self.wait_s <= 3600 and self.layout in get_args(Layout)


_TICKET_TYPES: dict[str, tuple[type, ...]] = {
    "run": (str,),
    "consumer": (str,),
    "cursor": (str,),
    "max_bytes": (int,),
    "max_groups": (int,),
    "wait_s": (float, int),
    "columns": (list,),
    "layout": (str,),
}


def _check_values(values: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UserError for an unknown key, a value of another type, or a ticket without a run."""
    if unknown := sorted(set(values) - set(known)):
        raise UserError(
            f"ticket has unknown keys {', '.join(unknown)}", f"keys among {', '.join(known)}"
        )
    for name, kinds in _TICKET_TYPES.items():
        if name in values and (
            not isinstance(values[name], kinds) or isinstance(values[name], bool)
        ):
            raise UserError(f"ticket key {name} = {values[name]!r}", kinds[0].__name__)
    if not all(isinstance(name, str) for name in values.get("columns", ())):
        raise UserError(f"ticket key columns = {values['columns']!r}", "names of columns")
    if not values.get("run"):
        raise UserError("ticket names no run", 'at least {"run": NAME}')


def json_object(data: bytes, what: str) -> dict[str, Json]:
    """The object that `data` is as JSON. Raises UserError that names it `what`."""
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise UserError(f"{what} is not JSON", "a JSON object") from None
    if not isinstance(values, dict):
        raise UserError(f"{what} is JSON but not an object", "a JSON object")
    return values
