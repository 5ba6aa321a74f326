"""Every shape that crosses a process or reaches a disk: edges, control stream, tables of a run.

A rollout is a row that grows. Each edge's schema is the previous one plus what the stage added:

    LEASED  identity, task, sampling, limits, backend, seed
    READY   + sandbox, prompt, tools, init_s
    RAN     + sequences, turns, messages, artifact, stop reason, failure, run_s, llm_s, tool_s
    SCORED  + scored, reward, reward_parts, grader_log, eval failure, eval_s, env_sha256

*Edge protocol* over a `Channel`: the consumer dials `edge/<name>` on its upstream and sends
EDGE_BACK batches: `credit` rows (rows and bytes, additive) and `ack` rows (run_id, rollout_id,
attempt). The upstream sends work batches of the edge's schema, never more than credit. No credit,
no send. Several consumers compete; a row goes to one of them. On `lease` and `ready` a row counts
as handed over when it is received (nothing is redelivered); on `ran` and `scored` the upstream
keeps a row until its ack, which the consumer sends only after its own downstream acked (EVAL) or
the commit is durable (store), and redelivers it to another consumer when the stream is lost.
*Control protocol*: `prorl/control.py`.

Rules for all of them: list children are named `element`; token columns hold no nulls; a record
batch stays under `MAX_BATCH_BYTES` unless one row (or, in streams to trainers, one group) alone is
larger; rows are hashed by value (`row_hashes`), never by IPC bytes. Both ends of a channel compare
`SCHEMA_VERSION` when it opens; a run directory carries it in its manifest.

Tables of a run directory: `sequences` (what trainers stream; numbers only, no nulls but in
`reward`), `rollouts` (what SQL filters), `turns`, `messages` (for people), `groups` (append-only
events), `tasks`, `attempts` (those that did not commit, and why), `routed_experts` (of mixtures,
where a run asks for them). Beside them `trained` (which sequences made which checkpoint),
`annotations`, `versions` (published weights), `scores` and `metrics` (what a trainer logs of its
steps) are appended to. `partial` keeps what attempts that did not commit had sampled, in SCORED's
shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from prorl.errors import SchemaError
from prorl.schema.fields import (
    ENDPOINT_COUNTS,
    IDENTITY,
    LIMITS,
    MESSAGE,
    PLACE,
    REFUSAL,
    RESUMES,
    REWARD_PART,
    ROUTED,
    SAMPLING,
    SANDBOX_REF,
    SCHEMA_VERSION,
    SEQUENCE,
    SPANS,
    TURN,
    list_of,
    optional,
    required,
    versioned,
)

MAX_BATCH_BYTES = 2**21 - 4096
"""Flight delivers bodies below 2 MiB 8-byte aligned, and they stay off malloc's mmap path."""

MAX_SEGMENTS = 1024
"""`sequence_id = rollout_id * MAX_SEGMENTS + segment`, the same in every retry and replay."""

LEASED = versioned(
    [
        *IDENTITY,
        required("task_id", pa.utf8(), "as the task file says"),
        required("data_source", pa.utf8(), "where the task comes from, as the task file says"),
        required("task", pa.utf8(), "the whole task as JSON"),
        required("env", pa.utf8(), "task domain: math, code, swe ..."),
        required("agent", pa.utf8(), "how the policy was driven: native, or a program's name"),
        required(
            "renderer", pa.utf8(), "how messages become ids: a template's name or a directory"
        ),
        required("sampling", SAMPLING, "sampling parameters that were asked for"),
        required("limits", LIMITS, "budgets of the rollout, seconds that remain and counts"),
        required(
            "backend",
            pa.utf8(),
            "model server; a key of `backends` in the manifest, which names policy and hash",
        ),
        required(
            "min_version", pa.int32(), "oldest policy version that sampled a token; -1 without one"
        ),
        required("run_seed", pa.int64(), "seed of the run; all sampling seeds derive from it"),
        required("queue_s", pa.float64(), "seconds from acceptance to lease"),
        required("extra", pa.utf8(), "the user's own values as JSON"),
        required(
            "on_lost_tool_call",
            pa.utf8(),
            "a tool call that may have run when its worker died: report it to the policy, or fail",
        ),
        required(
            "keep_routed_experts",
            pa.bool_(),
            "whether model servers are asked which experts a token took",
        ),
        required("train", list_of(pa.utf8()), "lineages whose sampled ids train"),
    ],
    "edge/lease",
)

READY = versioned(
    [
        *LEASED,
        required("sandbox", SANDBOX_REF, "where the attempt works: node, sandbox, socket"),
        required("prompt", list_of(MESSAGE), "messages that the policy sees first"),
        required("tools", pa.utf8(), "tool specifications as JSON"),
        required("responds", pa.bool_(), "whether the env has turns of its own"),
        required("init_s", pa.float64(), "seconds that INIT took"),
    ],
    "edge/ready",
)

RAN = versioned(
    [
        *READY,
        required("sequences", list_of(SEQUENCE), "token sequences of the attempt"),
        required("turns", list_of(TURN), "model calls of the attempt"),
        required("messages", list_of(MESSAGE), "what was said and done"),
        required(
            "artifact",
            pa.binary(),
            "what EVAL grades: a patch, an answer, packed files; empty where not `rescorable`",
        ),
        required(
            "rescorable",
            pa.bool_(),
            "whether the artifact is all that was graded; false: it was too large, and the tests"
            " ran in the agent's own sandbox",
        ),
        required("artifact_digest", pa.utf8(), "BLAKE2b-128 of the artifact"),
        required(
            "env_state",
            pa.utf8(),
            "what the env remembered of the rollout at its end, as JSON; empty where it kept"
            " nothing; null in files from before it was",
        ),
        required(
            "stop_reason",
            pa.utf8(),
            "why the agent stopped: done, max_turns, max_tokens, context, deadline ...",
        ),
        required(
            "failure_class",
            pa.utf8(),
            "empty, policy (its own fault, trains), infra, task, or cancelled",
        ),
        required("failure_code", pa.utf8(), "which failure; empty without one"),
        required("failure_message", pa.utf8(), "one line about it"),
        required("run_s", pa.float64(), "seconds that RUN took"),
        required("llm_s", pa.float64(), "seconds in model calls"),
        required("tool_s", pa.float64(), "seconds in tools"),
        required(
            "routed_experts", list_of(ROUTED), "experts of the sequences; empty unless asked for"
        ),
        *RESUMES,
        *ENDPOINT_COUNTS,
        *PLACE,
        required(
            "agent_refusals",
            list_of(REFUSAL),
            "hosts that the agent's sandbox tried to reach and may not: host, port, reason, times",
        ),
    ],
    "edge/ran",
)

SCORED = versioned(
    [
        *RAN,
        required("scored", pa.bool_(), "whether EVAL came to a verdict"),
        required(
            "reward",
            pa.float32(),
            "sum of value x weight over the reward's parts; without a verdict null in `rollouts`,"
            " and 0 on an edge, where `scored` says so",
        ),
        required(
            "reward_parts",
            list_of(REWARD_PART),
            "name, value and weight of each part of the reward",
        ),
        required("grader_log", pa.utf8(), "what the grader said"),
        required("eval_failure_code", pa.utf8(), "as failure_code, of EVAL"),
        required("eval_failure_message", pa.utf8(), "as failure_message, of EVAL"),
        required("eval_s", pa.float64(), "seconds that EVAL took"),
        required(
            "env_sha256",
            pa.utf8(),
            "SHA-256 of the file of a user's env that scored it; empty for envs of ours and of"
            " installed packages; null in files from before it was",
        ),
        required(
            "verifier_refusals",
            list_of(REFUSAL),
            "hosts that the verifier's sandbox tried to reach and may not, as agent_refusals",
        ),
    ],
    "edge/scored",
)

EDGES: Mapping[str, pa.Schema] = MappingProxyType(
    {"lease": LEASED, "ready": READY, "ran": RAN, "scored": SCORED}
)

EDGE_BACK = versioned(
    [
        required("kind", pa.utf8(), "what the row says"),
        required("rows", pa.int32(), "credit in rows"),
        required("bytes", pa.int64(), "credit in bytes"),
        required("run_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
    ],
    "edge_back",
)

CONTROL = versioned(
    [
        required("seq", pa.int64(), "number of the row on its stream, dense from 1"),
        required("re", pa.int64(), "the `seq` that this row answers"),
        required("kind", pa.utf8()),
        required("run_id", pa.utf8()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        required("stage", pa.utf8(), "init, run or eval"),
        required("code", pa.utf8(), "error or failure code; empty without one"),
        required("payload", pa.utf8(), "JSON; its record is in prorl/control.py"),
    ],
    "control",
)

SEQUENCES = versioned(
    [
        required(
            "sequence_id",
            pa.int64(),
            "rollout_id * 1024 + segment: the same for every retry, redelivery and replay",
        ),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("sample_index", pa.int32()),
        required("attempt", pa.int32()),
        required(
            "segment",
            pa.int32(),
            "0, and one more each time a harness rewrote its history or began another conversation",
        ),
        required("lineage", pa.utf8()),
        required("parent", pa.int32()),
        required("weight", pa.float32()),
        optional("reward", pa.float32()),
        required(
            "token_ids", list_of(pa.int32()), "prompt, tool output and everything sampled, in order"
        ),
        required(
            "logprobs",
            list_of(pa.float32()),
            "of sampled tokens only, under the distribution that was sampled from",
        ),
        *(required(name, dtype) for name, dtype in SPANS.items()),
    ],
    "sequences",
    reward="of its rollout; null where EVAL could not score it: then no trainer is sent it",
)

STREAM = versioned(
    [
        required(
            "delivery_seq",
            pa.int64(),
            "of delivered: place in the run's one delivery order, dense from 0; else -1",
        ),
        *SEQUENCES,
    ],
    "stream",
)
"""The columns that `DoGet` gives a trainer: `sequences` in delivery order, in batches of whole
groups.
"""

RUN_ID = optional("run_id", pa.utf8())
"""The run of each row, in every table but `sequences`, for queries over many runs; null in files
from before it was.
"""

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
        required("status", pa.utf8(), "completed, failed or cancelled"),
        required(
            "valid",
            pa.bool_(),
            "whether the reward counts: a token may train (num_trained) and nothing of ours failed",
        ),
        required("failure_class", pa.utf8()),
        required("failure_code", pa.utf8()),
        required("failure_message", pa.utf8()),
        required("stop_reason", pa.utf8()),
        optional("reward", pa.float32()),
        required("reward_parts", list_of(REWARD_PART)),
        required("num_sequences", pa.int32(), "rows in `sequences`"),
        required("num_turns", pa.int32(), "model calls"),
        required("num_tokens", pa.int32(), "tokens of all sequences"),
        required("num_sampled", pa.int32(), "tokens that a policy sampled"),
        required(
            "num_trained",
            pa.int32(),
            "sampled tokens that train: their weights are versions of this run",
        ),
        required("num_tool_calls", pa.int32(), "tool calls in all turns"),
        required("min_version", pa.int32()),
        required(
            "max_version",
            pa.int32(),
            "newest known policy version that sampled a token; without one, that of the lease",
        ),
        required("queue_s", pa.float64()),
        required("init_s", pa.float64()),
        required("run_s", pa.float64()),
        required("llm_s", pa.float64()),
        required("tool_s", pa.float64()),
        required("eval_s", pa.float64()),
        required("artifact", pa.binary()),
        required("artifact_digest", pa.utf8()),
        required("committed_at", pa.timestamp("us", tz="UTC"), "when the store committed the row"),
        required("extra", pa.utf8()),
        *(field.with_nullable(True) for field in (*RESUMES, *ENDPOINT_COUNTS, *PLACE)),
        optional(
            "logprob_sum", pa.float64(), "of all sampled tokens; null in files from before it was"
        ),
        optional("rescorable", pa.bool_()),
        optional("env_sha256", pa.utf8()),
        optional("agent_refusals", list_of(REFUSAL)),
        optional("verifier_refusals", list_of(REFUSAL)),
        optional("env_state", pa.utf8()),
    ],
    "rollouts",
    min_version="oldest known policy version that sampled a token; without one, that of the lease",
)

TURNS = versioned(
    [RUN_ID, required("rollout_id", pa.int64()), required("attempt", pa.int32()), *TURN],
    "turns",
    tool_calls="how many tools the turn called",
)

MESSAGES = versioned(
    [
        RUN_ID,
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
        required("index", pa.int32(), "place in the transcript, from 0"),
        *MESSAGE,
    ],
    "messages",
)

GROUPS = versioned(
    [
        RUN_ID,
        required("event_seq", pa.int64(), "number of the event, dense per run"),
        required("group_id", pa.int64()),
        required("event", pa.utf8(), "decided, delivered or stale"),
        required("kept", pa.bool_(), "of decided: whether the group may train"),
        required("reason", pa.utf8(), "of decided: why, as the filter says"),
        required("delivery_seq", pa.int64()),
        required("num_members", pa.int32(), "rollouts of the group"),
        required("num_valid", pa.int32(), "members whose reward counts"),
        required("min_version", pa.int32()),
        optional("mean_reward", pa.float64(), "over valid members"),
        required("event_at", pa.timestamp("us", tz="UTC"), "when it happened"),
    ],
    "groups",
    min_version="oldest version that sampled a token of the group",
)

TASKS = versioned(
    [
        RUN_ID,
        required("group_id", pa.int64()),
        required("task_id", pa.utf8()),
        required("data_source", pa.utf8()),
        required("env", pa.utf8()),
        required("n", pa.int32(), "rollouts of the group"),
        required("task", pa.utf8()),
        required("sampling", pa.utf8()),
        required("extra", pa.utf8()),
    ],
    "tasks",
    sampling="sampling parameters of this group as JSON; empty = the run's",
)

ATTEMPTS = versioned(
    [
        RUN_ID,
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        required("stage", pa.utf8()),
        *PLACE,
        required("failure_class", pa.utf8()),
        required("failure_code", pa.utf8()),
        required("failure_message", pa.utf8()),
        required("seconds", pa.float64(), "from its lease to its end"),
        required("num_sampled", pa.int32()),
        required("ended_at", pa.timestamp("us", tz="UTC"), "when it ended"),
    ],
    "attempts",
    stage="where it was: init, run or eval",
    node="node that had it last",
    worker="process that had it last",
    server="model server that it was given",
    num_sampled="tokens that it had sampled, as far as its worker had said; `partial` has them",
    failure_code="why it ended; `returned`: its worker left, or its line broke, charged to nobody",
)
"""One row for each attempt that began and did not commit."""

ROUTING = versioned(
    [
        RUN_ID,
        required("sequence_id", pa.int64()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        *(field for field in ROUTED if field.name != "segment"),
    ],
    "routed_experts",
)
"""Too wide for `sequences`, which trainers stream; for runs that ask."""

TRAINED = versioned(
    [
        RUN_ID,
        required("consumer", pa.utf8(), "the trainer, by the name under which it reads the stream"),
        required("step", pa.int64(), "step of the trainer, from 1, whose batch had the sequence"),
        required(
            "checkpoint",
            pa.utf8(),
            "SHA-256 of the weights of the first checkpoint behind the step",
        ),
        required("parent_checkpoint", pa.utf8(), "SHA-256 of the weights of the checkpoint before"),
        required("version", pa.int32()),
        required("sequence_id", pa.int64()),
        required("rollout_id", pa.int64()),
        required("group_id", pa.int64()),
        required("attempt", pa.int32()),
        required("delivery_seq", pa.int64()),
        required("reward", pa.float32()),
        required("advantage", pa.float32(), "that the trainer used"),
        required("trained_tokens", pa.int32(), "tokens of the sequence that entered the loss"),
        optional(
            "loss",
            pa.float32(),
            "the sequence's share of the step's loss; null when the trainer does not say",
        ),
        optional(
            "learner_logprobs",
            list_of(pa.float32()),
            "of sampled tokens under the learner's weights; null unless it is asked to",
        ),
    ],
    "trained",
    version="policy version of the checkpoint, as it is published",
)
"""One row per sequence that went into a checkpoint, which the chain of its parents has made."""

ANNOTATIONS = versioned(
    [
        RUN_ID,
        required("annotation_id", pa.utf8(), "of one annotation; given once"),
        required("rollout_id", pa.int64()),
        optional("attempt", pa.int32()),
        optional("turn", pa.int32(), "number of the model call, from 0"),
        required("label", pa.utf8(), "what is said in one word"),
        optional("value", pa.float64(), "what is said as a number"),
        required("comment", pa.utf8(), "what is said in words"),
        required("author", pa.utf8(), "person or script"),
        required("created_at", pa.timestamp("us", tz="UTC")),
    ],
    "annotations",
    turn="the turn that is meant; null: the whole rollout",
    attempt="the attempt that is meant; null: the one that was committed",
    created_at="when it was written",
)
"""The notes of people and scripts on rollouts; append-only."""

VERSIONS = versioned(
    [
        RUN_ID,
        required("version", pa.int32()),
        required("label", pa.utf8()),
        required("path", pa.utf8()),
        required("pause", pa.utf8()),
        required("adapter", pa.bool_()),
        required("loaded_servers", list_of(pa.utf8())),
        required("failed_servers", list_of(pa.utf8())),
        required("load_s", pa.float64()),
        required("published_at", pa.timestamp("us", tz="UTC")),
    ],
    "versions",
    version="number of the published weights, from 1 on; 0: what served at the start",
    label="what servers call them: TAG:VERSION; of 0 all that they said, with spaces",
    path="directory of the weights; empty: the trainer brought them to its servers",
    pause="what running calls met: abort, wait or keep",
    adapter="whether it is a LoRA adapter",
    loaded_servers="servers that loaded it at once",
    failed_servers="servers that loaded it later or never, each with the reason",
    load_s="seconds until the servers of `loaded_servers` had it",
    published_at="when it was published",
)
"""One row per published policy version; 0 is what served when the run began."""

SCORES = versioned(
    [
        RUN_ID,
        required("score", pa.utf8(), "name of the scoring"),
        required("rollout_id", pa.int64()),
        required("attempt", pa.int32()),
        optional("reward", pa.float32()),
        optional("reward_parts", pa.list_(REWARD_PART)),
        optional("failure_code", pa.utf8()),
        optional("failure_message", pa.utf8()),
        optional("grader_log", pa.utf8()),
        optional("eval_s", pa.float64()),
        optional("provenance", pa.utf8(), "what gave it, JSON: env, tasks, commits, code, time"),
    ],
    "scores",
    reward="null where the scoring came to no verdict; why is in the failure",
)
"""Rewards that were given later, never instead of those that were given first."""

METRICS = versioned(
    [
        RUN_ID,
        required("consumer", pa.utf8()),
        required("step", pa.int64()),
        optional("version", pa.int32()),
        required("name", pa.utf8()),
        required("value", pa.float64()),
        required("time", pa.timestamp("us", tz="UTC"), "when the store received it"),
    ],
    "metrics",
    step="step of the trainer",
    version="policy version that the step made; null when the trainer does not say",
    name="what was measured: loss, kl, entropy, grad_norm, idle_share, or any other name",
    value="a finite number",
)
"""The metrics that a trainer logs of its steps (`Client.log`); a step that is logged again replaces
its rows in SQL, not on disk.
"""

APPENDED: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "trained": TRAINED,
        "annotations": ANNOTATIONS,
        "versions": VERSIONS,
        "scores": SCORES,
        "metrics": METRICS,
    }
)
"""Tables that grow beside the commits, by whoever appends (`prorl/storage/files/appended.py`)."""

TABLES: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "sequences": SEQUENCES,
        "rollouts": ROLLOUTS,
        "turns": TURNS,
        "messages": MESSAGES,
        "groups": GROUPS,
        "tasks": TASKS,
        "routed_experts": ROUTING,
        "attempts": ATTEMPTS,
    }
)


ARROW_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""The errors that pyarrow raises for bytes of others: it decodes the words of its own error as
UTF-8, and what they quote of a damaged file need not be any.
"""


def check_version(version: int | str | None, where: str) -> None:
    """Raise SchemaError unless `version` is a version that this code reads."""
    if str(version) == str(SCHEMA_VERSION):
        return
    newer = str(version).isdecimal() and int(str(version)) > SCHEMA_VERSION
    hint = "upgrade prorl to read it" if newer else "use the prorl that wrote it"
    raise SchemaError(f"{where} has schema version {version}", f"version {SCHEMA_VERSION}", hint)


def check_schema(actual: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Raise SchemaError unless names and types are equal (metadata and nullability aside)."""
    ours = [(f.name, f.type) for f in expected]
    theirs = [(f.name, f.type) for f in actual]
    if ours == theirs:
        return
    wrong = sorted({name for name, _ in set(ours) ^ set(theirs)}) or ["the order of columns"]
    raise SchemaError(
        f"{where} differs in {', '.join(wrong)}", f"the columns of {schema_name(expected)}"
    )


def schema_name(schema: pa.Schema) -> str:
    """Name a schema of this module, e.g. `sequences` or `edge/ran`."""
    return str((schema.metadata or {}).get(b"prorl.schema", b"?").decode())
