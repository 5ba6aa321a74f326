"""Tickets, plans and cursors: round trips, and one clear line for what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.errors import ConflictError, UserError
from prorl.flight.ticket import Cursor, ReadPlan, Ticket

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
seqs = st.integers(0, 2**40)
tickets = names.flatmap(
    lambda run: st.builds(
        Ticket,
        run=st.just(run),
        consumer=names,
        cursor=st.just("") | seqs.map(lambda seq: str(Cursor(run, seq))),
        max_bytes=st.integers(1, 2**62),
        max_groups=st.integers(0, 9),
        wait_s=st.floats(0, 3600),
        columns=st.lists(names).map(tuple),
        layout=st.sampled_from(["packed", "dense"]),
    )
)
plans = st.builds(
    ReadPlan,
    cursor=names,
    num_groups=st.integers(0, 9),
    end=st.booleans(),
    boot_id=names,
    path=names,
    batches=st.lists(st.tuples(seqs, seqs), max_size=4).map(tuple),
)


@given(tickets | plans)
def test_tickets_and_plans_survive_the_wire(payload: Ticket | ReadPlan) -> None:
    assert type(payload).parse(payload.dumps()) == payload


@given(names, seqs)
def test_a_cursor_survives_as_text(run: str, seq: int) -> None:
    assert Cursor.parse(str(Cursor(run, seq)), run) == (run, seq)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff", "malformed"),
        (b"[]", "Expected `object`"),
        (b"{}", "required field `run`"),
        (b'{"run": "a", "colums": []}', "unknown field `colums`"),
        (b'{"run": "a", "max_bytes": "1"}', "got `str` - at `..max_bytes`"),
        (b'{"run": "a", "max_bytes": true}', "got `bool` - at `..max_bytes`"),
        (b'{"run": "a", "max_bytes": 0}', ">= 1 - at `..max_bytes`"),
        (b'{"run": "a", "wait_s": -1}', "wait_s"),
        (b'{"run": "a", "layout": "wide"}', "layout"),
        (b'{"run": "a", "cursor": "12"}', "RUN@SEQ"),
    ],
)
def test_a_bad_ticket_says_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Ticket.parse(data)


def test_a_cursor_of_another_run_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match="belongs to run 'b'"):
        Ticket.parse(b'{"run": "a", "cursor": "b@1"}')


def test_an_answer_that_is_no_plan_is_refused() -> None:
    with pytest.raises(UserError, match="is this a prorl store"):
        ReadPlan.parse(b'{"cursor": "a@1"}')
