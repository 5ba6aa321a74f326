"""SCORED rows become rows of the tables: by value, without copying tokens, and only if they are
valid.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.schema import TABLES
from prorl.schema.fields import SEQUENCE
from prorl.schema.sequences import read_sequences
from prorl.storage.write.convert import (
    effective_codes,
    event_rows,
    problems,
    row_verdicts,
    tables,
    terminal_rows,
)
from prorl.types import Failure, FailureCode, Sequence, SpanKind
from tests import strategies as ours
from tests.edge_rows import leased_batch, ran_row, ready_row, scored_row
from tests.storage.run_directories import event
from tests.storage.scored_rows import scored, sequence, terminal


@st.composite
def scored_batches(draw: st.DrawFn) -> tuple[pa.RecordBatch, list[tuple[Sequence, ...]]]:
    rows, trajectories = [], []
    for i in range(draw(st.integers(1, 4))):
        lease, trajectory = draw(ours.leases), draw(ours.trajectories)
        row = leased_batch([lease])
        row = row.set_column(1, row.schema.field(1), pa.array([i], pa.int64()))
        row = ready_row(row, sandbox=draw(ours.sandboxes), prompt=(), tools=(), init_s=1.0)
        rows.append(
            scored_row(
                ran_row(row, trajectory, run_s=1.0),
                score=draw(ours.scores),
                failure=Failure(code=FailureCode.NONE),
                eval_s=0,
            )
        )
        trajectories.append(trajectory.sequences)
    return pa.concat_batches(rows), trajectories


@settings(max_examples=40, deadline=None)
@given(scored_batches(), st.data())
def test_sequences_come_out_as_they_went_in_from_any_slice(
    built: tuple[pa.RecordBatch, list[tuple[Sequence, ...]]], data: st.DataObject
) -> None:
    batch, trajectories = built
    start = data.draw(st.integers(0, batch.num_rows - 1))
    rows = tables(batch.slice(start))
    for name, table in rows.items():
        table.validate(full=True)
        assert table.schema.equals(TABLES[name])
    sequences_read = read_sequences(
        pa.StructArray.from_arrays(
            [rows["sequences"].column(f.name) for f in SEQUENCE], fields=list(SEQUENCE)
        )
    )
    expected = [
        s
        for sequences in trajectories[start:]
        if any(len(sequence.logprobs_C) for sequence in sequences)
        for s in sequences
    ]
    assert len(sequences_read) == len(expected)
    for ours_, theirs in zip(sequences_read, expected, strict=True):
        for name in Sequence.__slots__:
            assert np.array_equal(getattr(ours_, name), getattr(theirs, name)), name


def test_tokens_are_not_copied() -> None:
    batch = pa.concat_batches([scored(i) for i in range(4)])
    before = batch.column("sequences").values.field("token_ids").values.buffers()[1].address
    assert tables(batch)["sequences"].column("token_ids").values.buffers()[1].address == before


def test_a_rollout_without_trained_tokens_is_not_valid() -> None:
    """Sampled by weights that nobody could name: its reward must not enter its siblings'."""
    unknown = sequence(1)
    kinds = np.where(unknown.span_kind_S == SpanKind.TRAINED, SpanKind.SAMPLED, unknown.span_kind_S)
    unknown = replace(unknown, span_kind_S=kinds.astype(np.uint8))
    rollouts = tables(pa.concat_batches([scored(0), scored(1, sequences=(unknown,))]))["rollouts"]
    assert rollouts.column("num_sampled").to_pylist() == [10, 10]
    assert rollouts.column("num_trained").to_pylist() == [10, 0]
    assert rollouts.column("valid").to_pylist() == [True, False]


def test_rollouts_count_what_the_trajectory_holds() -> None:
    two = (sequence(1, version=3), sequence(2, segment=1, version=1))
    rows = tables(
        pa.concat_batches([scored(0), scored(1, sequences=two), scored(2, sequences=(), version=7)])
    )
    rollouts = rows["rollouts"].to_pylist()
    assert [r["num_sequences"] for r in rollouts] == [1, 2, 0]
    assert [r["num_tokens"] for r in rollouts] == [20, 40, 0]
    assert [r["num_sampled"] for r in rollouts] == [10, 20, 0]
    assert [(r["min_version"], r["max_version"]) for r in rollouts] == [(0, 1), (1, 4), (7, 7)]
    assert [r["num_tool_calls"] for r in rollouts] == [2, 2, 2]
    assert [r["valid"] for r in rollouts] == [True, True, False]
    assert rows["sequences"].column("sequence_id").to_pylist() == [0, 1024, 1025]


def test_a_trajectory_without_a_sampled_token_has_nothing_to_train() -> None:
    """A model server that never answered: whatever the grader said, it enters no batch."""
    context = replace(
        sequence(1),
        logprobs_C=np.zeros(0, np.float32),
        span_kind_S=np.zeros(4, np.uint8),
        span_version_S=np.full(4, -1, np.int32),
    )
    rows = tables(pa.concat_batches([scored(0), scored(1, sequences=(context,))]))
    assert rows["sequences"].column("rollout_id").to_pylist() == [0]
    rollouts = rows["rollouts"].to_pylist()
    assert [(r["num_sequences"], r["valid"]) for r in rollouts] == [(1, True), (0, False)]


def test_grader_log_follows_the_messages() -> None:
    rows = tables(
        pa.concat_batches(
            [scored(0), scored(1, reward=None, code=FailureCode.SANDBOX_BROKEN), scored(2)]
        )
    )["messages"].to_pylist()
    assert [(m["rollout_id"], m["index"], m["role"]) for m in rows] == [
        (0, 0, "user"),
        (0, 1, "assistant"),
        (0, 2, "grader"),
        (1, 0, "user"),
        (1, 1, "assistant"),
        (2, 0, "user"),
        (2, 1, "assistant"),
        (2, 2, "grader"),
    ]
    assert rows[2]["content"] == "2 == 2"


def test_evals_failure_wins_over_runs() -> None:
    batch = scored(0, code=FailureCode.DEADLINE, eval_code=FailureCode.GRADER_ERROR)
    assert effective_codes(batch) == [FailureCode.GRADER_ERROR]
    assert effective_codes(scored(0, code=FailureCode.DEADLINE)) == [FailureCode.DEADLINE]


def broken(**changes: object) -> Sequence:
    good = sequence(0)
    return Sequence(**{**{name: getattr(good, name) for name in Sequence.__slots__}, **changes})


def test_invalid_rows_are_detected_among_valid_rows() -> None:
    nan = sequence(0).logprobs_C.copy()
    nan[3] = np.nan
    rows = [
        scored(0),
        scored(1, sequences=(broken(logprobs_C=nan),)),
        scored(2, sequences=(sequence(0), sequence(1))),
        scored(3, sequences=(broken(span_end_S=np.array([5, 10, 15, 19], np.int32)),)),
        scored(4, reward=None),
        scored(5, reward=float("nan")),
        scored(6, sequences=()),
    ]
    row_problems = problems(pa.concat_batches(rows))
    assert [bool(text) for text in row_problems] == [False, True, True, True, True, True, False]
    assert "logprob" in row_problems[1]
    assert "segment 0 where 1" in row_problems[2]


def test_a_null_that_arrow_lets_through_is_detected() -> None:
    batch = scored(0)
    i = batch.schema.get_field_index("turns")
    turns = batch.column("turns").to_pylist()
    turns[0][1]["backend"] = None
    batch = batch.set_column(i, batch.schema.field(i), pa.array(turns, batch.schema.field(i).type))
    assert problems(batch) == ["null in turns.backend"]
    assert problems(pa.concat_batches([scored(1), batch])) == ["", "null in turns.backend"]


def test_a_row_that_makes_no_sense_at_all_is_graded_alone() -> None:
    unheard = scored(1)
    i = unheard.schema.get_field_index("failure_code")
    unheard = unheard.set_column(i, unheard.schema.field(i), pa.array(["unheard_of"]))
    good, strange, failed = row_verdicts(
        pa.concat_batches([scored(0), unheard, scored(2, code=FailureCode.WORKER_LOST)])
    )
    assert (good.committable, good.problem) == (True, "")
    assert not strange.committable
    assert "unheard_of" in strange.problem
    assert (failed.committable, failed.problem) == (False, "")


def test_terminal_and_event_rows() -> None:
    rows = terminal_rows([terminal(5)])
    assert rows.to_pylist()[0]["reward"] is None
    assert rows.to_pylist()[0]["failure_code"] == "worker_lost"
    (row,) = event_rows([event(1, 2, "decided")]).to_pylist()
    assert (row["event_seq"], row["group_id"], row["mean_reward"]) == (1, 2, 0.5)
    assert row["event_at"] == datetime.fromisoformat("2026-01-02T03:04:05+00:00")
