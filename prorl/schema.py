"""Every shape that crosses a process or reaches a disk: the four edges, the control stream, the
tables of a run directory.

A rollout is a row that grows. Each edge's schema is the previous one plus what the stage added:

    LEASED  identity, task, sampling, limits, backend, seed
    READY   + sandbox, prompt, tools, init_s
    RAN     + sequences, turns, messages, artefact, stop reason, failure, run_s, llm_s, tool_s
    SCORED  + scored, reward, reward_parts, grader_log, eval failure, eval_s

*Edge protocol* over a `Channel`: the consumer dials `edge/<name>` on its upstream and sends
EDGE_BACK batches: `credit` rows (rows and bytes, additive) and `ack` rows (run_id, rollout_id,
attempt). The upstream sends work batches of the edge's schema, never more than credit. No credit,
no send. Several consumers compete; a row goes to one of them. On `lease` and `ready` a row counts
as handed over when it is received (nothing is redelivered); on `ran` and `scored` the upstream
keeps a row until its ack, which the consumer sends only after its own downstream acked (EVAL) or
the commit is durable (store), and redelivers it to another consumer when the stream is lost.
*Control protocol*: `prorl/control/`.

Rules for all of them: list children are named `element`; token columns hold no nulls; a record
batch stays under `MAX_BATCH_BYTES` unless one row (or, in streams to trainers, one group) alone is
larger; rows are hashed by value (`row_hashes`), never by IPC bytes. Both ends of a channel compare
`SCHEMA_VERSION` when it opens; a run directory carries it in its manifest.

Tables of a run directory: `sequences` (what trainers stream; numbers only, no nulls), `rollouts`
(what SQL filters), `turns`, `messages` (for people), `groups` (append-only events), `tasks`.
`partial` keeps attempts that did not commit, in SCORED's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from prorl.errors import SchemaError

SCHEMA_VERSION = 1
"""Raised by one when a column changes its meaning or type, or goes.

Adding an optional column does not raise it.
"""

MAX_BATCH_BYTES = 2**21 - 4096
"""Flight delivers bodies below 2 MiB 8-byte aligned, and they stay off malloc's mmap path."""

MAX_INLINE_ARTEFACT_BYTES = 256 << 10

MAX_SEGMENTS = 1024
"""`sequence_id = rollout_id * MAX_SEGMENTS + segment`: the same for every retry, redelivery and
replay.
"""


def _req(name: str, dtype: pa.DataType) -> pa.Field:
    return pa.field(name, dtype, nullable=False)


def _list(dtype: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", dtype, nullable=False))


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct([_req(name, dtype) for name, dtype in fields.items()])


def _versioned(fields: list[pa.Field], name: str) -> pa.Schema:
    return pa.schema(
        fields,
        metadata={
            b"prorl.schema": name.encode(),
            b"prorl.schema_version": str(SCHEMA_VERSION).encode(),
        },
    )


SAMPLING = _struct(
    temperature=pa.float32(), top_p=pa.float32(), top_k=pa.int32(), max_tokens=pa.int32()
)

LIMITS = _struct(
    init_s=pa.float64(),
    run_s=pa.float64(),
    eval_s=pa.float64(),
    queue_s=pa.float64(),
    tool_s=pa.float64(),
    max_turns=pa.int32(),
    max_tokens=pa.int32(),
    max_attempts=pa.int32(),
    max_worker_losses=pa.int32(),
)

SANDBOX_REF = _struct(node_id=pa.utf8(), sandbox_id=pa.utf8(), socket_path=pa.utf8())

MESSAGE = _struct(
    role=pa.utf8(), content=pa.utf8(), tool_calls=pa.utf8(), name=pa.utf8(), turn=pa.int32()
)
"""`tool_calls` is JSON text: [{"name", "arguments", "error"}]."""

_SPANS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "span_end": _list(pa.int32()),
        "span_kind": _list(pa.uint8()),
        "span_version": _list(pa.int32()),
        "span_turn": _list(pa.int32()),
        "span_temperature": _list(pa.float32()),
    }
)

SEQUENCE = _struct(
    segment=pa.int32(), token_ids=_list(pa.int32()), logprobs=_list(pa.float32()), **_SPANS
)

TURN = _struct(
    turn=pa.int32(),
    segment=pa.int32(),
    prompt_tokens=pa.int32(),
    completion_tokens=pa.int32(),
    cached_tokens=pa.int32(),
    finish_reason=pa.utf8(),
    temperature=pa.float32(),
    policy_version=pa.int32(),
    backend=pa.utf8(),
    llm_s=pa.float64(),
    tool_s=pa.float64(),
    tool_calls=pa.int32(),
)

REWARD_PART = _struct(name=pa.utf8(), value=pa.float64(), weight=pa.float64())

IDENTITY = (
    _req("run_id", pa.utf8()),
    _req("rollout_id", pa.int64()),
    _req("group_id", pa.int64()),
    _req("sample_index", pa.int32()),
    _req("rollout_key", pa.utf8()),
    _req("attempt", pa.int32()),
)

LEASED = _versioned(
    [
        *IDENTITY,
        _req("task_id", pa.utf8()),
        _req("data_source", pa.utf8()),
        _req("task", pa.utf8()),
        _req("env", pa.utf8()),
        _req("agent", pa.utf8()),
        _req("sampling", SAMPLING),
        _req("limits", LIMITS),
        _req("backend", pa.utf8()),
        _req("min_version", pa.int32()),
        _req("eval_node", pa.utf8()),
        _req("run_seed", pa.int64()),
        _req("queue_s", pa.float64()),
        _req("extra", pa.utf8()),
    ],
    "edge/lease",
)

READY = _versioned(
    [
        *LEASED,
        _req("sandbox", SANDBOX_REF),
        _req("prompt", _list(MESSAGE)),
        _req("tools", pa.utf8()),
        _req("init_s", pa.float64()),
    ],
    "edge/ready",
)

RAN = _versioned(
    [
        *READY,
        _req("sequences", _list(SEQUENCE)),
        _req("turns", _list(TURN)),
        _req("messages", _list(MESSAGE)),
        _req("artefact", pa.binary()),
        _req("artefact_digest", pa.utf8()),
        _req("stop_reason", pa.utf8()),
        _req("failure_class", pa.utf8()),
        _req("failure_code", pa.utf8()),
        _req("failure_message", pa.utf8()),
        _req("run_s", pa.float64()),
        _req("llm_s", pa.float64()),
        _req("tool_s", pa.float64()),
    ],
    "edge/ran",
)

SCORED = _versioned(
    [
        *RAN,
        _req("scored", pa.bool_()),
        _req("reward", pa.float32()),
        _req("reward_parts", _list(REWARD_PART)),
        _req("grader_log", pa.utf8()),
        _req("eval_failure_class", pa.utf8()),
        _req("eval_failure_code", pa.utf8()),
        _req("eval_failure_message", pa.utf8()),
        _req("eval_s", pa.float64()),
    ],
    "edge/scored",
)

EDGES: Mapping[str, pa.Schema] = MappingProxyType(
    {"lease": LEASED, "ready": READY, "ran": RAN, "scored": SCORED}
)

REDELIVERED_EDGES = frozenset({"ran", "scored"})
"""Edges whose rows are kept until acked and sent again when a stream is lost."""

EDGE_BACK = _versioned(
    [
        _req("kind", pa.utf8()),
        _req("rows", pa.int32()),
        _req("bytes", pa.int64()),
        _req("run_id", pa.utf8()),
        _req("rollout_id", pa.int64()),
        _req("attempt", pa.int32()),
    ],
    "edge_back",
)

CONTROL = _versioned(
    [
        _req("seq", pa.int64()),
        _req("re", pa.int64()),
        _req("kind", pa.utf8()),
        _req("run_id", pa.utf8()),
        _req("rollout_id", pa.int64()),
        _req("group_id", pa.int64()),
        _req("attempt", pa.int32()),
        _req("stage", pa.utf8()),
        _req("code", pa.utf8()),
        _req("payload", pa.utf8()),
    ],
    "control",
)

SEQUENCES = _versioned(
    [
        _req("sequence_id", pa.int64()),
        _req("rollout_id", pa.int64()),
        _req("group_id", pa.int64()),
        _req("sample_index", pa.int32()),
        _req("attempt", pa.int32()),
        _req("segment", pa.int32()),
        _req("reward", pa.float32()),
        _req("token_ids", _list(pa.int32())),
        _req("logprobs", _list(pa.float32())),
        *(_req(name, dtype) for name, dtype in _SPANS.items()),
    ],
    "sequences",
)

STREAM = _versioned([_req("delivery_seq", pa.int64()), *SEQUENCES], "stream")
"""What `DoGet` gives a trainer:

`sequences` in delivery order; whole groups, each batch made of whole groups.
"""

ROLLOUTS = _versioned(
    [
        _req("rollout_id", pa.int64()),
        _req("group_id", pa.int64()),
        _req("sample_index", pa.int32()),
        _req("rollout_key", pa.utf8()),
        _req("attempt", pa.int32()),
        _req("task_id", pa.utf8()),
        _req("data_source", pa.utf8()),
        _req("env", pa.utf8()),
        _req("agent", pa.utf8()),
        _req("status", pa.utf8()),
        _req("valid", pa.bool_()),
        _req("failure_class", pa.utf8()),
        _req("failure_code", pa.utf8()),
        _req("failure_message", pa.utf8()),
        _req("stop_reason", pa.utf8()),
        pa.field("reward", pa.float32()),
        _req("reward_parts", _list(REWARD_PART)),
        _req("num_sequences", pa.int32()),
        _req("num_turns", pa.int32()),
        _req("num_tokens", pa.int32()),
        _req("num_sampled", pa.int32()),
        _req("num_tool_calls", pa.int32()),
        _req("min_version", pa.int32()),
        _req("max_version", pa.int32()),
        _req("queue_s", pa.float64()),
        _req("init_s", pa.float64()),
        _req("run_s", pa.float64()),
        _req("llm_s", pa.float64()),
        _req("tool_s", pa.float64()),
        _req("eval_s", pa.float64()),
        _req("artefact", pa.binary()),
        _req("artefact_digest", pa.utf8()),
        _req("committed_at", pa.timestamp("us", tz="UTC")),
        _req("extra", pa.utf8()),
    ],
    "rollouts",
)

TURNS = _versioned([_req("rollout_id", pa.int64()), _req("attempt", pa.int32()), *TURN], "turns")

MESSAGES = _versioned(
    [
        _req("rollout_id", pa.int64()),
        _req("attempt", pa.int32()),
        _req("index", pa.int32()),
        *MESSAGE,
    ],
    "messages",
)

GROUPS = _versioned(
    [
        _req("event_seq", pa.int64()),
        _req("group_id", pa.int64()),
        _req("event", pa.utf8()),
        _req("kept", pa.bool_()),
        _req("reason", pa.utf8()),
        _req("delivery_seq", pa.int64()),
        _req("num_members", pa.int32()),
        _req("num_valid", pa.int32()),
        _req("min_version", pa.int32()),
        pa.field("mean_reward", pa.float64()),
        _req("at", pa.timestamp("us", tz="UTC")),
    ],
    "groups",
)
"""`event` is decided, delivered or stale;

`kept`/`reason` belong to decided, `delivery_seq` (else -1) to delivered.
"""

TASKS = _versioned(
    [
        _req("group_id", pa.int64()),
        _req("task_id", pa.utf8()),
        _req("data_source", pa.utf8()),
        _req("env", pa.utf8()),
        _req("n", pa.int32()),
        _req("task", pa.utf8()),
        _req("sampling", pa.utf8()),
        _req("extra", pa.utf8()),
    ],
    "tasks",
)

TABLES: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "sequences": SEQUENCES,
        "rollouts": ROLLOUTS,
        "turns": TURNS,
        "messages": MESSAGES,
        "groups": GROUPS,
        "tasks": TASKS,
    }
)


def check_version(found: int | str | None, where: str) -> None:
    """Raise SchemaError unless `found` is a version that this code reads."""
    if found is not None and int(found) == SCHEMA_VERSION:
        return
    newer = found is not None and int(found) > SCHEMA_VERSION
    mend = "upgrade prorl to read it" if newer else "write it again with this prorl"
    raise SchemaError(f"{where} has schema version {found}", f"version {SCHEMA_VERSION}", mend)


def check_schema(found: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Raise SchemaError unless names and types are equal (metadata and nullability aside)."""
    ours = [(f.name, f.type) for f in expected]
    theirs = [(f.name, f.type) for f in found]
    if ours == theirs:
        return
    wrong = sorted({name for name, _ in set(ours) ^ set(theirs)}) or ["the order of columns"]
    raise SchemaError(
        f"{where} differs in {', '.join(wrong)}", f"the columns of {schema_name(expected)}"
    )


def schema_name(schema: pa.Schema) -> str:
    """Name a schema of this module, e.g. `sequences` or `edge/ran`."""
    return str((schema.metadata or {}).get(b"prorl.schema", b"?").decode())


def dense(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add per-token columns of full length to a `sequences` or `stream` batch, for clients without
    our code.

    Replaces `logprobs` and the spans by lists as long as `token_ids`, sharing its offsets:
    `loss_mask` uint8 (1 = trains), `sampled_mask` uint8, `logprobs` float32 (0 where nothing was
    sampled), `versions` int32 (-1 for context), `turns` int32 and `temperatures` float32. One
    vectorised pass; nothing but `token_ids` is shared with the input.
    """
    import numpy as np

    tokens = batch.column("token_ids")
    length = len(tokens.flatten())
    offsets = pa.array(tokens.offsets.to_numpy() - tokens.offsets[0].as_py(), pa.int32())
    spans = {name: batch.column(name) for name in _SPANS}
    ends = spans["span_end"].flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    borders = spans["span_end"].offsets.to_numpy() - spans["span_end"].offsets[0].as_py()
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    starts[borders[:-1][np.diff(borders) > 0]] = 0
    widths = ends - starts

    def per_token(name: str) -> np.ndarray[Any, Any]:
        return np.repeat(spans[name].flatten().to_numpy(zero_copy_only=False), widths)

    sampled = per_token("span_kind") >= 1
    logprobs = np.zeros(length, np.float32)
    logprobs[sampled] = batch.column("logprobs").flatten().to_numpy(zero_copy_only=False)
    lists = {
        "loss_mask": (per_token("span_kind") == 1).astype(np.uint8),
        "sampled_mask": sampled.astype(np.uint8),
        "logprobs": logprobs,
        "versions": per_token("span_version"),
        "turns": per_token("span_turn"),
        "temperatures": per_token("span_temperature"),
    }
    keep = [
        name
        for name in batch.schema.names
        if name not in _SPANS and name != "logprobs" and name != "token_ids"
    ]
    arrays = [batch.column(name) for name in keep]
    arrays += [
        pa.ListArray.from_arrays(offsets, values, type=_list(values.type))
        for values in [tokens.flatten()]
    ]
    arrays += [
        pa.ListArray.from_arrays(offsets, pa.array(v), type=_list(pa.array(v[:0]).type))
        for v in lists.values()
    ]
    fields = [batch.schema.field(name) for name in keep]
    fields += [
        _req(name, array.type)
        for name, array in zip(["token_ids", *lists], arrays[len(keep) :], strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_versioned(fields, "dense"))
