"""Records <-> rows: each conversion is one function, and all of them are here.

A stage reads its row with `read_*` and answers with `*_columns`: what it adds, as Python values,
which `prorl.rows.grow` converts for many rows at once. Token ids and logprobs are copied once from
numpy into Arrow buffers and are never Python lists. `validate_sequences` states what a valid
sequence is; `row_hashes` what "equal rows" means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.errors import SchemaError
from prorl.rows import TO_RAN, TO_READY, TO_SCORED, Added, Row
from prorl.schema import LEASED, REWARD_PART, SEQUENCE, TURN
from prorl.types import (
    AttemptKey,
    Failure,
    FailureCode,
    Json,
    Message,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Score,
    Sequence,
    SpanKind,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A LEASED row as a record."""

    key: AttemptKey
    group_id: int
    sample_index: int
    rollout_key: str
    task: Task
    agent: str
    sampling: SamplingParams
    limits: RolloutLimits
    backend: str
    min_version: int = 0
    eval_node: str = ""
    run_seed: int = 0
    queue_s: float = 0.0
    extra: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What RUN reads of a READY row."""

    lease: Lease
    sandbox: SandboxRef
    prompt: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


_TASK_FIELDS = tuple(field.name for field in fields(Task))


def task_to_json(task: Task) -> str:
    """Canonical JSON of a task: equal tasks give equal text."""
    values = {name: getattr(task, name) for name in _TASK_FIELDS}
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS).decode()


def task_from_json(text: str) -> Task:
    """Inverse of `task_to_json`. Raises SchemaError."""
    try:
        return Task(**orjson.loads(text))
    except (TypeError, orjson.JSONDecodeError) as error:
        raise SchemaError(
            f"task JSON {text[:80]!r}: {error}", "task_id, env, prompt, data, data_source"
        ) from None


def leased_batch(leases: Iterable[Lease]) -> pa.RecordBatch:
    """LEASED rows for the gateway to send."""
    rows = [_leased_dict(lease) for lease in leases]
    return pa.RecordBatch.from_pylist(rows, schema=LEASED)


def _leased_dict(lease: Lease) -> dict[str, Json]:
    run_id, rollout_id, attempt = lease.key
    return {
        "run_id": run_id,
        "rollout_id": rollout_id,
        "group_id": lease.group_id,
        "sample_index": lease.sample_index,
        "rollout_key": lease.rollout_key,
        "attempt": attempt,
        "task_id": lease.task.task_id,
        "data_source": lease.task.data_source,
        "task": task_to_json(lease.task),
        "env": lease.task.env,
        "agent": lease.agent,
        "sampling": asdict(lease.sampling),
        "limits": asdict(lease.limits),
        "backend": lease.backend,
        "min_version": lease.min_version,
        "eval_node": lease.eval_node,
        "run_seed": lease.run_seed,
        "queue_s": lease.queue_s,
        "extra": lease.extra,
    }


_LEASED_NAMES = tuple(LEASED.names)


def read_lease(row: Row) -> Lease:
    """The LEASED columns of a row of any edge."""
    value = {name: row.batch.column(i)[row.place].as_py() for i, name in enumerate(_LEASED_NAMES)}
    return Lease(
        key=AttemptKey(value["run_id"], value["rollout_id"], value["attempt"]),
        group_id=value["group_id"],
        sample_index=value["sample_index"],
        rollout_key=value["rollout_key"],
        task=task_from_json(value["task"]),
        agent=value["agent"],
        sampling=SamplingParams(**value["sampling"]),
        limits=RolloutLimits(**value["limits"]),
        backend=value["backend"],
        min_version=value["min_version"],
        eval_node=value["eval_node"],
        run_seed=value["run_seed"],
        queue_s=value["queue_s"],
        extra=value["extra"],
    )


def read_task(row: Row) -> Task:
    """The task of a row of any edge; much cheaper than a whole `Lease`."""
    return task_from_json(row.value("task"))


def read_limit(row: Row, name: str) -> float:
    """One of the budgets in seconds; much cheaper than all of them."""
    return float(row.batch.column("limits").field(name)[row.place].as_py())


def keys(batch: pa.RecordBatch) -> list[AttemptKey]:
    """Attempt keys of the rows, in order."""
    columns = (batch.column(name).to_pylist() for name in ("run_id", "rollout_id", "attempt"))
    return [AttemptKey(*key) for key in zip(*columns, strict=True)]


def read_key(row: Row) -> AttemptKey:
    """The attempt that a row belongs to."""
    return AttemptKey(row.value("run_id"), row.value("rollout_id"), row.value("attempt"))


def ready_columns(
    *, sandbox: SandboxRef, prompt: Many[Message], tools: Many[ToolSpec], init_s: float
) -> Added:
    """LEASED -> READY."""
    specs = orjson.dumps([spec._asdict() for spec in tools]).decode() if tools else "[]"
    return Added(TO_READY, (sandbox, [_message_values(m) for m in prompt], specs, init_s))


def read_ready(row: Row) -> Ready:
    """What RUN needs of a READY row."""
    return Ready(
        lease=read_lease(row),
        sandbox=read_sandbox(row),
        prompt=tuple(read_message(m) for m in row.value("prompt")),
        tools=tuple(ToolSpec(**spec) for spec in orjson.loads(row.value("tools"))),
    )


def read_sandbox(row: Row) -> SandboxRef:
    """The RUN sandbox of a READY row."""
    return SandboxRef(**row.value("sandbox"))


def _message_values(message: Message) -> tuple[Json, ...]:
    """In the order of MESSAGE."""
    calls = (
        orjson.dumps([call._asdict() for call in message.tool_calls]).decode()
        if message.tool_calls
        else "[]"
    )
    return message.role, message.content, calls, message.name, message.turn


_turn_values = attrgetter(*(f.name for f in TURN))
_part_values = attrgetter(*(f.name for f in REWARD_PART))


def read_message(value: dict[str, Json]) -> Message:
    """A MESSAGE struct as a record."""
    calls = tuple(ToolCall(**call) for call in orjson.loads(value["tool_calls"]))
    return Message(
        role=value["role"],
        content=value["content"],
        tool_calls=calls,
        name=value["name"],
        turn=value["turn"],
    )


def ran_columns(trajectory: Trajectory, *, run_s: float) -> Added:
    """READY -> RAN."""
    failure = trajectory.failure
    values = (
        [_sequence_values(s) for s in trajectory.sequences],
        [_turn_values(turn) for turn in trajectory.turns],
        [_message_values(m) for m in trajectory.messages],
        trajectory.artefact,
        artefact_digest(trajectory.artefact),
        trajectory.stop_reason,
        failure.failure_class,
        failure.code,
        failure.message,
        run_s,
        trajectory.llm_s,
        trajectory.tool_s,
    )
    return Added(TO_RAN, values)


def artefact_digest(artefact: bytes) -> str:
    """BLAKE2b-128 of the artefact, hex."""
    return hashlib.blake2b(artefact, digest_size=16).hexdigest()


def scored_columns(*, score: Score | None, failure: Failure, eval_s: float) -> Added:
    """RAN -> SCORED; `score` is None for rows that pass unscored."""
    reward, parts, grader_log = (
        (score.reward, [_part_values(part) for part in score.parts], score.log)
        if score
        else (0.0, [], "")
    )
    values = (
        score is not None,
        reward,
        parts,
        grader_log,
        failure.failure_class,
        failure.code,
        failure.message,
        eval_s,
    )
    return Added(TO_SCORED, values)


def read_failure(row: Row, prefix: str = "") -> Failure:
    """`failure_*` (or `eval_failure_*` with prefix "eval_") of a row."""
    return Failure(
        code=FailureCode(row.value(f"{prefix}failure_code")),
        message=row.value(f"{prefix}failure_message"),
    )


_SEQUENCE_NAMES = (
    "token_ids_L",
    "logprobs_C",
    "span_end_S",
    "span_kind_S",
    "span_version_S",
    "span_turn_S",
    "span_temperature_S",
)
_sequence_values = attrgetter("segment", *_SEQUENCE_NAMES)


def sequences_array(sequences: Many[Sequence]) -> pa.StructArray:
    """Sequences as SEQUENCE structs."""
    return pa.array([_sequence_values(s) for s in sequences], SEQUENCE)


def read_sequences(values: pa.StructArray) -> tuple[Sequence, ...]:
    """SEQUENCE structs (or `sequences` rows as structs) as records that share Arrow's memory."""
    columns = [values.field(f.name) for f in SEQUENCE]
    return tuple(
        Sequence(
            segment=columns[0][i].as_py(),
            **{
                name: column[i].values.to_numpy(zero_copy_only=False)
                for name, column in zip(_SEQUENCE_NAMES, columns[1:], strict=True)
            },
        )
        for i in range(len(values))
    )


def validate_sequences(batch: pa.RecordBatch) -> list[str]:
    """One text per row of a `sequences` batch: empty if valid, else what is wrong.

    Valid: at least one token; spans tile the tokens in order; lengths of sampled spans sum to
    `len(logprobs)`; every logprob is finite and <= 0; context has no version, what trains has one;
    the reward is finite; nothing is null.
    """
    nulls = [name for name in batch.schema.names if batch.column(name).null_count]
    if nulls:
        return [f"null in {', '.join(nulls)}"] * batch.num_rows
    return (
        [""] * batch.num_rows
        if _is_valid(batch)
        else [_problem(batch, i) for i in range(batch.num_rows)]
    )


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Whether every row is valid, looked at all at once;

    `_problem` says of one row what is wrong.
    """

    def flat(name: str) -> np.ndarray[Any, Any]:
        return batch.column(name).flatten().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def lengths(name: str) -> np.ndarray[Any, Any]:
        return np.diff(batch.column(name).offsets.to_numpy())

    nested = (batch.column(name).flatten().null_count for name in _LISTS)
    num_spans, num_tokens = lengths("span_end"), lengths("token_ids")
    if (
        any(nested)
        or (num_spans == 0).any()
        or any((lengths(name) != num_spans).any() for name in _SPANS)
    ):
        return False
    ends, sampled, logprobs = (
        flat("span_end"),
        flat("span_kind") >= SpanKind.TRAINED,
        flat("logprobs"),
    )
    last = np.cumsum(num_spans) - 1
    widths = np.diff(ends, prepend=0)
    widths[last[:-1] + 1] = ends[last[:-1] + 1]
    num_sampled = (
        np.add.reduceat(np.where(sampled, widths, 0), last - num_spans + 1)
        if len(last)
        else num_spans
    )
    return bool(
        (num_tokens > 0).all()
        and (widths > 0).all()
        and (ends[last] == num_tokens).all()
        and (num_sampled == lengths("logprobs")).all()
        and (np.isfinite(logprobs) & (logprobs <= 0)).all()
        and _versions_fit(flat("span_kind"), flat("span_version"))
        and np.isfinite(batch.column("reward").to_numpy()).all()
    )


def _versions_fit(kinds: np.ndarray[Any, Any], versions: np.ndarray[Any, Any]) -> bool:
    """What trains says which weights sampled it; what was sampled and does not train may not know."""
    lowest = np.where(kinds == SpanKind.TRAINED, 0, -1)
    return bool((versions >= lowest).all() and (versions[kinds == SpanKind.CONTEXT] == -1).all())


_SPANS = ("span_end", "span_kind", "span_version", "span_turn", "span_temperature")
_LISTS = ("token_ids", "logprobs", *_SPANS)


def _problem(batch: pa.RecordBatch, i: int) -> str:
    def values(name: str) -> np.ndarray[Any, Any]:
        array = batch.column(name)[i].values
        if array.null_count:
            return np.zeros(0)
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    num_tokens = len(values("token_ids"))
    ends, kinds, versions, logprobs = (
        values("span_end"),
        values("span_kind"),
        values("span_version"),
        values("logprobs"),
    )
    widths = np.diff(ends, prepend=0)
    sampled = kinds >= SpanKind.TRAINED
    if num_tokens == 0 or len(ends) == 0:
        return "no tokens"
    if ends[-1] != num_tokens or (widths <= 0).any():
        return f"spans end at {ends[-1]} of {num_tokens} tokens or do not ascend"
    if (
        not len(ends)
        == len(kinds)
        == len(versions)
        == len(values("span_turn"))
        == len(values("span_temperature"))
    ):
        return "span lists differ in length"
    if int(widths[sampled].sum()) != len(logprobs):
        return f"{int(widths[sampled].sum())} sampled tokens, {len(logprobs)} logprobs"
    if not (np.isfinite(logprobs) & (logprobs <= 0)).all():
        return "a logprob is not finite or above 0"
    if not _versions_fit(kinds, versions):
        return "a version on context, or none on tokens that train"
    return "" if np.isfinite(batch.column("reward")[i].as_py()) else "the reward is not finite"


def row_hashes(batch: pa.RecordBatch) -> list[str]:
    """BLAKE2b-128 of each row by value: independent of slicing, chunking, offsets and IPC layout.

    >>> import pyarrow as pa
    >>> batch = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array([[1], [2, 3]])})
    >>> row_hashes(batch)[1] == row_hashes(batch.slice(1))[0]
    True
    """
    columns = [_row_bytes(column) for column in batch.columns]
    digests = []
    for parts in zip(*columns, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        digests.append(digest.hexdigest())
    return digests


def _row_bytes(column: pa.Array) -> list[bytes]:
    dtype = column.type
    if (
        pa.types.is_list(dtype)
        and pa.types.is_primitive(dtype.value_type)
        and not column.null_count
    ):
        offsets = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
        flat = np.ascontiguousarray(column.flatten().to_numpy(zero_copy_only=False))
        return [flat[a:b].tobytes() for a, b in pairwise(offsets)]
    if (pa.types.is_integer(dtype) or pa.types.is_floating(dtype)) and not column.null_count:
        flat = np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
        return [value.tobytes() for value in flat]
    return [repr(value).encode() for value in column.to_pylist()]
