"""Converts SCORED rows to rows of the tables, without copying a token, and checks which rows may be
committed.

`tables` is vectorised over a batch: one Arrow call per column, whatever the number of rows.
`row_verdicts` is the last check before a row trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.control import AttemptRow, GroupEventRow, TaskRow, Terminal, TrajectorySummary
from prorl.errors import RolloutError, boundary
from prorl.schema import (
    ATTEMPTS,
    GROUPS,
    MAX_SEGMENTS,
    MESSAGES,
    ROLLOUTS,
    ROUTING,
    SCORED,
    SEQUENCES,
    TASKS,
    TURNS,
)
from prorl.schema.fields import MESSAGE, ROUTED, SEQUENCE
from prorl.schema.sequences import validate_sequences
from prorl.types import FAILURE_CLASS, UNSCORED, FailureCode, Json, RolloutState, SpanKind


def tables(batch: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
    """Converts SCORED rows that have passed `row_verdicts` to the rows of each table, in the order
    of the batch. A trajectory without a sampled token gets no rows of `sequences`: nothing of it
    can train, and its reward must not enter its siblings' advantages.
    """
    sequences, parents = sequences_of(batch)
    sampled = np.bincount(parents, weights=lengths_of(sequences.column("logprobs")))
    if len(parents) and not (trains := sampled[parents] > 0).all():
        sequences, parents = sequences.filter(pa.array(trains)), parents[trains]
    return {
        "sequences": sequences,
        "rollouts": _rollouts(batch, sequences, parents),
        "turns": _turns(batch),
        "messages": _messages(batch),
        "routed_experts": _routing(batch),
    }


def _sums(values: np.ndarray[Any, Any], parents: np.ndarray[Any, Any], rows: int) -> pa.Array:
    return pa.array(np.bincount(parents, weights=values, minlength=rows).astype(np.int32))


def _rollouts(
    batch: pa.RecordBatch, sequences: pa.RecordBatch, parents: np.ndarray[Any, Any]
) -> pa.RecordBatch:
    rows = batch.num_rows
    columns = {name: batch.column(name) for name in ROLLOUTS.names if name in SCORED.names}
    low, high = _versions(batch, sequences, parents)
    ended = _ended(batch)
    is_completed = pa.array(ended == RolloutState.COMPLETED.value)
    columns |= {
        "status": pa.array(ended),
        **_failure_columns(batch),
        "reward": pc.if_else(is_completed, batch.column("reward"), None),
        **_count_columns(batch, sequences, parents),
        "min_version": pa.array(low),
        "max_version": pa.array(high),
        "committed_at": pa.array([datetime.now(UTC)] * rows, ROLLOUTS.field("committed_at").type),
        "logprob_sum": _logprob_sums(sequences, parents, rows),
    }
    columns["valid"] = pc.and_(columns["valid"], is_completed)
    return batch_of(columns, ROLLOUTS)


def _ended(batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
    """Returns the status of each row: completed, or failed where EVAL could not score it."""
    trains = [FAILURE_CLASS[code].trains for code in effective_codes(batch)]
    return np.where(trains, RolloutState.COMPLETED.value, RolloutState.FAILED.value)


def _failure_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    codes = effective_codes(batch)
    return {
        "failure_class": pa.array([FAILURE_CLASS[code].value for code in codes]),
        "failure_code": pa.array([code.value for code in codes]),
        "failure_message": pc.if_else(
            pc.equal(batch.column("eval_failure_code"), ""),
            batch.column("failure_message"),
            batch.column("eval_failure_message"),
        ),
    }


def _count_columns(
    batch: pa.RecordBatch, sequences: pa.RecordBatch, parents: np.ndarray[Any, Any]
) -> dict[str, pa.Array]:
    """Returns how much each trajectory holds, and whether any of its tokens can train."""
    rows, turns = batch.num_rows, batch.column("turns")
    calls = turns.flatten().field("tool_calls").to_numpy()
    sampled = lengths_of(sequences.column("logprobs"))
    trained = _sums(_num_trained(sequences), parents, rows)
    return {
        "num_sequences": pa.array(np.bincount(parents, minlength=rows).astype(np.int32)),
        "num_turns": pa.array(np.diff(turns.offsets.to_numpy()).astype(np.int32)),
        "num_tokens": _sums(lengths_of(sequences.column("token_ids")), parents, rows),
        "num_sampled": _sums(sampled, parents, rows),
        "num_trained": trained,
        "num_tool_calls": _sums(calls, parents_of(turns), rows),
        "valid": pc.greater(trained, 0),
    }


def _num_trained(sequences: pa.RecordBatch) -> np.ndarray[Any, Any]:
    """Tokens of each sequence that train: those whose spans say so."""
    ends, kinds = sequences.column("span_end"), sequences.column("span_kind").flatten()
    owners, flat = parents_of(ends), ends.flatten().to_numpy()
    is_first = np.diff(owners, prepend=-1) != 0
    widths = flat - np.where(is_first, 0, np.roll(flat, 1))
    widths[kinds.to_numpy() != SpanKind.TRAINED] = 0
    return np.bincount(owners, weights=widths, minlength=sequences.num_rows).astype(np.int64)


def _logprob_sums(sequences: pa.RecordBatch, parents: np.ndarray[Any, Any], rows: int) -> pa.Array:
    """The sum of logprobs of each rollout: what drift is watched by, without reading a token."""
    lists = sequences.column("logprobs")
    owners = np.repeat(parents, lengths_of(lists))
    return pa.array(np.bincount(owners, weights=lists.flatten().to_numpy(), minlength=rows))


def _versions(
    batch: pa.RecordBatch, sequences: pa.RecordBatch, parents: np.ndarray[Any, Any]
) -> tuple[Any, Any]:
    """Lowest and highest version that sampled a token of each row; else the lease's own."""
    spans = sequences.column("span_version")
    owners = parents[parents_of(spans)] if len(parents) else np.zeros(0, np.int64)
    versions = spans.flatten().to_numpy()
    leased = batch.column("min_version").to_numpy()
    low = np.full(batch.num_rows, np.iinfo(np.int32).max, np.int32)
    high = np.full(batch.num_rows, -1, np.int32)
    np.minimum.at(low, owners[versions >= 0], versions[versions >= 0])
    np.maximum.at(high, owners[versions >= 0], versions[versions >= 0])
    both = (np.where(high < 0, leased, versions) for versions in (low, high))
    lowest, highest = (versions.astype(np.int32) for versions in both)
    return lowest, highest


_KEYS = ("run_id", "rollout_id", "attempt")
"""The columns that `turns` and `messages` begin with."""


def _turns(batch: pa.RecordBatch) -> pa.RecordBatch:
    parents = pa.array(parents_of(batch.column("turns")))
    structs = batch.column("turns").flatten()
    keys = [batch.column(name).take(parents) for name in _KEYS]
    return pa.RecordBatch.from_arrays([*keys, *structs.flatten()], schema=TURNS)


def _routing(batch: pa.RecordBatch) -> pa.RecordBatch:
    routed = batch.column("routed_experts")
    parents = pa.array(parents_of(routed))
    structs = routed.flatten()
    columns = {name: batch.column(name).take(parents) for name in (*_KEYS, "group_id")}
    columns |= {f.name: values for f, values in zip(ROUTED, structs.flatten(), strict=True)}
    columns["sequence_id"] = pc.add(
        pc.multiply(columns["rollout_id"], MAX_SEGMENTS), columns["segment"].cast(pa.int64())
    )
    return batch_of(columns, ROUTING)


def _messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The messages of the rows; a grader's log follows its rollout's, in the role `grader`."""
    messages, graded = batch.column("messages").flatten(), _grader_messages(batch)
    owners = np.concatenate(
        [
            parents_of(batch.column("messages")),
            np.flatnonzero(pc.not_equal(batch.column("grader_log"), "")),
        ]
    )
    order = np.argsort(owners, kind="stable")
    sorted_owners = owners[order]
    index = np.arange(len(owners)) - np.searchsorted(sorted_owners, sorted_owners)
    keys = [batch.column(name).take(pa.array(sorted_owners)) for name in _KEYS]
    values = [
        pa.concat_arrays(pair).take(pa.array(order))
        for pair in zip(messages.flatten(), graded.flatten(), strict=True)
    ]
    return pa.RecordBatch.from_arrays(
        [*keys, pa.array(index.astype(np.int32)), *values], schema=MESSAGES
    )


def _grader_messages(batch: pa.RecordBatch) -> pa.StructArray:
    logs = batch.column("grader_log")
    turns = np.maximum(np.diff(batch.column("turns").offsets.to_numpy()) - 1, 0).astype(np.int32)
    rows = batch.num_rows
    constants = {
        "role": pa.repeat("grader", rows),
        "tool_calls": pa.repeat("[]", rows),
        "name": pa.repeat("", rows),
        "reasoning": pa.repeat("", rows),
        "call_id": pa.repeat("", rows),
    }
    columns = {**constants, "content": logs, "turn": pa.array(turns)}
    structs = pa.StructArray.from_arrays([columns[f.name] for f in MESSAGE], fields=list(MESSAGE))
    return structs.filter(pc.not_equal(logs, ""))


def terminal_rows(terminals: Iterable[Terminal]) -> pa.Table:
    """Makes rows of `rollouts` for rollouts that ended without a trajectory."""
    blank = {field.name: _nothing(field) for field in ROLLOUTS}
    blank |= {"committed_at": datetime.now(UTC)}
    blank |= msgspec.structs.asdict(TrajectorySummary())
    rows = [{**blank, **msgspec.structs.asdict(terminal)} for terminal in terminals]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def _nothing(field: pa.Field) -> Json:
    if field.nullable:
        return None
    if pa.types.is_list(field.type):
        return []
    if pa.types.is_binary(field.type):
        return b""
    if pa.types.is_boolean(field.type):
        return False
    return "" if pa.types.is_string(field.type) else 0


def event_rows(events: Iterable[GroupEventRow]) -> pa.Table:
    return pa.Table.from_pylist(list(map(msgspec.structs.asdict, events)), schema=GROUPS)


def task_rows(tasks: Iterable[TaskRow]) -> pa.Table:
    return pa.Table.from_pylist(list(map(msgspec.structs.asdict, tasks)), schema=TASKS)


def attempt_rows(attempts: Iterable[AttemptRow]) -> pa.Table:
    return pa.Table.from_pylist(list(map(msgspec.structs.asdict, attempts)), schema=ATTEMPTS)


def effective_codes(batch: pa.RecordBatch) -> list[FailureCode]:
    """Failure code of each SCORED row: EVAL's if it failed there, else RUN's."""
    names = ("eval_failure_code", "failure_code")
    codes = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return [FailureCode(eval_code or run_code) for eval_code, run_code in codes]


def parents_of(column: pa.ListArray) -> np.ndarray[Any, Any]:
    """The row that each element of a list column belongs to (slices included)."""
    return np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))


def sequences_of(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray[Any, Any]]:
    """The sequences of all rows with their keys, and the row that each belongs to."""
    parents = parents_of(batch.column("sequences"))
    structs = batch.column("sequences").flatten()
    fields = {f.name: values for f, values in zip(SEQUENCE, structs.flatten(), strict=True)}
    rewards = pc.if_else(
        pa.array(_ended(batch) == RolloutState.COMPLETED.value), batch.column("reward"), None
    )
    for name in ("rollout_id", "group_id", "sample_index", "attempt"):
        fields[name] = batch.column(name).take(pa.array(parents))
    fields["reward"] = rewards.take(pa.array(parents))
    fields["sequence_id"] = pa.array(
        fields["rollout_id"].to_numpy() * MAX_SEGMENTS + fields["segment"].to_numpy()
    )
    return batch_of(fields, SEQUENCES), parents


def batch_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def lengths_of(lists: pa.ListArray) -> np.ndarray[Any, Any]:
    return np.diff(lists.offsets.to_numpy())


class RowVerdict(NamedTuple):
    committable: bool
    """Else it is kept in `partial/`."""
    problem: str
    """The reason why the row is invalid; empty for a valid row, committable or not."""


def row_verdicts(batch: pa.RecordBatch) -> list[RowVerdict]:
    """Returns for each SCORED row whether it may be committed, and what is wrong with it. (A reward
    is EVAL's matter.) Never raises for what is in a row.
    """
    try:
        with boundary(RolloutError, FailureCode.INVALID_ROW, "row"):
            eval_codes = batch.column("eval_failure_code").to_pylist()
            may_commit = [
                FAILURE_CLASS[code].trains or eval_code in UNSCORED
                for code, eval_code in zip(effective_codes(batch), eval_codes, strict=True)
            ]
            return [
                RowVerdict(may and not problem, problem if may else "")
                for may, problem in zip(may_commit, problems(batch), strict=True)
            ]
    except RolloutError as error:
        if batch.num_rows == 1:
            return [RowVerdict(False, error.message)]
    return [verdict for i in range(batch.num_rows) for verdict in row_verdicts(batch.slice(i, 1))]


def problems(batch: pa.RecordBatch) -> list[str]:
    """One text per SCORED row: empty if it may be committed, else what is wrong with it."""
    if nulls := _nulls(batch):
        if batch.num_rows == 1:
            return [f"null in {nulls}"]
        return [problem for i in range(batch.num_rows) for problem in problems(batch.slice(i, 1))]
    texts = _reward_problems(batch)
    sequences, parents = sequences_of(batch)
    segments = sequences.column("segment").to_numpy()
    expected = np.arange(len(parents)) - np.searchsorted(parents, parents)
    for parent, segment, next_segment, text in zip(
        parents, segments, expected, validate_sequences(sequences), strict=True
    ):
        if text or segment != next_segment or segment >= MAX_SEGMENTS:
            texts[parent] = text or f"segment {segment} where {next_segment} was expected"
    return texts


def _reward_problems(batch: pa.RecordBatch) -> list[str]:
    """One text per row: what keeps its reward from being one, empty where it is sound."""
    unscored = np.array(
        [code is FailureCode.NONE for code in effective_codes(batch)]
    ) & ~batch.column("scored").to_numpy(False)
    infinite = ~np.isfinite(batch.column("reward").to_numpy())
    return [
        "neither scored nor failed" if a else "the reward is not finite" if b else ""
        for a, b in zip(unscored, infinite, strict=True)
    ]


def _nulls(batch: pa.RecordBatch) -> str:
    """Columns and struct children that hold nulls: Arrow's own validation lets them through."""

    def walk(name: str, array: pa.Array) -> Iterable[str]:
        if array.null_count:
            yield name
        elif pa.types.is_list(array.type) and pa.types.is_nested(array.type.value_type):
            yield from walk(name, array.flatten())
        elif pa.types.is_struct(array.type):
            for child, values in zip(array.type, array.flatten(), strict=True):
                yield from walk(f"{name}.{child.name}", values)

    return ", ".join(
        name
        for column, array in zip(batch.schema.names, batch.columns, strict=True)
        for name in walk(column, array)
    )
