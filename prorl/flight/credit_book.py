"""The consumer's side of credit: what it grants to each upstream, and what is in hand.

Pure: no I/O, no clock, no batches.

`CreditBook` is the consumer's book over all its upstreams. With one upstream, credit out plus rows
in hand never exceeds `slots`. With several, together they have at most twice `slots` (and one row
each at least), so that a busy upstream among idle ones still fills half of the slots or more; an
upstream's idle credit above its share is taken back when another joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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


class CreditBook:
    """The consumer's book of the credit that it gave.

    >>> grants = CreditBook(slots=2, window_bytes=100)
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
        """Rows received and not done."""
        return self._orphans + sum(upstream.in_hand for upstream in self._upstreams.values())

    @property
    def limit(self) -> int:
        """Rows in hand and on their way that all upstreams may have together."""
        count = len(self._upstreams)
        return self._slots if count < 2 else max(2 * self._slots, count)

    def join(self, upstream: int) -> None:
        """An upstream that has no credit yet."""
        self._upstreams[upstream] = _Upstream()

    def leave(self, upstream: int) -> None:
        """An upstream is gone; its rows in hand go on taking slots."""
        self._orphans += self._upstreams.pop(upstream).in_hand

    def adopt(self, rows: int) -> None:
        """Rows that came from an upstream of an earlier life: they take slots, and no credit."""
        self._orphans += rows

    def received(self, upstream: int, rows: int) -> None:
        """Count rows that came from an upstream against what it was granted."""
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
        """The credit to send to each upstream now: what brings it back to its share."""
        if self._closed or not self._upstreams:
            return []
        limit = self.limit
        share = limit // len(self._upstreams)
        grants = self._take_back(share)
        room = limit - self.in_hand - sum(upstream.granted for upstream in self._upstreams.values())
        for name, account in self._upstreams.items():
            rows = min(room, share - account.granted - account.in_hand)
            if rows > 0:
                room -= rows
                grants += self._grant(name, account, rows)
        return grants

    def _take_back(self, share: int) -> list[Grant]:
        """Idle credit above an upstream's share, so that a later upstream gets its own."""
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
        """Take nothing more: the credit to take back. Rows that are on their way still come."""
        self._closed = True
        return self._take_back(0)
