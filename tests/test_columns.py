"""Record <-> row <-> table: nothing is lost, nothing is copied that need not be, invalid rows are
named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.schema import RAN, READY, SCORED, SEQUENCES, check_schema, columns
from prorl.schema.columns import Lease
from prorl.schema.fields import SEQUENCE
from prorl.schema.rows import row_hashes, rows
from prorl.schema.sequences import dense, read_sequences, sequence_values, validate_sequences
from prorl.types import (
    Failure,
    Message,
    SandboxRef,
    Score,
    Sequence,
    SpanKind,
    ToolSpec,
    Trajectory,
)
from tests import strategies as mine
from tests.edge_rows import leased_batch, only, ran_row, ready_row, scored_row

NAMES = (
    "token_ids_L",
    "logprobs_C",
    "span_end_S",
    "span_kind_S",
    "span_version_S",
    "span_turn_S",
    "span_temperature_S",
)


def sequences_table(sequences: list[Sequence]) -> pa.RecordBatch:
    structs = pa.array([sequence_values(s) for s in sequences], SEQUENCE)
    count = len(sequences)
    arrays = {
        "sequence_id": pa.array(range(count), pa.int64()),
        "rollout_id": pa.array(range(count), pa.int64()),
        "group_id": pa.array([0] * count, pa.int64()),
        "sample_index": pa.array(range(count), pa.int32()),
        "attempt": pa.array([1] * count, pa.int32()),
        "reward": pa.array([0.5] * count, pa.float32()),
    }
    return pa.RecordBatch.from_arrays(
        [arrays.get(n) or structs.field(n) for n in SEQUENCES.names], schema=SEQUENCES
    )


@given(mine.leases)
def test_lease_round_trip(lease: Lease) -> None:
    batch = leased_batch([lease])
    batch.validate(full=True)
    assert columns.read_lease(only(batch)) == lease
    assert columns.keys(batch) == [lease.key]


@given(st.lists(mine.leases, min_size=2, max_size=3))
def test_a_budget_is_read_from_any_row_of_a_batch(leases: list[Lease]) -> None:
    leased_rows = rows(leased_batch(leases))
    assert [columns.read_limit(row, "eval_s") for row in leased_rows] == [
        lease.limits.eval_s for lease in leases
    ]


@given(
    mine.leases,
    mine.sandboxes,
    st.lists(mine.messages, max_size=3),
    st.lists(mine.specs, max_size=2),
    mine.trajectories,
    mine.scores | st.none(),
    mine.failures,
)
def test_a_row_grows_without_losing_anything(
    lease: Lease,
    sandbox: SandboxRef,
    prompt: list[Message],
    tools: list[ToolSpec],
    trajectory: Trajectory,
    score: Score | None,
    failure: Failure,
) -> None:
    ready = ready_row(
        leased_batch([lease]), sandbox=sandbox, prompt=prompt, tools=tools, init_s=1.5
    )
    ran = ran_row(ready, trajectory, run_s=2.5)
    scored = scored_row(ran, score=score, failure=failure, eval_s=0.5)
    for row, schema in ((ready, READY), (ran, RAN), (scored, SCORED)):
        check_schema(row.schema, schema, "row")
        row.validate(full=True)
    read = columns.read_ready(only(scored))
    assert (read.lease, read.sandbox, read.prompt, read.tools) == (
        lease,
        sandbox,
        tuple(prompt),
        tuple(tools),
    )
    assert columns.read_failure(only(scored)) == trajectory.failure
    assert columns.read_failure(only(scored), "eval_") == failure
    got = read_sequences(scored.column("sequences")[0].values)
    for mine_, theirs in zip(trajectory.sequences, got, strict=True):
        assert all(np.array_equal(getattr(mine_, name), getattr(theirs, name)) for name in NAMES)
    if score:
        assert scored.column("reward")[0].as_py() == pytest.approx(np.float32(score.reward))


@given(st.lists(mine.sequences(), min_size=1, max_size=5), st.integers(0, 4))
def test_dense_agrees_with_the_spans_token_by_token(sequences: list[Sequence], start: int) -> None:
    batch = sequences_table(sequences).slice(start)
    wide = dense(batch)
    wide.validate(full=True)
    for row, sequence in zip(wide.to_pylist(), sequences[start:], strict=True):
        begin, used = 0, 0
        for end, kind, version in zip(
            sequence.span_end_S, sequence.span_kind_S, sequence.span_version_S, strict=True
        ):
            width = int(end) - begin
            assert row["loss_mask"][begin:end] == [int(kind == SpanKind.TRAINED)] * width
            assert row["versions"][begin:end] == [int(version)] * width
            expected = sequence.logprobs_C[used : used + width].tolist() if kind else [0.0] * width
            assert row["logprobs"][begin:end] == expected
            used += width if kind else 0
            begin = int(end)
        assert row["token_ids"] == sequence.token_ids_L.tolist()


@given(st.lists(mine.sequences(), min_size=1, max_size=5))
def test_valid_sequences_are_valid_and_hash_by_value(sequences: list[Sequence]) -> None:
    batch = sequences_table(sequences)
    assert validate_sequences(batch) == [""] * len(sequences)
    hashes = row_hashes(batch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.slice(len(sequences) - 1))
    copy = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    assert row_hashes(copy) == hashes[-1:]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logprobs_C": np.array([np.nan, -1], np.float32)}, "not finite"),
        ({"logprobs_C": np.array([0.1, -1], np.float32)}, "above 0"),
        ({"logprobs_C": np.array([-1], np.float32)}, "2 sampled tokens, 1 logprobs"),
        ({"span_end_S": np.array([2, 3], np.int32)}, "spans end at 3 of 4"),
        ({"span_end_S": np.array([4, 4], np.int32)}, "do not ascend"),
        ({"span_version_S": np.array([0, 0], np.int32)}, "version on context"),
        ({"span_version_S": np.array([-1, -1], np.int32)}, "none on tokens that train"),
        ({"token_ids_L": np.zeros(0, np.int32)}, "no tokens"),
    ],
)
def test_an_invalid_sequence_is_named(change: dict[str, np.ndarray], problem: str) -> None:
    fields: dict[str, Any] = {
        "token_ids_L": np.arange(4, dtype=np.int32),
        "logprobs_C": np.array([-1, -2], np.float32),
        "span_end_S": np.array([2, 4], np.int32),
        "span_kind_S": np.array([0, 1], np.uint8),
        "span_version_S": np.array([-1, 3], np.int32),
        "span_turn_S": np.array([0, 0], np.int32),
        "span_temperature_S": np.array([1, 1], np.float32),
    }
    good, bad = Sequence(segment=0, **fields), Sequence(segment=0, **(fields | change))
    problems = validate_sequences(sequences_table([good, bad]))
    assert problems[0] == ""
    assert problem in problems[1]


def test_a_single_changed_value_changes_the_hash() -> None:
    sequence = SEQUENCE  # the struct has what a hash must see
    rows = pa.RecordBatch.from_pylist(
        [
            {
                name: [1] if pa.types.is_list(f.type) else "x" if pa.types.is_string(f.type) else 1
                for name, f in zip(sequence.names, sequence, strict=True)
            }
        ]
        * 2,
        schema=pa.schema(list(sequence)),
    )
    same = row_hashes(rows)
    assert same[0] == same[1]
    place = sequence.get_field_index("token_ids")
    field = rows.schema.field(place)
    changed = rows.set_column(place, field, pa.array([[1], [2]], field.type))
    assert row_hashes(changed)[0] == same[0]
    assert row_hashes(changed)[1] != same[1]
