"""Rows that end together are converted together; what cannot be converted fails alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from prorl.errors import RolloutError
from prorl.schema.columns import ran_columns
from prorl.schema.rows import Added, Row
from prorl.stages.host import Growth
from prorl.types import FailureCode
from tests.flight.rows import ready, trajectory

NUM_ROWS = 5


def added(artefact: object = b"2") -> Added:
    """What RUN adds; an artefact must be bytes."""
    return replace(ran_columns(trajectory(), run_s=0.0), artefact=artefact)  # type: ignore[arg-type]


async def test_rows_that_end_together_become_one_message_in_their_order() -> None:
    growth = Growth()
    grown = await asyncio.gather(*(growth(Row(ready(n), 0), added()) for n in range(NUM_ROWS)))
    assert all(row.batch is grown[0].batch for row in grown)
    assert [(row.place, row.value("rollout_id")) for row in grown] == [
        (n, n) for n in range(NUM_ROWS)
    ]
    later = await growth(Row(ready(9), 0), added())
    assert (later.batch.num_rows, later.value("rollout_id")) == (1, 9)


async def test_a_row_that_cannot_be_converted_fails_alone() -> None:
    growth = Growth()
    work = [growth(Row(ready(n), 0), added(object() if n == 2 else b"2")) for n in range(NUM_ROWS)]
    grown = await asyncio.gather(*work, return_exceptions=True)
    for n, row in enumerate(grown):
        if n == 2:
            assert isinstance(row, RolloutError)
            assert row.code is FailureCode.STAGE_ERROR
        else:
            assert isinstance(row, Row)
            assert row.value("rollout_id") == n


async def test_who_no_longer_waits_keeps_nobody_from_the_result() -> None:
    growth = Growth()
    gone = asyncio.ensure_future(growth(Row(ready(0), 0), added(object())))
    stays = asyncio.ensure_future(growth(Row(ready(1), 0), added()))
    asyncio.get_running_loop().call_soon(gone.cancel)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await stays).value("rollout_id") == 1
