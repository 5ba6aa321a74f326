"""Properties of the two books: credit is conserved, a row has one consumer at a time, nothing is
lost or given twice.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.flight.credit import ConsumerCredit, Grant, ProducerCredit
from prorl.types import AttemptKey

WINDOW = 1000


def key(n: int) -> AttemptKey:
    return AttemptKey("r", n, 1)


class Wire:
    """A producer's ledger and a consumer's grants per side, joined by queues that can be cut."""

    def __init__(self, redelivered: bool, num_producers: int, slots: int) -> None:
        self.ledgers = [ProducerCredit(redelivered=redelivered) for _ in range(num_producers)]
        self.grants = ConsumerCredit(slots=slots, window_bytes=WINDOW)
        self.links: dict[int, int] = {}
        self.down: dict[int, deque[Grant]] = {}
        self.up: dict[int, deque[AttemptKey]] = {}
        self.hand: list[tuple[int, AttemptKey]] = []
        self.next_link = 0

    def join(self, producer: int) -> None:
        link = self.next_link
        self.next_link += 1
        self.links[link] = producer
        self.down[link], self.up[link] = deque(), deque()
        self.ledgers[producer].join(link)
        self.grants.join(link)
        self.top_up()

    def top_up(self) -> None:
        for grant in self.grants.top_up():
            self.down[grant.upstream].append(grant)

    def leave(self, link: int) -> list[AttemptKey]:
        producer = self.links.pop(link)
        del self.down[link], self.up[link]
        self.grants.leave(link)
        self.top_up()
        return self.ledgers[producer].leave(link)

    def deliver_credit(self, link: int) -> None:
        if self.down[link]:
            grant = self.down[link].popleft()
            self.ledgers[self.links[link]].grant(link, grant.rows, grant.num_bytes)

    def assign(self, producer: int) -> None:
        for consumer, sent in self.ledgers[producer].assign():
            self.up[consumer].append(sent)

    def deliver_row(self, link: int) -> AttemptKey | None:
        if not self.up[link]:
            return None
        got = self.up[link].popleft()
        self.grants.received(link, 1)
        self.hand.append((link, got))
        return got

    def finish(self, index: int) -> tuple[int, AttemptKey]:
        link, got = self.hand.pop(index)
        self.grants.done(link)
        self.top_up()
        return link, got


events = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(1, 400)), max_size=120
)


@settings(max_examples=150, deadline=None)
@given(events, st.booleans(), st.integers(1, 3), st.integers(1, 6))
def test_credit_is_conserved_and_every_row_has_a_single_fate(
    story: list[tuple[int, int, int]], redelivered: bool, num_producers: int, slots: int
) -> None:
    wire = Wire(redelivered, num_producers, slots)
    put: dict[AttemptKey, int] = {}
    acked: set[AttemptKey] = set()
    lost: set[AttemptKey] = set()
    most_upstreams = 1

    def ack(link: int, got: AttemptKey) -> None:
        if link in wire.links:
            forgotten = wire.ledgers[wire.links[link]].forget([got])
            assert redelivered or forgotten == [got]
            acked.update(forgotten)

    for verb, which, size in story:
        links = sorted(wire.links)
        match verb:
            case 0:
                new = key(len(put))
                put[new] = which % num_producers
                wire.ledgers[put[new]].put(new, size)
            case 1:
                wire.join(which % num_producers)
                most_upstreams = max(most_upstreams, len(wire.links))
            case 2 if links:
                lost.update(wire.leave(links[which % len(links)]))
            case 3 if links:
                wire.deliver_credit(links[which % len(links)])
            case 4:
                wire.assign(which % num_producers)
            case 5 if links:
                got = wire.deliver_row(links[which % len(links)])
                if got is not None and not redelivered:
                    ack(wire.hand[-1][0], got)
            case 6 if wire.hand:
                link, got = wire.finish(which % len(wire.hand))
                if redelivered:
                    ack(link, got)
        check_books(wire, slots, most_upstreams)

    for name in put:
        ledger = wire.ledgers[put[name]]
        assert (name in ledger) + (name in acked) + (name in lost) == 1


def check_books(wire: Wire, slots: int, most_upstreams: int) -> None:
    for link, producer in wire.links.items():
        account = wire.ledgers[producer]._consumers[link]
        in_flight = sum(grant.rows for grant in wire.down[link]) + len(wire.up[link])
        assert wire.grants._upstreams[link].granted == account.rows + in_flight
        assert account.rows >= 0 or most_upstreams > 1
    promised = wire.grants.in_hand + sum(
        upstream.granted for upstream in wire.grants._upstreams.values()
    )
    if most_upstreams == 1:
        assert promised <= slots or wire.grants._orphans > 0
    row_keys = [
        name
        for ledger in wire.ledgers
        for account in ledger._consumers.values()
        for name in account.holds
    ]
    assert len(row_keys) == len(set(row_keys))


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60), st.integers(1, 8))
def test_never_more_is_sent_than_granted_in_rows_or_bytes(sizes: list[int], rows: int) -> None:
    ledger = ProducerCredit(redelivered=True)
    ledger.join(1)
    for n, size in enumerate(sizes):
        ledger.put(key(n), size)
    ledger.grant(1, rows, WINDOW)
    sent = [assignment.key.rollout_id for assignment in ledger.assign()]
    assert sent == list(range(len(sent)))
    assert len(sent) <= rows
    assert sum(sizes[n] for n in sent[:-1]) < WINDOW
    whole = len(sent) == min(rows, len(sizes))
    assert whole or sum(sizes[n] for n in sent) >= WINDOW


def test_rows_go_to_the_consumer_with_most_credit() -> None:
    ledger = ProducerCredit(redelivered=True)
    for consumer, rows in ((1, 1), (2, 3)):
        ledger.join(consumer)
        ledger.grant(consumer, rows, WINDOW)
    for n in range(5):
        ledger.put(key(n), 1)
    assert [assignment.consumer for assignment in ledger.assign()] == [2, 2, 1, 2]


def test_a_late_upstream_gets_credit_that_idle_ones_hold() -> None:
    grants = ConsumerCredit(slots=3, window_bytes=300)
    for upstream in range(5):
        grants.join(upstream)
        grants.top_up()
    assert all(grants._upstreams[upstream].granted >= 1 for upstream in range(5))
    assert sum(grants._upstreams[upstream].granted for upstream in range(5)) <= 6


def test_closing_takes_idle_credit_back() -> None:
    grants = ConsumerCredit(slots=4, window_bytes=400)
    grants.join(0)
    grants.top_up()
    grants.received(0, 1)
    assert grants.close() == [Grant(0, -3, -300)]
    grants.done(0)
    assert grants.top_up() == []


def joined(ledger: ProducerCredit, consumer: int, rows: int, num_bytes: int, *has: str) -> None:
    """A consumer with this credit, that has these things (and takes rows that need nothing)."""
    ledger.join(consumer, lambda needs: not needs or needs in has)
    ledger.grant(consumer, rows, num_bytes)


def test_free_rows_are_the_credit_of_who_has_a_window_less_what_waits() -> None:
    ledger = ProducerCredit(redelivered=True)
    ledger.put(key(0), 1)
    assert (ledger.free_rows, ledger.num_waiting) == (0, 1), "no credit is not less than none"
    joined(ledger, 1, 3, WINDOW)
    assert ledger.free_rows == 2
    joined(ledger, 2, -2, WINDOW)
    joined(ledger, 3, 5, 0)
    ledger.join(4, lambda needs: False)
    ledger.grant(4, 5, WINDOW)
    assert ledger.free_rows == 2, "owed rows, a closed window, one that takes nothing now"
    joined(ledger, 5, 1, 1)
    assert ledger.free_rows == 3
    ledger.assign()
    assert ledger.free_rows == 3


def test_what_is_free_for_a_need_is_counted_among_those_who_have_it() -> None:
    ledger = ProducerCredit(redelivered=True)
    joined(ledger, 1, 9, WINDOW)
    assert ledger.free_for("gpu") is None, "nobody has it: not the same as nobody has room"
    joined(ledger, 2, 3, 1, "gpu")
    joined(ledger, 3, -2, WINDOW, "gpu")
    joined(ledger, 4, 5, 0, "gpu")
    assert ledger.free_for("gpu") == 3
    ledger.put(key(0), 1, "gpu")
    ledger.put(key(1), 1)
    assert ledger.free_for("gpu") == 2, "what needs something else does not wait for these"
    for n in range(2, 9):
        ledger.put(key(n), 1, "gpu")
    assert ledger.free_for("gpu") == 0
    assert len(ledger.assign()) == 2, "one fits the window of one byte, one needs nothing"
    ledger.grant(2, 7, WINDOW)
    ledger.assign()
    assert ledger.waiting() == []
    assert ledger.free_for("gpu") == 2, "what was sent waits no more"


def test_a_row_lacks_what_nobody_has_until_somebody_comes_who_has_it() -> None:
    ledger = ProducerCredit(redelivered=True)
    for n, needs in enumerate(("", "gpu", "image", "gpu")):
        ledger.put(key(n), 1, needs)
    joined(ledger, 1, 9, WINDOW, "image")
    assert ledger.unplaceable() == [key(1), key(3)]
    assert not ledger.lacks(key(7)), "a row that is not in the book"
    joined(ledger, 2, 1, WINDOW, "gpu")
    assert ledger.unplaceable() == [], "somebody has it, if without room"
    ledger.assign()
    ledger.join(2)
    ledger.join(1, lambda needs: False)
    ledger.join(2, lambda needs: False)
    assert ledger.unplaceable() == [key(3)], "what was sent lacks nothing"


def test_what_nobody_can_take_lets_others_pass_and_keeps_its_place() -> None:
    ledger = ProducerCredit(redelivered=True)
    for n, needs in enumerate(("gpu", "", "gpu", "image")):
        ledger.put(key(n), 1, needs)
    joined(ledger, 1, 9, WINDOW, "image")
    assert [assignment.key for assignment in ledger.assign()] == [key(1), key(3)]
    assert ledger.waiting() == [key(0), key(2)]
    joined(ledger, 2, 9, WINDOW, "gpu")
    assert [assignment.key for assignment in ledger.assign()] == [key(0), key(2)]


def test_a_window_that_is_used_up_sends_nothing_until_the_oldest_row_came_back() -> None:
    ledger = ProducerCredit(redelivered=True)
    joined(ledger, 1, 5, 5)
    for n, size in enumerate((2, 3, 4)):
        ledger.put(key(n), size)
    assert [assignment.key for assignment in ledger.assign()] == [key(0), key(1)]
    assert ledger._consumers[1].window_bytes == 0
    ledger.grant(1, 1, 0)
    assert ledger._consumers[1].window_bytes == 2, "of the oldest, and only of that"
    assert [assignment.key for assignment in ledger.assign()] == [key(2)]


def test_what_was_forgotten_is_not_sent_and_what_came_again_is_sent_once() -> None:
    ledger = ProducerCredit(redelivered=True)
    for n in (0, 1, 1):
        ledger.put(key(n), 1)
    assert ledger.num_waiting == 2
    assert ledger.forget([key(9), key(0), key(1)]) == [key(0), key(1)]
    assert ledger.num_waiting == 0
    ledger.put(key(1), 1)
    joined(ledger, 1, 5, WINDOW)
    assert [assignment.key for assignment in ledger.assign()] == [key(1)]
    assert ledger.num_waiting == 0
    assert ledger.forget([key(1)]) == [key(1)]
    assert ledger.num_waiting == 0
    assert ledger.leave(1) == []
    assert (ledger.waiting(), ledger.free_rows) == ([], 0)


def test_a_lost_consumers_rows_wait_again_in_front() -> None:
    ledger = ProducerCredit(redelivered=True)
    joined(ledger, 1, 2, WINDOW)
    for n in range(4):
        ledger.put(key(n), 1)
    ledger.assign()
    assert ledger.leave(1) == []
    assert (ledger.num_waiting, ledger.waiting()) == (4, [key(n) for n in range(4)])
    joined(ledger, 2, 4, WINDOW)
    assert [assignment.key.rollout_id for assignment in ledger.assign()] == [0, 1, 2, 3]


def test_where_nothing_is_redelivered_a_lost_consumer_loses_its_rows() -> None:
    ledger = ProducerCredit(redelivered=False)
    joined(ledger, 1, 2, WINDOW)
    for n in range(3):
        ledger.put(key(n), 1)
    ledger.assign()
    assert ledger.leave(1) == [key(0), key(1)]
    assert [n for n in range(3) if key(n) in ledger] == [2]
    assert ledger.num_waiting == 1
