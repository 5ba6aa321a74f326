"""Every shape that crosses a process or reaches a disk.

The four edges, the control stream, the tables of a run directory.

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
(what SQL filters), `turns`, `messages` (for people), `groups` (append-only events), `tasks`. Beside
them `trained` (which sequences made which checkpoint), `annotations` and `versions` (published
weights) are appended to.
`partial` keeps attempts that did not commit, in SCORED's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from prorl.errors import SchemaError
from prorl.schema_fields import (
    HISTORY,
    IDENTITY,
    LIMITS,
    MESSAGE,
    REWARD_PART,
    SAMPLING,
    SANDBOX_REF,
    SCHEMA_VERSION,
    SEQUENCE,
    SPANS,
    TURN,
    list_of,
    required,
    versioned,
)

MAX_BATCH_BYTES = 2**21 - 4096
"""Flight delivers bodies below 2 MiB 8-byte aligned, and they stay off malloc's mmap path."""

MAX_INLINE_ARTEFACT_BYTES = 256 << 10

MAX_SEGMENTS = 1024
"""`sequence_id = rollout_id * MAX_SEGMENTS + segment`, the same in every retry and replay."""

LEASED = versioned(
    [
        *IDENTITY,
        required("task_id", pa.utf8()),
        required("data_source", pa.utf8()),
        required("task", pa.utf8()),
        required("env", pa.utf8()),
        required("agent", pa.utf8()),
        required("renderer", pa.utf8()),
        required("sampling", SAMPLING),
        required("limits", LIMITS),
        required("backend", pa.utf8()),
        required("min_version", pa.int32()),
        required("eval_node", pa.utf8()),
        required("run_seed", pa.int64()),
        required("queue_s", pa.float64()),
        required("extra", pa.utf8()),
        required("on_unknown", pa.utf8()),
        required("handed", pa.int32()),
        required("not_handed", pa.utf8()),
    ],
    "edge/lease",
)

HANDOVER = versioned(
    [
        required("run_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
        required("part", pa.utf8()),
        required("last", pa.bool_()),
        required("data", pa.binary()),
    ],
    "handover",
)
"""What a leaving node gives away of an attempt, and another takes: `prorl.flight.handover`."""

READY = versioned(
    [
        *LEASED,
        required("sandbox", SANDBOX_REF),
        required("prompt", list_of(MESSAGE)),
        required("tools", pa.utf8()),
        required("init_s", pa.float64()),
    ],
    "edge/ready",
)

RAN = versioned(
    [
        *READY,
        required("sequences", list_of(SEQUENCE)),
        required("turns", list_of(TURN)),
        required("messages", list_of(MESSAGE)),
        required("artefact", pa.binary()),
        required("artefact_digest", pa.utf8()),
        required("stop_reason", pa.utf8()),
        required("failure_class", pa.utf8()),
        required("failure_code", pa.utf8()),
        required("failure_message", pa.utf8()),
        required("run_s", pa.float64()),
        required("llm_s", pa.float64()),
        required("tool_s", pa.float64()),
        *HISTORY,
    ],
    "edge/ran",
)

SCORED = versioned(
    [
        *RAN,
        required("scored", pa.bool_()),
        required("reward", pa.float32()),
        required("reward_parts", list_of(REWARD_PART)),
        required("grader_log", pa.utf8()),
        required("eval_failure_class", pa.utf8()),
        required("eval_failure_code", pa.utf8()),
        required("eval_failure_message", pa.utf8()),
        required("eval_s", pa.float64()),
    ],
    "edge/scored",
)

EDGES: Mapping[str, pa.Schema] = MappingProxyType(
    {"lease": LEASED, "ready": READY, "ran": RAN, "scored": SCORED}
)

REDELIVERED_EDGES = frozenset({"ran", "scored"})
"""Edges whose rows are kept until acked and sent again when a stream is lost."""

EDGE_BACK = versioned(
    [
        required("kind", pa.utf8()),
        required("rows", pa.int32()),
        required("bytes", pa.int64()),
        required("run_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
    ],
    "edge_back",
)

CONTROL = versioned(
    [
        required("seq", pa.int64()),
        required("re", pa.int64()),
        required("kind", pa.utf8()),
        required("run_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        required("stage", pa.utf8()),
        required("code", pa.utf8()),
        required("payload", pa.utf8()),
    ],
    "control",
)

SEQUENCES = versioned(
    [
        required("sequence_id", pa.int64()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("sample_index", pa.int32()),
        required("attempt", pa.int32()),
        required("segment", pa.int32()),
        required("reward", pa.float32()),
        required("token_ids", list_of(pa.int32())),
        required("logprobs", list_of(pa.float32())),
        *(required(name, dtype) for name, dtype in SPANS.items()),
    ],
    "sequences",
)

STREAM = versioned([required("delivery_seq", pa.int64()), *SEQUENCES], "stream")
"""What `DoGet` gives a trainer: `sequences` in delivery order, in batches of whole groups."""

RUN_ID = pa.field("run_id", pa.utf8())
"""Of every table but `sequences`, for queries over many runs; null in files from before it was."""

ROLLOUTS = versioned(
    [
        RUN_ID,
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("sample_index", pa.int32()),
        required("rollout_key", pa.utf8()),
        required("attempt", pa.int32()),
        required("task_id", pa.utf8()),
        required("data_source", pa.utf8()),
        required("env", pa.utf8()),
        required("agent", pa.utf8()),
        required("status", pa.utf8()),
        required("valid", pa.bool_()),
        required("failure_class", pa.utf8()),
        required("failure_code", pa.utf8()),
        required("failure_message", pa.utf8()),
        required("stop_reason", pa.utf8()),
        pa.field("reward", pa.float32()),
        required("reward_parts", list_of(REWARD_PART)),
        required("num_sequences", pa.int32()),
        required("num_turns", pa.int32()),
        required("num_tokens", pa.int32()),
        required("num_sampled", pa.int32()),
        required("num_tool_calls", pa.int32()),
        required("min_version", pa.int32()),
        required("max_version", pa.int32()),
        required("queue_s", pa.float64()),
        required("init_s", pa.float64()),
        required("run_s", pa.float64()),
        required("llm_s", pa.float64()),
        required("tool_s", pa.float64()),
        required("eval_s", pa.float64()),
        required("artefact", pa.binary()),
        required("artefact_digest", pa.utf8()),
        required("committed_at", pa.timestamp("us", tz="UTC")),
        required("extra", pa.utf8()),
        *(field.with_nullable(True) for field in HISTORY),
        pa.field("logprob_sum", pa.float64()),
    ],
    "rollouts",
)

TURNS = versioned(
    [RUN_ID, required("rollout_id", pa.int64()), required("attempt", pa.int32()), *TURN], "turns"
)

MESSAGES = versioned(
    [
        RUN_ID,
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
        required("index", pa.int32()),
        *MESSAGE,
    ],
    "messages",
)

GROUPS = versioned(
    [
        RUN_ID,
        required("event_seq", pa.int64()),
        required("group_id", pa.int64()),
        required("event", pa.utf8()),
        required("kept", pa.bool_()),
        required("reason", pa.utf8()),
        required("delivery_seq", pa.int64()),
        required("num_members", pa.int32()),
        required("num_valid", pa.int32()),
        required("min_version", pa.int32()),
        pa.field("mean_reward", pa.float64()),
        required("at", pa.timestamp("us", tz="UTC")),
    ],
    "groups",
)
"""`event`: decided (with `kept`, `reason`), delivered (with `delivery_seq`, else -1) or stale."""

TASKS = versioned(
    [
        RUN_ID,
        required("group_id", pa.int64()),
        required("task_id", pa.utf8()),
        required("data_source", pa.utf8()),
        required("env", pa.utf8()),
        required("n", pa.int32()),
        required("task", pa.utf8()),
        required("sampling", pa.utf8()),
        required("extra", pa.utf8()),
    ],
    "tasks",
)

TRAINED = versioned(
    [
        RUN_ID,
        required("consumer", pa.utf8()),
        required("step", pa.int64()),
        required("checkpoint", pa.utf8()),
        required("parent", pa.utf8()),
        required("version", pa.int32()),
        required("sequence_id", pa.int64()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        required("delivery_seq", pa.int64()),
        required("reward", pa.float32()),
        required("advantage", pa.float32()),
        required("trained_tokens", pa.int32()),
        pa.field("loss", pa.float32()),
        pa.field("learner_logprobs", list_of(pa.float32())),
    ],
    "trained",
)
"""One row per sequence that went into a checkpoint of a trainer, appended with that checkpoint: its
name is the SHA-256 of its weights, `parent` that of the weights before the step. What made a
checkpoint is the chain of its parents.
"""

ANNOTATIONS = versioned(
    [
        RUN_ID,
        required("annotation_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        pa.field("attempt", pa.int32()),
        pa.field("turn", pa.int32()),
        required("label", pa.utf8()),
        pa.field("value", pa.float64()),
        required("comment", pa.utf8()),
        required("author", pa.utf8()),
        required("at", pa.timestamp("us", tz="UTC")),
    ],
    "annotations",
)
"""What people and scripts say of rollouts; append-only."""

VERSIONS = versioned(
    [
        RUN_ID,
        required("version", pa.int32()),
        required("path", pa.utf8()),
        required("pause", pa.utf8()),
        required("adapter", pa.bool_()),
        required("took", list_of(pa.utf8())),
        required("failed", list_of(pa.utf8())),
        required("load_s", pa.float64()),
        required("at", pa.timestamp("us", tz="UTC")),
    ],
    "versions",
)
"""One row per published policy version: where its weights are (empty: the trainer brought them to
its servers itself), which servers took them at once and which later or never (with the reason), and
how long that took. Version 0, what served when the run began, has none.
"""

APPENDED: Mapping[str, pa.Schema] = MappingProxyType(
    {"trained": TRAINED, "annotations": ANNOTATIONS, "versions": VERSIONS}
)
"""Tables that grow beside the commits, by whoever appends (`prorl/storage/appended.py`)."""

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
    hint = "upgrade prorl to read it" if newer else "write it again with this prorl"
    raise SchemaError(f"{where} has schema version {found}", f"version {SCHEMA_VERSION}", hint)


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
