"""What a journal holds: each record is one Arrow record batch of one row, of its kind's schema.

    ROW     the READY row as RUN received it
    LIFE    a worker has taken the attempt over
    SAID    a completed model call: ids of the context before it, sampled ids, logprobs, versions
    ANSWER  what the policy is told of a tool call
    END     how the loop ended, and what crosses into EVAL
    MOVED   what is before it was recorded on another node, which handed the attempt over

Ids and logprobs are exact; a record that does not validate counts as damage where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from prorl.errors import SchemaError
from prorl.schema import READY
from prorl.schema_fields import list_of, required
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    Json,
    PolicyVersion,
    StopReason,
)

if TYPE_CHECKING:
    from prorl.types import Float32, Int32


class FrameKind(IntEnum):
    """What a frame of the journal holds."""

    ROW = 1
    LIFE = 2
    SAID = 3
    ANSWER = 4
    END = 5
    MOVED = 6


LIFE = pa.schema([required("epoch", pa.int32())])

SAID = pa.schema(
    [
        required("turn", pa.int32()),
        required("segment", pa.int32()),
        required("context", list_of(pa.int32())),
        required("token_ids", list_of(pa.int32())),
        required("logprobs", list_of(pa.float32())),
        required("version_end", list_of(pa.int32())),
        required("version", list_of(pa.int32())),
        required("finish_reason", pa.utf8()),
        required("temperature", pa.float64()),
        required("cached_tokens", pa.int32()),
        required("backend", pa.utf8()),
        required("llm_s", pa.float64()),
        required("spent_s", pa.float64()),
    ]
)

ANSWER = pa.schema(
    [
        required("turn", pa.int32()),
        required("index", pa.int32()),
        required("text", pa.binary()),
        required("tool_s", pa.float64()),
        required("diverged", pa.bool_()),
        required("spent_s", pa.float64()),
    ]
)

END = pa.schema(
    [
        required("stop_reason", pa.utf8()),
        required("failure_code", pa.utf8()),
        required("failure_message", pa.binary()),
        required("artefact", pa.binary()),
        required("spent_s", pa.float64()),
    ]
)

MOVED = pa.schema(
    [
        required("resumes", pa.int32()),
        required("seed_attempt", pa.int32()),
        required("workspace", pa.bool_()),
    ]
)

SCHEMAS = {
    FrameKind.ROW: READY,
    FrameKind.LIFE: LIFE,
    FrameKind.SAID: SAID,
    FrameKind.ANSWER: ANSWER,
    FrameKind.END: END,
    FrameKind.MOVED: MOVED,
}
_STRUCTS = {kind: pa.struct(list(schema)) for kind, schema in SCHEMAS.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """A model call that has completed: ids, logprobs and spans."""

    turn: int
    segment: int
    context_ids: Int32
    """Prompt or tool output between the ids before and the sampled ones."""
    completion: Completion
    temperature: float
    llm_s: float
    """Waiting included; `completion.llm_s` is the backend's own."""
    spent_s: float = 0.0
    """Of the attempt's budget until then, in all its lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the policy is told of a tool call."""

    turn: int
    index: int
    """Of the call in its turn."""
    text: str
    tool_s: float
    diverged: bool = False
    """A fork's call said something else than the recorded text, which is `text`."""
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the agent loop of an attempt ended."""

    stop: StopReason
    code: FailureCode
    message: str
    artefact: bytes
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Another node has recorded what is before this."""

    resumes: int
    """How often another worker has gone on with the rollout's turns, this time included."""
    seed_attempt: int
    """The attempt that sampled the first turn: seeds stay those of it."""
    workspace: bool
    """Whether there was a sandbox, of which the workspace's files came along."""
    spent_s: float = 0.0


def body(kind: FrameKind, *values: Json) -> bytes:
    """One row of a kind, in the order of its columns, as the body of a frame."""
    rows = pa.array([values], _STRUCTS[kind])
    return bytes(pa.RecordBatch.from_struct_array(rows).serialize())


def said_body(said: Said) -> bytes:
    """The body of a SAID frame."""
    completion = said.completion
    return body(
        FrameKind.SAID,
        said.turn,
        said.segment,
        said.context_ids,
        completion.token_ids_C,
        completion.logprobs_C,
        completion.version_ends,
        completion.versions,
        completion.finish_reason.value,
        said.temperature,
        completion.cached_tokens,
        completion.backend,
        said.llm_s,
        said.spent_s,
    )


def answer_body(answer: Answer) -> bytes:
    """The body of an ANSWER frame; text may hold half a surrogate pair."""
    text = answer.text.encode("utf-8", "surrogatepass")
    values = (answer.turn, answer.index, text, answer.tool_s, answer.diverged, answer.spent_s)
    return body(FrameKind.ANSWER, *values)


def ended_body(ended: Ended) -> bytes:
    """The body of an END frame."""
    message = ended.message.encode("utf-8", "surrogatepass")
    values = (ended.stop.value, ended.code.value, message, ended.artefact, ended.spent_s)
    return body(FrameKind.END, *values)


def moved_body(moved: Moved) -> bytes:
    """The body of a MOVED frame."""
    return body(FrameKind.MOVED, moved.resumes, moved.seed_attempt, moved.workspace)


def row_of(kind: FrameKind, data: memoryview) -> pa.RecordBatch:
    """The batch of one row in a frame's body. Raises SchemaError."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(data)), SCHEMAS[kind])
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SchemaError(f"a {kind.name} record cannot be read: {error}", "a record batch") from (
            None
        )
    if batch.num_rows != 1:
        raise SchemaError(f"a {kind.name} record of {batch.num_rows} rows", "one row")
    return batch


def read_said(batch: pa.RecordBatch) -> Said:
    """A SAID record. Raises SchemaError for one that no model call can have left."""
    value = {name: batch.column(name)[0] for name in SAID.names}
    ids, logprobs = _ids(value["token_ids"]), _floats(value["logprobs"])
    ends, versions = value["version_end"].as_py(), value["version"].as_py()
    if (
        len(ids) != len(logprobs)
        or len(ends) != len(versions)
        or ends[-1:] != [len(ids)][: len(ids)]
    ):
        raise SchemaError(
            f"turn {value['turn']}: {len(ids)} ids, {len(logprobs)} logprobs, spans {ends}",
            "one logprob an id, and spans that tile them",
        )
    completion = Completion(
        token_ids_C=ids,
        logprobs_C=logprobs,
        finish_reason=FinishReason(value["finish_reason"].as_py()),
        version_ends=tuple(ends),
        versions=tuple(PolicyVersion(version) for version in versions),
        cached_tokens=value["cached_tokens"].as_py(),
        llm_s=value["llm_s"].as_py(),
        backend=value["backend"].as_py(),
    )
    return Said(
        turn=value["turn"].as_py(),
        segment=value["segment"].as_py(),
        context_ids=_ids(value["context"]),
        completion=completion,
        temperature=value["temperature"].as_py(),
        llm_s=value["llm_s"].as_py(),
        spent_s=value["spent_s"].as_py(),
    )


def read_answer(batch: pa.RecordBatch) -> Answer:
    """Decode an ANSWER record."""
    (value,) = batch.to_pylist()
    return Answer(**{**value, "text": value["text"].decode("utf-8", "surrogatepass")})


def read_ended(batch: pa.RecordBatch) -> Ended:
    """Decode an END record."""
    (value,) = batch.to_pylist()
    return Ended(
        stop=StopReason(value["stop_reason"]),
        code=FailureCode(value["failure_code"]),
        message=value["failure_message"].decode("utf-8", "surrogatepass"),
        artefact=value["artefact"],
        spent_s=value["spent_s"],
    )


def read_moved(batch: pa.RecordBatch) -> Moved:
    """A MOVED record."""
    (value,) = batch.to_pylist()
    return Moved(**value)


def _ids(scalar: pa.ListScalar) -> Int32:
    return np.asarray(scalar.values.to_numpy(), dtype=np.int32)


def _floats(scalar: pa.ListScalar) -> Float32:
    return np.asarray(scalar.values.to_numpy(), dtype=np.float32)
