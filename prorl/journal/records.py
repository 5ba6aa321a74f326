"""The records of a journal.

    ROW       the READY row as RUN received it: an Arrow record batch of one row
    TAKEOVER  another worker has taken the attempt over
    CALL      a completed model call: ids of the context before it, sampled ids, logprobs, versions
    ANSWER    the text that answers a tool call, or the env's own turn; the env's state
    END       how the loop ended, and what crosses into EVAL

All but the row are MessagePack arrays of their fields; ids and logprobs are in them as the bytes of
little-endian int32 and float32, so that a record costs what its bytes cost. Both are exact; a
record that does not validate counts as damage where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from prorl.errors import SchemaError
from prorl.journal.frames import Prefix
from prorl.schema import READY
from prorl.schema.columns import read_key
from prorl.schema.rows import Row
from prorl.types import (
    AttemptKey,
    Completion,
    FailureCode,
    FinishReason,
    PolicyVersion,
    StopReason,
)

if TYPE_CHECKING:
    from prorl.types import Int32


class FrameKind(IntEnum):
    ROW = 1
    TAKEOVER = 2
    CALL = 3
    ANSWER = 4
    END = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
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
    """The part of the attempt's budget that all of its workers had spent until then."""
    prompt: bytes = b""
    """Digest of all ids before the sampled ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """Holds the text that the policy reads as a tool call's result, or as the env's own turn."""

    turn: int
    index: int
    """The number of the call in its turn."""
    text: str | None
    """None: the env has ended the rollout."""
    tool_s: float
    spent_s: float = 0.0
    state: str | None = None
    """The state that the env remembers from here on; None: what it did before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """Holds how the agent loop of an attempt ended."""

    stop: StopReason
    code: FailureCode
    message: str
    artifact: bytes | None
    """None: it does not fit, and is scored in the sandbox."""
    spent_s: float = 0.0


class Takeover(NamedTuple):
    """A worker has taken the attempt over."""

    resumes: int


JournalRecord = RecordedCall | ToolAnswer | AttemptEnd
"""A record of an attempt that its next incarnation reads."""


class _CallFields(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A model call as it is written: its fields in this order."""

    turn: int
    segment: int
    context: bytes
    token_ids: bytes
    logprobs: bytes
    version_ends: tuple[int, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    temperature: float
    cached_tokens: int
    backend: str
    llm_s: float
    spent_s: float
    prompt: bytes
    routed_experts: bytes = b""
    width: int = 0
    """Experts of a token; 0 without routed_experts."""


_ANSWER = msgspec.msgpack.Decoder(tuple[int, int, bytes | None, float, float, str | None])
_ENDED = msgspec.msgpack.Decoder(tuple[StopReason, FailureCode, bytes, bytes | None, float])
"""The fields of a ToolAnswer and of an AttemptEnd, in their order."""

_encode = msgspec.msgpack.Encoder(enc_hook=int).encode
"""A backend may count in numpy's integers."""


def call_body(call: RecordedCall) -> bytes:
    completion = call.completion
    routed_experts = completion.routed_experts
    return _encode(
        _CallFields(
            call.turn,
            call.segment,
            _bytes(call.context_ids, "<i4"),
            _bytes(completion.token_ids_C, "<i4"),
            _bytes(completion.logprobs_C, "<f4"),
            completion.version_ends,
            completion.versions,
            completion.finish_reason,
            call.temperature,
            completion.cached_tokens,
            completion.backend,
            call.llm_s,
            call.spent_s,
            call.prompt,
            b"" if routed_experts is None else _bytes(routed_experts, "<i2"),
            0 if routed_experts is None else routed_experts.shape[1],
        )
    )


def answer_body(answer: ToolAnswer) -> bytes:
    """The body of an ANSWER frame; text may hold half a surrogate pair."""
    text = None if answer.text is None else answer.text.encode("utf-8", "surrogatepass")
    return _encode((answer.turn, answer.index, text, answer.tool_s, answer.spent_s, answer.state))


def ended_body(ended: AttemptEnd) -> bytes:
    message = ended.message.encode("utf-8", "surrogatepass")
    return _encode((ended.stop, ended.code, message, ended.artifact, ended.spent_s))


def takeover_body(resumes: int) -> bytes:
    return _encode((resumes,))


def _bytes(array: np.ndarray[Any, Any], kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


# ---- reading


def read(kind: FrameKind, body: memoryview) -> JournalRecord | Takeover:
    """The record in a frame that holds no row. Raises SchemaError."""
    try:
        return _READ[kind](body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SchemaError(f"a {kind.name} record cannot be read: {error}", "a record") from None


def read_row(body: memoryview) -> Row:
    """The one row in a frame's body. Raises SchemaError."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(bytes(body)), READY)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SchemaError(f"a ROW record cannot be read: {error}", "a record batch") from None
    if batch.num_rows != 1:
        raise SchemaError(f"a ROW record of {batch.num_rows} rows", "one row")
    return Row(batch, 0)


def _check_call(call: RecordedCall) -> RecordedCall:
    """The record. Raises SchemaError for one that no model call can have left."""
    completion = call.completion
    ids, logprobs = len(completion.token_ids_C), len(completion.logprobs_C)
    ends = list(completion.version_ends)
    if ids != logprobs or len(ends) != len(completion.versions) or ends[-1:] != [ids][:ids]:
        raise SchemaError(
            f"turn {call.turn}: {ids} ids, {logprobs} logprobs, spans {ends}",
            "one logprob an id, and spans that tile them",
        )
    return call


def _read_call(body: memoryview) -> RecordedCall:
    value = msgspec.msgpack.decode(body, type=_CallFields)
    completion = Completion(
        token_ids_C=np.frombuffer(value.token_ids, "<i4"),
        logprobs_C=np.frombuffer(value.logprobs, "<f4"),
        finish_reason=value.finish_reason,
        version_ends=value.version_ends,
        versions=tuple(PolicyVersion(version) for version in value.versions),
        cached_tokens=value.cached_tokens,
        llm_s=value.llm_s,
        backend=value.backend,
        routed_experts=np.frombuffer(value.routed_experts, "<i2").reshape(-1, value.width)
        if value.width
        else None,
    )
    return _check_call(
        RecordedCall(
            turn=value.turn,
            segment=value.segment,
            context_ids=np.frombuffer(value.context, "<i4"),
            completion=completion,
            temperature=value.temperature,
            llm_s=value.llm_s,
            spent_s=value.spent_s,
            prompt=value.prompt,
        )
    )


def _read_answer(body: memoryview) -> ToolAnswer:
    turn, index, text, tool_s, spent_s, state = _ANSWER.decode(body)
    return ToolAnswer(
        turn=turn,
        index=index,
        text=None if text is None else text.decode("utf-8", "surrogatepass"),
        tool_s=tool_s,
        spent_s=spent_s,
        state=state,
    )


def _read_ended(body: memoryview) -> AttemptEnd:
    stop, code, message, artifact, spent_s = _ENDED.decode(body)
    text = message.decode("utf-8", "surrogatepass")
    return AttemptEnd(stop=stop, code=code, message=text, artifact=artifact, spent_s=spent_s)


_READ: dict[FrameKind, Callable[[memoryview], JournalRecord | Takeover]] = {
    FrameKind.TAKEOVER: msgspec.msgpack.Decoder(Takeover).decode,
    FrameKind.CALL: _read_call,
    FrameKind.ANSWER: _read_answer,
    FrameKind.END: _read_ended,
}


class Recovered(NamedTuple):
    """Holds what the last incarnation of this worker left of an attempt."""

    key: AttemptKey
    row: Row
    resumes: int
    """The count of its last worker."""
    records: tuple[JournalRecord, ...]
    path: Path
    num_bytes: int
    num_frames: int


def parse_journal(path: Path, prefix: Prefix) -> Recovered:
    """The records of a file's frames. Raises SchemaError for what a worker cannot have written."""
    if not prefix.frames or prefix.frames[0].kind != FrameKind.ROW:
        raise SchemaError("it does not begin with a row", "a row, then records")
    row, resumes, records = read_row(prefix.frames[0].body), 0, list[JournalRecord]()
    for place, frame in enumerate(prefix.frames[1:], 1):
        if frame.kind not in _READ:
            raise SchemaError(f"frame {place} is of kind {frame.kind}", "a row, then records")
        record = read(FrameKind(frame.kind), frame.body)
        if isinstance(record, Takeover):
            resumes = record.resumes
        else:
            records.append(record)
    return Recovered(
        read_key(row), row, resumes, tuple(records), path, prefix.end, len(prefix.frames)
    )
