"""The arithmetic of an edge: how much a producer may send, and which consumer has which row.

Pure: no I/O, no clock.

`ProducerCredit` is the producer's book. Rows wait in order; `assign` gives each to the consumer
with most credit; a row has one consumer at a time. On redelivered edges a row stays in the book
until its ack and goes back to the front of the queue when its consumer is lost; on the others it is
never given out twice: a consumer that is lost before its ack loses the row, and `leave` says so.

`ConsumerCredit` is the consumer's book over all its upstreams. With one upstream, credit out plus
rows in hand never exceeds `slots`. With several, together they have at most twice `slots` (and one
row each at least), so that a busy upstream among idle ones still fills half of the slots or more;
an upstream's idle credit above its share is taken back when another joins.

Row credit = granted - received, counted alike at both ends. Byte credit is a window: a grant with
bytes widens (or narrows) it, each row sent shrinks it by its size, and a grant of rows with 0 bytes
refunds what the oldest rows took; the producer counts both, so nothing drifts. A row goes while the
window is positive, so one row larger than the window passes alone. Not promised: fairness between
rows of different size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from prorl.schema import EDGE_BACK
from prorl.types import AttemptKey


def _everything(_: str) -> bool:
    return True


class Assignment(NamedTuple):
    consumer: int
    key: AttemptKey


@dataclass(slots=True)
class _Consumer:
    rows: int = 0
    window_bytes: int = 0
    sizes: deque[int] = field(default_factory=deque)
    """Bytes of rows whose credit has not come back, oldest first."""
    holds: dict[AttemptKey, None] = field(default_factory=dict)
    """Sent and not acked, in the order sent."""
    has: Callable[[str], bool] = _everything
    """Returns whether it has what a row needs; `has("")` is whether it takes rows at all now."""


@dataclass(slots=True)
class _Row:
    num_bytes: int
    consumer: int | None = None
    needs: str = ""
    """The thing that a consumer must have to get it; empty = nothing."""


class ProducerCredit:
    """The producer's book of rows and credit.

    >>> ledger = ProducerCredit(redelivered=True)
    >>> ledger.put(AttemptKey("r", 1, 1), 10); ledger.join(7); ledger.assign()
    []
    >>> ledger.grant(7, rows=1, num_bytes=100); ledger.assign()
    [Assignment(consumer=7, key=AttemptKey(run_id='r', rollout_id=1, attempt=1))]
    >>> ledger.leave(7), ledger.num_waiting
    ([], 1)
    """

    def __init__(self, *, redelivered: bool) -> None:
        self._redelivered = redelivered
        self._rows: dict[AttemptKey, _Row] = {}
        self._waiting: deque[AttemptKey] = deque()
        self._consumers: dict[int, _Consumer] = {}
        self.num_waiting = 0

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._rows

    @property
    def free_rows(self) -> int:
        """Returns how many rows could be put now and sent at once."""
        credit = sum(
            max(0, consumer.rows)
            for consumer in self._consumers.values()
            if consumer.window_bytes > 0 and consumer.has("")
        )
        return max(0, credit - self.num_waiting)

    def waiting(self) -> list[AttemptKey]:
        return [key for key, row in self._rows.items() if row.consumer is None]

    def put(self, key: AttemptKey, num_bytes: int, needs: str = "") -> None:
        """Add a row, which waits for a consumer that has what it `needs`; a known key changes
        nothing.
        """
        if key not in self._rows:
            self._rows[key] = _Row(num_bytes, needs=needs)
            self._waiting.append(key)
            self.num_waiting += 1

    def join(self, consumer: int, has: Callable[[str], bool] = _everything) -> None:
        """Add a consumer without credit. `has` tells whether it has what a row needs."""
        self._consumers[consumer] = _Consumer(has=has)

    def free_for(self, needs: str) -> int | None:
        """Returns how many rows that need this could be sent now; None when no consumer has it."""
        able = [account for account in self._consumers.values() if account.has(needs)]
        credit = sum(max(0, account.rows) for account in able if account.window_bytes > 0)
        waiting = sum(row.needs == needs for row in self._rows.values() if row.consumer is None)
        return max(0, credit - waiting) if able else None

    def unplaceable(self) -> list[AttemptKey]:
        return [key for key in self._rows if self.lacks(key)]

    def lacks(self, key: AttemptKey) -> bool:
        """Returns whether a row waits for something that no consumer has."""
        row = self._rows.get(key)
        if row is None or not row.needs or row.consumer is not None:
            return False
        return not any(account.has(row.needs) for account in self._consumers.values())

    def grant(self, consumer: int, rows: int, num_bytes: int) -> None:
        """Add credit that a consumer gives. Negative rows take it back; if it was used meanwhile,
        later credit makes up for it.
        """
        account = self._consumers[consumer]
        account.rows += rows
        if num_bytes:
            account.window_bytes += num_bytes
        else:
            account.window_bytes += sum(
                account.sizes.popleft() for _ in range(min(rows, len(account.sizes)))
            )

    def assign(self) -> list[Assignment]:
        assignments: list[Assignment] = []
        passed: list[AttemptKey] = []
        while self._waiting:
            key = self._waiting.popleft()
            row = self._rows.get(key)
            if row is None or row.consumer is not None:
                continue
            best = self._richest(row.needs)
            if best is None:
                passed.append(key)
                if not row.needs:
                    break
                continue
            account = self._consumers[best]
            account.rows -= 1
            account.window_bytes -= row.num_bytes
            account.sizes.append(row.num_bytes)
            account.holds[key] = None
            row.consumer = best
            self.num_waiting -= 1
            assignments.append(Assignment(best, key))
        self._waiting.extendleft(reversed(passed))
        return assignments

    def _richest(self, needs: str) -> int | None:
        able = [
            (account.rows, -consumer)
            for consumer, account in self._consumers.items()
            if account.rows > 0 < account.window_bytes and account.has(needs)
        ]
        return -max(able)[1] if able else None

    def forget(self, keys: Iterable[AttemptKey]) -> list[AttemptKey]:
        """Remove rows that were acked or dropped. Returns those that were in the book."""
        removed: list[AttemptKey] = []
        for key in keys:
            row = self._rows.pop(key, None)
            if row is None:
                continue
            removed.append(key)
            if row.consumer is None:
                self.num_waiting -= 1
            else:
                self._consumers[row.consumer].holds.pop(key, None)
        return removed

    def leave(self, consumer: int) -> list[AttemptKey]:
        """Remove a consumer. Its unacked rows wait again, in front; where nothing is redelivered,
        they are lost. Returns the lost ones.
        """
        holds = list(self._consumers.pop(consumer).holds)
        if not self._redelivered:
            for key in holds:
                del self._rows[key]
            return holds
        for key in holds:
            self._rows[key].consumer = None
        self._waiting.extendleft(reversed(holds))
        self.num_waiting += len(holds)
        return []


class Grant(NamedTuple):
    upstream: int
    rows: int
    num_bytes: int


@dataclass(slots=True)
class _Upstream:
    granted: int = 0
    """Credit that no row has come for yet; negative when rows that had left crossed a credit that
    was taken back.
    """
    in_hand: int = 0
    returned: int = 0
    """Rows done whose credit has not been granted again."""


class ConsumerCredit:
    """The consumer's book of the credit that it gave.

    >>> grants = ConsumerCredit(slots=2, window_bytes=100)
    >>> grants.join(0); grants.top_up()
    [Grant(upstream=0, rows=2, num_bytes=100)]
    >>> grants.received(0, 1); grants.top_up()
    []
    >>> grants.done(0); grants.top_up()
    [Grant(upstream=0, rows=1, num_bytes=0)]
    """

    def __init__(self, *, slots: int, window_bytes: int) -> None:
        self._slots = slots
        self._row_bytes = max(1, window_bytes // slots)
        self._upstreams: dict[int, _Upstream] = {}
        self._orphans = 0
        self._closed = False

    @property
    def in_hand(self) -> int:
        return self._orphans + sum(upstream.in_hand for upstream in self._upstreams.values())

    def join(self, upstream: int) -> None:
        self._upstreams[upstream] = _Upstream()

    def leave(self, upstream: int) -> None:
        """Remove an upstream; its rows in hand go on taking slots."""
        self._orphans += self._upstreams.pop(upstream).in_hand

    def adopt(self, rows: int) -> None:
        """Count rows in hand that no present upstream's credit covers: they take slots alone."""
        self._orphans += rows

    def received(self, upstream: int, rows: int) -> None:
        account = self._upstreams[upstream]
        account.granted -= rows
        account.in_hand += rows

    def done(self, upstream: int) -> None:
        account = self._upstreams.get(upstream)
        if account is None:
            self._orphans -= 1
        else:
            account.in_hand -= 1
            account.returned += 1

    def top_up(self) -> list[Grant]:
        """Returns the credit to send now, which brings each upstream back to its share."""
        if self._closed or not self._upstreams:
            return []
        count = len(self._upstreams)
        limit = self._slots if count < 2 else max(2 * self._slots, count)
        share = limit // count
        grants = self._take_back(share)
        room = limit - self.in_hand - sum(upstream.granted for upstream in self._upstreams.values())
        for name, account in self._upstreams.items():
            rows = min(room, share - account.granted - account.in_hand)
            if rows > 0:
                room -= rows
                grants += self._grant(name, account, rows)
        return grants

    def _take_back(self, share: int) -> list[Grant]:
        """Returns grants that take back idle credit above an upstream's share, for a later one."""
        grants: list[Grant] = []
        for name, account in self._upstreams.items():
            rows = min(account.granted, account.granted + account.in_hand - share)
            if rows > 0:
                account.granted -= rows
                grants.append(Grant(name, -rows, -rows * self._row_bytes))
        return grants

    def _grant(self, name: int, account: _Upstream, rows: int) -> list[Grant]:
        account.granted += rows
        back = min(rows, account.returned)
        account.returned -= back
        fresh = rows - back
        both = (Grant(name, back, 0), Grant(name, fresh, fresh * self._row_bytes))
        return [grant for grant in both if grant.rows]

    def close(self) -> list[Grant]:
        """Take nothing more. Returns the grants that take all idle credit back; rows that are on
        their way still come.
        """
        self._closed = True
        return self._take_back(0)


# ---- what an edge says backwards: EDGE_BACK batches

CREDIT = "credit"
ACK = "ack"

NO_KEY = AttemptKey("", -1, -1)


class Back(NamedTuple):
    """One row of EDGE_BACK: credit or an ack that goes upstream."""

    kind: str
    rows: int = 0
    num_bytes: int = 0
    key: AttemptKey = NO_KEY


_STRUCT = pa.struct(list(EDGE_BACK))


def encode(messages: Sequence[Back]) -> pa.RecordBatch:
    """Returns the messages as one record batch.

    >>> decode(encode([Back(CREDIT, 2, 100)])) == [Back(CREDIT, 2, 100)]
    True
    """
    rows = [(kind, rows, num_bytes, *key) for kind, rows, num_bytes, key in messages]
    return pa.RecordBatch.from_arrays(pa.array(rows, _STRUCT).flatten(), schema=EDGE_BACK)


def decode(batch: pa.RecordBatch) -> list[Back]:
    columns = (column.to_pylist() for column in batch.columns)
    return [
        Back(kind, rows, num_bytes, AttemptKey(run_id, rollout_id, attempt))
        for kind, rows, num_bytes, run_id, rollout_id, attempt in zip(*columns, strict=True)
    ]
