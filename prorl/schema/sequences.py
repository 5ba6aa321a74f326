"""Token sequences as columns: records <-> SEQUENCE structs, what is valid, the view of full length.
Vectorised over a batch. Token ids and logprobs are copied once from numpy into Arrow buffers and
are never Python lists.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from prorl.schema.fields import SEQUENCE, SPANS, list_of, required, versioned
from prorl.types import Lineage, Sequence, SpanKind

_SEQUENCE_NAMES = (
    "token_ids_L",
    "logprobs_C",
    "span_end_S",
    "span_kind_S",
    "span_version_S",
    "span_turn_S",
    "span_temperature_S",
)
_SCALAR_NAMES = ("segment", "lineage", "parent", "weight")
sequence_values = attrgetter(*_SCALAR_NAMES, *_SEQUENCE_NAMES)


def routed_values(sequence: Sequence) -> tuple[int, int, bytes, bool]:
    """Values of ROUTED for a sequence that has experts: a byte an expert if that holds them."""
    experts = sequence.routed_experts
    assert experts is not None
    wide = bool(experts.size) and not 0 <= int(experts.min()) <= int(experts.max()) < 256
    narrow = experts.astype("<i2" if wide else "u1", copy=False)
    return sequence.segment, experts.shape[1], narrow.tobytes(), wide


def read_sequences(values: pa.StructArray) -> tuple[Sequence, ...]:
    """SEQUENCE structs (or `sequences` rows as structs) as records that share Arrow's memory."""
    columns = [values.field(f.name) for f in SEQUENCE]
    scalars, lists = columns[: len(_SCALAR_NAMES)], columns[len(_SCALAR_NAMES) :]
    return tuple(
        Sequence(
            **{
                name: column[i].as_py() for name, column in zip(_SCALAR_NAMES, scalars, strict=True)
            },
            **{
                name: column[i].values.to_numpy(zero_copy_only=False)
                for name, column in zip(_SEQUENCE_NAMES, lists, strict=True)
            },
        )
        for i in range(len(values))
    )


def validate_sequences(batch: pa.RecordBatch) -> list[str]:
    """One text per row of a `sequences` batch: empty if valid, else what is wrong.

    Valid: at least one token; spans tile the tokens in order; lengths of sampled spans sum to
    `len(logprobs)`; every logprob is finite and <= 0; context has no version, what trains has one;
    the reward is finite; a weight is a share; a parent came before; nothing is null but the reward
    of a rollout that could not be scored.
    """
    nulls = [
        name for name in batch.schema.names if name != "reward" and batch.column(name).null_count
    ]
    if nulls:
        return [f"null in {', '.join(nulls)}"] * batch.num_rows
    if not _problem(batch):
        return [""] * batch.num_rows
    return [_problem(batch.slice(i, 1)) for i in range(batch.num_rows)]


_LISTS = ("token_ids", "logprobs", *SPANS)


def _problem(batch: pa.RecordBatch) -> str:
    """Returns what is wrong with some row of a batch; empty if nothing is."""

    def flat(name: str) -> np.ndarray[Any, Any]:
        return batch.column(name).flatten().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    lengths = {name: np.diff(batch.column(name).offsets.to_numpy()) for name in _LISTS}
    num_spans, num_tokens = lengths["span_end"], lengths["token_ids"]
    if any(batch.column(name).flatten().null_count for name in _LISTS):
        return "null in a list"
    if (num_tokens == 0).any() or (num_spans == 0).any():
        return "no tokens"
    if any((lengths[name] != num_spans).any() for name in SPANS):
        return "span lists differ in length"
    ends, kinds, versions, logprobs = map(
        flat, ("span_end", "span_kind", "span_version", "logprobs")
    )
    last = np.cumsum(num_spans) - 1
    widths = np.diff(ends, prepend=0)
    widths[last[:-1] + 1] = ends[last[:-1] + 1]
    if (ends[last] != num_tokens).any() or (widths <= 0).any():
        return f"spans end at {ends[-1]} of {num_tokens[-1]} tokens or do not ascend"
    sampled = np.where(kinds >= SpanKind.TRAINED, widths, 0)
    num_sampled = np.add.reduceat(sampled, last - num_spans + 1) if len(last) else num_spans
    if (num_sampled != lengths["logprobs"]).any():
        return f"{num_sampled[-1]} sampled tokens, {lengths['logprobs'][-1]} logprobs"
    if not (np.isfinite(logprobs) & (logprobs <= 0)).all():
        return "a logprob is not finite or above 0"
    # What trains says which weights sampled it; what does not train may not know.
    lowest = np.where(kinds == SpanKind.TRAINED, 0, -1)
    if (versions < lowest).any() or (versions[kinds == SpanKind.CONTEXT] != -1).any():
        return "a version on context, or none on tokens that train"
    if not np.isfinite(batch.column("reward").drop_null().to_numpy()).all():
        return "the reward is not finite"
    weights, parents = batch.column("weight").to_numpy(), batch.column("parent").to_numpy()
    is_lineage = set(batch.column("lineage").unique().to_pylist()) <= set(Lineage)
    before = (parents >= -1) & (parents < batch.column("segment").to_numpy())
    placed = is_lineage and ((weights >= 0) & (weights <= 1) & before).all()
    return "" if placed else "no such lineage, weight or parent"


def dense(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add per-token columns of full length to a `sequences` or `stream` batch, for clients without
    our code.

    Replaces `logprobs` and the spans by lists as long as `token_ids`, sharing its offsets:
    `loss_mask` uint8 (1 = trains), `sampled_mask` uint8, `logprobs` float32 (0 where nothing was
    sampled), `versions` int32 (-1 for context), `turns` int32 and `temperatures` float32.
    """
    tokens = batch.column("token_ids")
    offsets = pa.array(tokens.offsets.to_numpy() - tokens.offsets[0].as_py(), pa.int32())
    dropped = {*SPANS, "logprobs", "token_ids"}
    columns = {name: batch.column(name) for name in batch.schema.names if name not in dropped}
    fields = [batch.schema.field(name) for name in columns]
    per_token = {"token_ids": tokens.flatten(), **_per_token(batch, len(tokens.flatten()))}
    for name, values in per_token.items():
        columns[name] = pa.ListArray.from_arrays(offsets, values, type=list_of(values.type))
        fields.append(required(name, columns[name].type))
    return pa.RecordBatch.from_arrays([*columns.values()], schema=versioned(fields, "dense"))


def _per_token(batch: pa.RecordBatch, length: int) -> dict[str, pa.Array]:
    """Returns what the spans and logprobs of a batch say of each of its `length` tokens."""
    widths = _span_widths(batch.column("span_end"))

    def spread(name: str) -> np.ndarray[Any, Any]:
        return np.repeat(batch.column(name).flatten().to_numpy(zero_copy_only=False), widths)

    kinds = spread("span_kind")
    sampled = kinds >= 1
    logprobs = np.zeros(length, np.float32)
    logprobs[sampled] = batch.column("logprobs").flatten().to_numpy(zero_copy_only=False)
    values = {
        "loss_mask": (kinds == 1).astype(np.uint8),
        "sampled_mask": sampled.astype(np.uint8),
        "logprobs": logprobs,
        "versions": spread("span_version"),
        "turns": spread("span_turn"),
        "temperatures": spread("span_temperature"),
    }
    return {name: pa.array(array) for name, array in values.items()}


def _span_widths(span_end: pa.ListArray) -> np.ndarray[Any, Any]:
    """Tokens of each span; the ends begin anew with each sequence."""
    ends = span_end.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    borders = span_end.offsets.to_numpy() - span_end.offsets[0].as_py()
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    starts[borders[:-1][np.diff(borders) > 0]] = 0
    widths: np.ndarray[Any, Any] = ends - starts
    return widths
