"""What the schemas are made of: columns without nulls, structs, and the fields that several share.

`prorl.schema` puts them together; whoever reads or writes an edge or a table starts there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised by one when a column changes its meaning or type, or goes; not for an optional new one."""


def required(name: str, dtype: pa.DataType) -> pa.Field:
    """A field of a schema that may not be null."""
    return pa.field(name, dtype, nullable=False)


def list_of(dtype: pa.DataType) -> pa.ListType:
    """Lists without nulls, their children named as everywhere here."""
    return pa.list_(pa.field("element", dtype, nullable=False))


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct([required(name, dtype) for name, dtype in fields.items()])


def versioned(fields: list[pa.Field], name: str) -> pa.Schema:
    """A schema that says its name and version."""
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
    role=pa.utf8(),
    content=pa.utf8(),
    tool_calls=pa.utf8(),
    name=pa.utf8(),
    turn=pa.int32(),
    reasoning=pa.utf8(),
    call_id=pa.utf8(),
)
"""`tool_calls` is JSON text: [{"name", "arguments", "error", "id", "text"}]."""

SPANS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "span_end": list_of(pa.int32()),
        "span_kind": list_of(pa.uint8()),
        "span_version": list_of(pa.int32()),
        "span_turn": list_of(pa.int32()),
        "span_temperature": list_of(pa.float32()),
    }
)

SEQUENCE = _struct(
    segment=pa.int32(), token_ids=list_of(pa.int32()), logprobs=list_of(pa.float32()), **SPANS
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
    required("run_id", pa.utf8()),
    required("rollout_id", pa.int64()),
    required("group_id", pa.int64()),
    required("sample_index", pa.int32()),
    required("rollout_key", pa.utf8()),
    required("attempt", pa.int32()),
)

HISTORY = tuple(
    _struct(
        resumes=pa.int32(),
        forked_from=pa.utf8(),
        diverged=pa.int32(),
        anew=pa.utf8(),
        suspensions=pa.int32(),
    )
)
"""How often another worker went on with the attempt; `RUN/ROLLOUT/TURN` that a fork continues, and
how many of its recorded tool calls said something else this time; why what a leaving node had of
the rollout was not gone on with; how often it stood still for other runs.
Null in files from before."""
