"""`Outlet`: the producer's side of an edge. It owns the rows that wait, and those without an ack.

    outlet = Outlet("ready", limit_bytes=64 << 20, on_acked=..., on_lost=...)
    await network.listen(location, {outlet.path: outlet.route})
    await outlet.put(row, key, num_bytes)   # waits while `limit_bytes` are held

A supplier that makes rows on demand (the gateway's lease edge) does not use `put`:
`on_credit(free_rows)` says how many rows would go out at once, and `send(batch)` takes any number
of them in one batch. `on_sent(keys, hello)` says who got which.

Invariants: a row has one consumer at a time; on redelivered edges (`ran`, `scored`) it is kept
until its ack and sent again when the consumer is lost; on the others the Inlet acks what it
received, and `on_lost` names what a lost consumer never acked: it is not sent again. `on_acked` and
`on_lost` come once per key that was put, and not at all for a key that was dropped. Held bytes are
bounded by `limit_bytes` plus one row per waiting `put`; `send` is bounded by the credit that its
caller was told of. Once closed, no consumer is let in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import pyarrow as pa

from prorl.errors import UnavailableError
from prorl.flight import trace
from prorl.flight.credit import ACK, CREDIT, ProducerCredit, decode
from prorl.flight.pacing import ROWS_S, Paced
from prorl.flight.queues import together, wire_bytes
from prorl.graph import GRAPH
from prorl.protocols import Accept, Channel
from prorl.schema import EDGE_BACK, EDGES
from prorl.schema.columns import keys
from prorl.schema.rows import Row, rows, stack
from prorl.timing import now
from prorl.types import AttemptKey, Json

Keys = Callable[[list[AttemptKey]], None]
KeysOf = Callable[[list[AttemptKey], Mapping[str, Json]], None]
"""The same with the hello of the consumer that has them."""
Has = Callable[[Mapping[str, Json], str], bool]
"""Returns whether a consumer, by its first word, has what a row needs."""


class SizedRow(NamedTuple):
    row: Row
    num_bytes: int


def _nothing(*_: object) -> None:
    """Do nothing with what is told: the default."""


class Outlet:
    """Belongs to one event loop; callbacks must not block."""

    def __init__(
        self,
        edge: str,
        *,
        limit_bytes: int = 64 << 20,
        on_acked: Keys = _nothing,
        on_lost: Keys = _nothing,
        on_credit: Callable[[int], None] = _nothing,
        on_sent: KeysOf = _nothing,
        has: Has = lambda peer, need: True,
        path: str = "",
    ) -> None:
        self.edge, self.path = edge, path or f"edge/{edge}"
        self._redelivered = edge in GRAPH.redelivered
        self._has = has
        self._ledger = ProducerCredit(redelivered=self._redelivered)
        self._limit_bytes = limit_bytes
        self._on_acked = on_acked
        self._on_lost, self._closed = on_lost, False
        self._on_credit = on_credit
        self._on_sent = on_sent
        self._rows: dict[AttemptKey, SizedRow] = {}
        self._buffered_bytes = 0
        self._stalled_since: float | None = None
        self._putting: deque[asyncio.Future[None]] = deque()
        self._channels: dict[int, Channel] = {}
        self._names = count()
        self._paced = Paced(self._pump, ROWS_S)

    @property
    def route(self) -> tuple[Accept, pa.Schema, pa.Schema]:
        return self.serve, EDGE_BACK, EDGES[self.edge]

    @property
    def free_rows(self) -> int:
        return self._ledger.free_rows

    @property
    def buffered_bytes(self) -> int:
        return self._buffered_bytes

    @property
    def num_waiting(self) -> int:
        return self._ledger.num_waiting

    @property
    def stalled_s(self) -> float:
        """Returns the seconds since when rows have waited here without a consumer, from the first
        such row or the last consumer's leave to the next ack; else 0.
        """
        return 0.0 if self._stalled_since is None else now() - self._stalled_since

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._ledger

    async def put(self, row: Row, key: AttemptKey, num_bytes: int) -> None:
        """Offer one row, unless it is here; waits while the bound is met."""
        while self._buffered_bytes >= self._limit_bytes:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._putting.append(waiting)
            await waiting
        self._add(row, key, num_bytes, "")

    def send(self, batch: pa.RecordBatch, needs: Sequence[str] = ()) -> None:
        """Offer rows to the consumers without waiting; `needs`: what one must have for each."""
        share = wire_bytes(batch) // max(1, batch.num_rows)
        row_needs = needs or [""] * batch.num_rows
        for key, row, row_need in zip(keys(batch), rows(batch), row_needs, strict=True):
            self._add(row, key, share, row_need)

    def free_for(self, needs: str) -> int | None:
        """Returns how many rows that need this could be sent now; None when no consumer has it."""
        return self._ledger.free_for(needs)

    def unplaceable(self) -> list[AttemptKey]:
        """Forget the rows that need what no consumer has. Returns their keys."""
        return self._forget(self._ledger.unplaceable())

    def drop(self, key: AttemptKey) -> bool:
        """Forget a row (cancelled): it is not sent (again). False when it is not here."""
        return bool(self._forget([key]))

    def withdraw(self) -> list[AttemptKey]:
        """Forget the rows that were sent to no consumer. Returns their keys."""
        return self._forget(self._ledger.waiting())

    async def close(self) -> None:
        """End every stream, and let nobody in from now on."""
        self._closed = True
        for channel in list(self._channels.values()):
            await channel.close()

    async def serve(self, channel: Channel) -> None:
        if self._closed:
            raise UnavailableError(f"{self.path}: its stage has left")
        name = next(self._names)
        self._channels[name] = channel
        self._ledger.join(name, partial(self._has, channel.peer))
        try:
            while (batch := await channel.receive()) is not None:
                self._hear(name, batch)
        finally:
            del self._channels[name]
            lost = self._ledger.leave(name)
            for key in lost:
                self._release(key)
            self._note_stall()
            if lost:
                self._on_lost(lost)
            self._paced.ask()

    def _hear(self, name: int, batch: pa.RecordBatch) -> None:
        acked: list[AttemptKey] = []
        granted = False
        for back in decode(batch):
            if back.kind == CREDIT:
                granted = True
                self._ledger.grant(name, back.rows, back.num_bytes)
            elif back.kind == ACK:
                acked.append(back.key)
        removed = self._forget(acked)
        if removed:
            self._stalled_since = None
            self._on_acked(removed)
        if granted:
            self._paced.ask()
            self._on_credit(self.free_rows)

    def _add(self, row: Row, key: AttemptKey, num_bytes: int, needs: str) -> None:
        if key in self:
            return
        trace.mark(self.edge, trace.OFFERED, (key,))
        self._rows[key] = SizedRow(row, num_bytes)
        self._buffered_bytes += num_bytes
        self._ledger.put(key, num_bytes, needs)
        if not self._channels:
            self._note_stall()
        self._paced.ask()

    def _note_stall(self) -> None:
        """Notes since when rows have had no consumer."""
        if self._rows and self._stalled_since is None:
            self._stalled_since = now()

    def _pump(self) -> None:
        """Send what credit allows; what goes to one consumer goes together."""
        sent: dict[int, list[AttemptKey]] = {}
        for name, key in self._ledger.assign():
            sent.setdefault(name, []).append(key)
        for name, assigned in sent.items():
            outgoing = [self._rows[key] for key in assigned]
            for part in together([sized.num_bytes for sized in outgoing]):
                self._channels[name].send(stack([sized.row for sized in outgoing[part]]))
            if not self._redelivered:
                for key in assigned:
                    self._release(key)
            self._on_sent(assigned, self._channels[name].peer)

    def _forget(self, attempts: Iterable[AttemptKey]) -> list[AttemptKey]:
        removed = self._ledger.forget(attempts)
        for key in removed:
            self._release(key)
        return removed

    def _release(self, key: AttemptKey) -> None:
        """Let go of a row's memory and of a `put` that waits for it."""
        _, num_bytes = self._rows.pop(key, (None, 0))
        self._buffered_bytes -= num_bytes
        if not self._rows:
            self._stalled_since = None
        room = self._limit_bytes - self._buffered_bytes
        while self._putting and room > 0:
            waiting = self._putting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
