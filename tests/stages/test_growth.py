"""Rows that end together are converted together; what cannot be converted fails alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from prorl.schema.columns import ran_columns
from prorl.schema.rows import Added, Row
from prorl.stages.host import Growth
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
