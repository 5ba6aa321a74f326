"""Rows in their messages: any choice in any order is stacked as it is, neighbours without a copy;
growing keeps what is there.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.schema import LEASED, RAN, READY
from prorl.schema.columns import (
    RanColumns,
    ReadyColumns,
    ScoredColumns,
    keys,
    ran_columns,
    ready_columns,
)
from prorl.schema.rows import Added, Row, grow, row_hashes, rows, stack
from prorl.types import SandboxRef, Trajectory
from tests import strategies as ours
from tests.flight.work_rows import leased, ran, ready, trajectory

MESSAGES = (leased(0, 1, 2, 3), leased(4), leased(5, 6))


@given(
    st.lists(
        st.sampled_from([row for message in MESSAGES for row in rows(message)]),
        min_size=1,
        max_size=12,
    )
)
def test_any_rows_in_any_order_are_stacked_as_they_are(chosen: list[Row]) -> None:
    stacked = stack(chosen)
    stacked.validate(full=True)
    assert row_hashes(stacked) == [row_hashes(row.as_batch)[0] for row in chosen]


def test_neighbours_are_stacked_without_a_copy() -> None:
    batch = leased(*range(6))
    stacked = stack(rows(batch)[1:5])
    assert [key.rollout_id for key in keys(stacked)] == [1, 2, 3, 4]
    for ours_, theirs in zip(stacked.columns, batch.columns, strict=True):
        assert [b.address for b in ours_.buffers() if b] == [
            b.address for b in theirs.buffers() if b
        ]


@given(st.lists(ours.trajectories, min_size=1, max_size=4))
def test_rows_that_grow_together_are_as_if_each_had_grown_alone(
    trajectories: list[Trajectory],
) -> None:
    before = [Row(ready(n), 0) for n in range(len(trajectories))]
    added = [ran_columns(each, run_s=0.5) for each in trajectories]
    together = grow(before, added)
    together.validate(full=True)
    assert together.schema.equals(RAN, check_metadata=True)
    alone = [grow([row], [more]) for row, more in zip(before, added, strict=True)]
    assert row_hashes(together) == [row_hashes(row)[0] for row in alone]


@pytest.mark.parametrize(
    ("before", "added"), [(LEASED, ReadyColumns), (READY, RanColumns), (RAN, ScoredColumns)]
)
def test_what_a_stage_adds_has_a_field_for_each_column(
    before: pa.Schema, added: type[Added]
) -> None:
    names = before.names + [field.name for field in fields(added)]
    assert sorted(names) == sorted(added.schema.names)


@pytest.mark.parametrize("names", [(), ("share",), ("share", "repeats")])
def test_a_stage_adds_as_many_columns_as_it_likes(names: tuple[str, ...]) -> None:
    after = pa.schema([*RAN, *(pa.field(name, pa.float64(), nullable=False) for name in names)])
    critic = make_dataclass(
        "Critic",
        [(name, float) for name in names],
        bases=(Added,),
        namespace={"schema": after},
        kw_only=True,
        frozen=True,
    )
    grown = grow([Row(ran(0), 0)], [critic(**dict.fromkeys(names, 0.5))])
    assert grown.schema.equals(after)
    assert [grown.column(name).to_pylist() for name in names] == [[0.5]] * len(names)


def test_growing_shares_the_columns_that_are_there() -> None:
    batch = leased(0, 1, 2)
    grown = grow(
        rows(batch),
        [
            ready_columns(sandbox=SandboxRef(), prompt=(), tools=(), init_s=float(n))
            for n in range(3)
        ],
    )
    assert grown.schema.equals(READY, check_metadata=True)
    for name in LEASED.names:
        assert [b.address for b in grown.column(name).buffers() if b] == [
            b.address for b in batch.column(name).buffers() if b
        ]
    assert [row.value("init_s") for row in rows(grown)] == [0.0, 1.0, 2.0]


def test_what_is_added_says_about_its_weight() -> None:
    small, large = (ran_columns(trajectory(num_tokens), run_s=0.5) for num_tokens in (8, 80_008))
    assert 80_000 * 4 * 1.5 <= large.num_bytes - small.num_bytes <= 80_000 * 4 * 1.6
    assert small.num_bytes == pytest.approx(
        sum(ran(0).column(i).nbytes for i in range(len(READY), len(RAN))), rel=0.5
    )


def test_a_value_that_does_not_fit_its_column_is_refused() -> None:
    bad = replace(ran_columns(trajectory(), run_s=0.5), artifact="not bytes \ud800")  # type: ignore[arg-type]
    with pytest.raises((UnicodeEncodeError, pa.ArrowException)):
        grow([Row(ready(0), 0)], [bad])
