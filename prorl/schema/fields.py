"""The parts of which the schemas are made: columns without nulls, structs, and the fields that
several share. `prorl.schema` puts them together; whoever reads or writes an edge or a table starts
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

import pyarrow as pa

from prorl.types import RewardPart, RolloutLimits, SamplingParams

SCHEMA_VERSION = 4
"""Raised by one when a column changes its meaning or type, or goes: stored runs of another version
are refused. Not for a new one, which is null in runs stored before it; edges, though, must have the
same columns at both ends, so that service and nodes are upgraded together.
"""


MEANINGS: dict[str, str] = {}
"""The meaning of each column, in one line, by its name: one name means one thing everywhere. `prorl
schema` prints it; a table that says more of a column has a line of its own, `table.column`.
"""


def optional(name: str, dtype: pa.DataType, meaning: str = "") -> pa.Field:
    """A field of a schema that may be null; its meaning is said where its name comes first."""
    if meaning:
        MEANINGS.setdefault(name, meaning)
    return pa.field(name, dtype)


def required(name: str, dtype: pa.DataType, meaning: str = "") -> pa.Field:
    """A field of a schema that may not be null; its meaning is said where its name comes first."""
    return optional(name, dtype, meaning).with_nullable(False)


def list_of(dtype: pa.DataType) -> pa.ListType:
    """Lists without nulls, their children named as everywhere here."""
    return pa.list_(pa.field("element", dtype, nullable=False))


def _struct(*columns: pa.Field, **types: pa.DataType) -> pa.StructType:
    return pa.struct([*columns, *(required(name, dtype) for name, dtype in types.items())])


def versioned(fields: list[pa.Field], name: str, /, **meanings: str) -> pa.Schema:
    """A schema that says its name and version; `meanings` are those of this table alone."""
    MEANINGS.update({f"{name}.{column}": text for column, text in meanings.items()})
    return pa.schema(
        fields,
        metadata={
            b"prorl.schema": name.encode(),
            b"prorl.schema_version": str(SCHEMA_VERSION).encode(),
        },
    )


def _struct_of(record: type, real: pa.DataType) -> pa.StructType:
    """The struct of a record of `prorl.types`, which owns names and order."""
    kinds = {"float": real, "int": pa.int32(), "str": pa.utf8()}
    return _struct(**{field.name: kinds[str(field.type)] for field in fields(record)})


SAMPLING = _struct_of(SamplingParams, pa.float32())
LIMITS = _struct_of(RolloutLimits, pa.float64())
SANDBOX_REF = _struct(node_id=pa.utf8(), sandbox_id=pa.utf8(), socket_path=pa.utf8())

MESSAGE = _struct(
    required("role", pa.utf8(), "system, user, assistant, tool, or grader"),
    required("content", pa.utf8(), "text, as it was said"),
    required("tool_calls", pa.utf8(), "JSON list of {name, arguments, error}"),
    required("name", pa.utf8(), "of the tool that answers; else empty"),
    required("turn", pa.int32()),
    required(
        "reasoning",
        pa.utf8(),
        "what the policy thought before it spoke, where the template separates it",
    ),
    required("call_id", pa.utf8(), "of a tool's answer: the call that it answers"),
)
"""`tool_calls` is JSON text: [{"name", "arguments", "error", "id", "text"}]."""

SPANS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        field.name: field.type
        for field in (
            required(
                "span_end",
                list_of(pa.int32()),
                "end of each span in token_ids; the last is the length",
            ),
            required(
                "span_kind", list_of(pa.uint8()), "0 context, 1 trained, 2 sampled but not trained"
            ),
            required(
                "span_version",
                list_of(pa.int32()),
                "policy version that sampled the span; -1 for context",
            ),
            required("span_turn", list_of(pa.int32()), "turn that the span belongs to"),
            required(
                "span_temperature",
                list_of(pa.float32()),
                "temperature that the span was sampled at",
            ),
        )
    }
)

SEQUENCE = _struct(
    required("segment", pa.int32()),
    required(
        "lineage",
        pa.utf8(),
        "which conversation: main (the task's), subagent (another with tools), auxiliary (one"
        " without), compacted (continues after the agent summarised its history)",
    ),
    required("parent", pa.int32(), "segment that it forked from or goes on from; -1 for none"),
    required(
        "weight",
        pa.float32(),
        "1 over the sequences of its rollout that train; 0 where nothing of it does",
    ),
    token_ids=list_of(pa.int32()),
    logprobs=list_of(pa.float32()),
    **SPANS,
)

PLACE = (
    required("node", pa.utf8(), "node on which the policy acted"),
    required("worker", pa.utf8(), "process that ran it"),
    required(
        "server", pa.utf8(), "model server that answered last, else the one that it was given"
    ),
)
"""The place where an attempt was. Null in files from before these columns."""

ROUTED = _struct(
    required("segment", pa.int32()),
    required("width", pa.int32(), "experts of a token: layers x top_k, layer by layer"),
    required(
        "experts",
        pa.binary(),
        "little-endian, `width` a token from the first token on: uint8, or int16 where `wide`",
    ),
    required("wide", pa.bool_(), "whether an expert takes two bytes"),
)

TURN = _struct(
    required("turn", pa.int32()),
    required("segment", pa.int32()),
    required("prompt_tokens", pa.int32(), "length of the prompt"),
    required("completion_tokens", pa.int32(), "tokens sampled in this call"),
    required("cached_tokens", pa.int32(), "prompt tokens that the server had in its prefix cache"),
    required("finish_reason", pa.utf8(), "stop, length, abort ..."),
    required("temperature", pa.float32(), "that the call was sampled at"),
    required("policy_version", pa.int32(), "version of the weights that answered"),
    required("backend", pa.utf8()),
    required("llm_s", pa.float64()),
    required("tool_s", pa.float64()),
    tool_calls=pa.int32(),
)

REWARD_PART = _struct_of(RewardPart, pa.float64())

REFUSAL = _struct(host=pa.utf8(), port=pa.int32(), reason=pa.utf8(), times=pa.int32())
"""`prorl.types.NetworkRefusal`."""

IDENTITY = (
    required("run_id", pa.utf8(), "name of the run"),
    required("rollout_id", pa.int64(), "the rollout; dense per run, given when it is accepted"),
    required("group_id", pa.int64(), "the group (n sibling rollouts of one task); dense per run"),
    required("sample_index", pa.int32(), "0 to n - 1 within the group"),
    required(
        "rollout_key", pa.utf8(), "idempotency key of the client with the sample index, or a hash"
    ),
    required(
        "attempt", pa.int32(), "which try at the rollout, from 1; a fencing token on every write"
    ),
)

RESUMES = tuple(
    _struct(required("resumes", pa.int32(), "how often another worker went on with the attempt"))
)
"""Null in files from before this column."""

ENDPOINT_COUNTS = tuple(
    _struct(
        required(
            "continued_calls", pa.int32(), "calls of a program that went on from recorded ids"
        ),
        required(
            "rendered_calls", pa.int32(), "calls of a program whose prompt was rendered whole"
        ),
        required(
            "forked_calls", pa.int32(), "calls that went on from, or repeated, an earlier prompt"
        ),
        required(
            "edited_replies", pa.int32(), "replies that the program sent back as something else"
        ),
        required(
            "unused_replies", pa.int32(), "replies that nothing went on from, beside one that did"
        ),
        required(
            "retokenization_mismatches",
            pa.int32(),
            "continued calls whose prompt, rendered again, would not begin with the ids recorded;"
            " a long conversation is looked at when its calls have doubled",
        ),
        required(
            "image_placeholders", pa.int32(), "images of a program that the policy read as a text"
        ),
    )
)
"""`prorl.types.EndpointCounts`: null in files from before."""
