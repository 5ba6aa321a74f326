"""One-row batches of every edge for tests, grown by the functions that the stages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import pyarrow as pa

from prorl.flight import Outlet
from prorl.flight.queues import wire_bytes
from prorl.schema import LEASED
from prorl.schema.columns import Lease, keys, ran_columns, ready_columns, scored_columns
from prorl.schema.rows import Added, Row, grow
from prorl.task_json import task_to_json
from prorl.types import Failure, Json, Message, SandboxRef, Score, ToolSpec, Trajectory


def only(batch: pa.RecordBatch) -> Row:
    """The row of a one-row batch."""
    assert batch.num_rows == 1
    return Row(batch, 0)


def grown(row: pa.RecordBatch, added: Added) -> pa.RecordBatch:
    """The next edge's row."""
    return grow([only(row)], [added])


def leased_batch(leases: Iterable[Lease]) -> pa.RecordBatch:
    """LEASED rows, as the gateway's `service/core/leases.py` makes them of its records."""
    return pa.RecordBatch.from_pylist([_leased(lease) for lease in leases], schema=LEASED)


def _leased(lease: Lease) -> dict[str, Json]:
    return {
        **{name: getattr(lease, name) for name in LEASED.names if hasattr(lease, name)},
        **lease.key._asdict(),
        "task_id": lease.task.task_id,
        "data_source": lease.task.data_source,
        "task": task_to_json(lease.task),
        "env": lease.task.env,
        "sampling": asdict(lease.sampling),
        "limits": asdict(lease.limits),
    }


def ready_row(
    row: pa.RecordBatch,
    *,
    sandbox: SandboxRef,
    prompt: Sequence[Message],
    tools: Sequence[ToolSpec],
    init_s: float,
    responds: bool = False,
) -> pa.RecordBatch:
    """LEASED -> READY."""
    added = ready_columns(
        sandbox=sandbox, prompt=prompt, tools=tools, init_s=init_s, responds=responds
    )
    return grown(row, added)


def ran_row(row: pa.RecordBatch, trajectory: Trajectory, *, run_s: float) -> pa.RecordBatch:
    """READY -> RAN."""
    return grown(row, ran_columns(trajectory, run_s=run_s))


def scored_row(
    row: pa.RecordBatch, *, score: Score | None, failure: Failure, eval_s: float, trace: str = ""
) -> pa.RecordBatch:
    """RAN -> SCORED."""
    return grown(row, scored_columns(score=score, failure=failure, eval_s=eval_s, trace=trace))


async def put(outlet: Outlet, batch: pa.RecordBatch) -> None:
    """Offer the row of a one-row batch."""
    await outlet.put(only(batch), keys(batch)[0], wire_bytes(batch))
