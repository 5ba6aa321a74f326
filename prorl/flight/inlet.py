"""`Inlet`: the consumer's side of an edge. It dials upstreams, grants credit and sends acks.

    inlet = Inlet(network, "ran", hello, slots=16)
    inlet.set_upstreams(locations)                  # whenever `endpoints` changes
    for received in await inlet.take(): ...         # waits for at least one row; [] once closed
    inlet.done(key)                                 # its slot is free: credit goes back
    inlet.ack(keys)                                 # it is durable: upstream may forget it

On edges without redelivery a row is acked when it arrives, so `ack` is not called there. A row that
arrives again, since its stream was lost before the ack, is not given twice. While the row is in
hand, its ack goes to the stream over which it came last; later it is acked again at once (the last
`REMEMBERED` keys are remembered; beyond that the commit's uniqueness decides).

An upstream that is no longer announced is not dialled again, but a stream that still works is kept.
`received` gets each row before its sender or the gateway learns of its arrival. While `may_take`
returns false, no further credit is granted; earlier credit is still used. Credit and acks travel
together (`pacing`). Rows in hand are bounded by credit (`ConsumerCredit`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import msgspec
import pyarrow as pa

from prorl.control import Hello
from prorl.errors import ProrlError
from prorl.flight import trace
from prorl.flight.credit import ACK, CREDIT, Back, ConsumerCredit, Grant, encode
from prorl.flight.pacing import BACK_S, Paced, backoff_s
from prorl.flight.queues import wire_bytes
from prorl.graph import GRAPH
from prorl.protocols import Channel, Network
from prorl.schema import EDGE_BACK, EDGES
from prorl.schema.columns import keys
from prorl.schema.rows import Row, rows
from prorl.types import AttemptKey

REMEMBERED = 4096

LOOK_S = 0.05
"""The seconds until one that may take nothing more asks again whether it may: short beside a
rollout.
"""

_NOBODY = -1
"""The upstream of a row that no stream of this incarnation brought."""

log = logging.getLogger("prorl.flight")


class ReceivedRow(NamedTuple):
    """A row that this consumer has in hand, and where it came from."""

    key: AttemptKey
    row: Row
    num_bytes: int
    """Its share of the message that it came in."""


@dataclass(slots=True)
class _RowState:
    upstream: int
    slot_upstream: int
    """The stream whose credit it used."""
    done: bool = False
    waits: bool = False
    """It has no slot: it waits for somebody outside."""


def _nothing(_: Row) -> None:
    """Keep no row: the default of `received`."""


class Inlet:
    """Belongs to one event loop."""

    def __init__(
        self,
        network: Network,
        edge: str,
        hello: Hello,
        *,
        slots: int,
        window_bytes: int = 64 << 20,
        received: Callable[[Row], None] = _nothing,
        may_take: Callable[[], bool] = lambda: True,
        path: str = "",
    ) -> None:
        self.edge = edge
        self._received, self._may_take = received, may_take
        self._path = path or f"edge/{edge}"
        self._network, self._hello = network, msgspec.to_builtins(hello)
        self._redelivered = edge in GRAPH.redelivered
        self._grants = ConsumerCredit(slots=slots, window_bytes=window_bytes)
        self._channels: dict[int, Channel] = {}
        self._reading: dict[str, Channel] = {}
        """The channels by the location that was dialled."""
        self._names = count()
        self._announced: set[str] = set()
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._ready: deque[ReceivedRow] = deque()
        self._arrived = asyncio.Event()
        self._rows: dict[AttemptKey, _RowState] = {}
        self.num_slotless = 0
        """Rows in hand without a slot."""
        self._acked: OrderedDict[AttemptKey, None] = OrderedDict()
        self._back: dict[int, list[Back]] = {}
        self._paced = Paced(self._flush, BACK_S)
        self._closed = False
        self._broken: BaseException | None = None

    @property
    def num_upstreams(self) -> int:
        return len(self._channels)

    @property
    def sources(self) -> dict[str, bool]:
        """Returns the locations that it reads from, each with whether it needs no socket."""
        return {where: channel.is_local for where, channel in self._reading.items()}

    @property
    def in_hand(self) -> int:
        return self._grants.in_hand

    def set_upstreams(self, locations: Iterable[str]) -> None:
        self._announced = set(locations)
        for location in self._announced - self._dialling.keys():
            self._dialling[location] = asyncio.ensure_future(self._keep(location))
            self._dialling[location].add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Keep an error of a task that serves an upstream, which `take` then raises: a bug of ours
        must not end as silence.
        """
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error
            self._arrived.set()

    async def take(self) -> list[ReceivedRow]:
        """Returns rows that have arrived, at least one; none once closed. Raises what broke it."""
        while not self._ready and not self._closed:
            if self._broken is not None:
                raise self._broken
            self._arrived.clear()
            await self._arrived.wait()
        received = list(self._ready)
        self._ready.clear()
        trace.mark(self.edge, trace.RECEIVED, (row.key for row in received))
        return received

    def adopt(self, row: ReceivedRow) -> None:
        """Adds a row that an earlier incarnation of this consumer received: `take` gives it,
        too.
        """
        if row.key in self._rows:
            return
        self._rows[row.key] = _RowState(_NOBODY, _NOBODY)
        self._grants.adopt(1)
        self._ready.append(row)
        self._arrived.set()

    def waits(self, key: AttemptKey, waits: bool) -> None:
        """Note that a row waits for a guest from elsewhere, which frees its slot, or goes on, which
        takes one again: more rows than slots may then be in hand, until as many have ended.
        """
        row = self._rows.get(key)
        if row is None or row.done or row.waits == waits:
            return
        row.waits = waits
        if waits:
            self._grants.done(row.slot_upstream)
        else:
            self._grants.adopt(1)
            row.slot_upstream = _NOBODY
        self.num_slotless += 1 if waits else -1
        self._paced.ask()

    def done(self, key: AttemptKey) -> None:
        """Free the row's slot; idempotent."""
        row = self._rows.get(key)
        if row is None or row.done:
            return
        row.done = True
        if row.waits:
            self.num_slotless -= 1
        else:
            self._grants.done(row.slot_upstream)
        if not self._redelivered:
            del self._rows[key]
            self._remember(key)
        self._paced.ask()

    def ack(self, durable: Iterable[AttemptKey]) -> None:
        """Ack rows whose fate is durable, and free their slots."""
        for key in durable:
            row = self._rows.get(key)
            if row is None:
                continue
            self.done(key)
            self._rows.pop(key, None)
            self._remember(key)
            self._note(row.upstream, Back(ACK, key=key))
        self._paced.ask()

    def stop(self) -> None:
        """Take idle credit back: only rows that are on their way still come."""
        self._note_credit(self._grants.close())
        self._paced.ask()

    async def close(self) -> None:
        """Leave every upstream after the last acks; idempotent."""
        self._closed = True
        self._arrived.set()
        self._paced.now()
        dialling = list(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)

    async def _keep(self, location: str) -> None:
        tries = 0
        try:
            while location in self._announced and not self._closed:
                try:
                    channel = await self._network.dial(
                        location, self._path, self._hello, EDGE_BACK, EDGES[self.edge]
                    )
                except ProrlError as error:
                    log.debug("cannot dial %s: %s", location, error)
                    await asyncio.sleep(backoff_s(location, tries))
                    tries += 1
                else:
                    tries, self._reading[location] = 0, channel
                    await self._serve(channel)
                    del self._reading[location]
        finally:
            self._dialling.pop(location, None)

    async def _serve(self, channel: Channel) -> None:
        name = next(self._names)
        self._channels[name] = channel
        self._grants.join(name)
        self._paced.ask()
        try:
            while (batch := await channel.receive()) is not None:
                self._receive(name, batch)
        finally:
            del self._channels[name]
            self._back.pop(name, None)
            self._grants.leave(name)
            self._paced.ask()
            await channel.close()

    def _receive(self, name: int, batch: pa.RecordBatch) -> None:
        self._grants.received(name, batch.num_rows)
        share = wire_bytes(batch) // max(1, batch.num_rows)
        for key, row in zip(keys(batch), rows(batch), strict=True):
            if self._again(name, key):
                self._grants.done(name)
                continue
            self._rows[key] = _RowState(name, name)
            self._ready.append(ReceivedRow(key, row, share))
            if not self._redelivered:
                self._received(row)
                self._note(name, Back(ACK, key=key))
        if self._ready:
            self._arrived.set()  # first: whoever takes them need not wait for what is said back
        self._paced.ask()

    def _again(self, name: int, key: AttemptKey) -> bool:
        """Returns whether the row has come before. Its ack goes to the last stream then."""
        row = self._rows.get(key)
        if row is None and key not in self._acked:
            return False
        if row is not None:
            row.upstream = name
        if row is None or not self._redelivered:
            self._note(name, Back(ACK, key=key))
        return True

    def _remember(self, key: AttemptKey) -> None:
        self._acked[key] = None
        if len(self._acked) > REMEMBERED:
            self._acked.popitem(last=False)

    def _note_credit(self, grants: list[Grant]) -> None:
        for grant in grants:
            self._note(grant.upstream, Back(CREDIT, grant.rows, grant.num_bytes))

    def _note(self, name: int, back: Back) -> None:
        if name in self._channels:
            self._back.setdefault(name, []).append(back)

    def _flush(self) -> None:
        """Send credit and acks, counted once for all rows that came and went meanwhile."""
        if self._may_take():
            self._note_credit(self._grants.top_up())
        elif not self._closed:
            asyncio.get_running_loop().call_later(LOOK_S, self._paced.ask)
        back, self._back = self._back, {}
        for name, messages in back.items():
            self._channels[name].send(encode(messages))
