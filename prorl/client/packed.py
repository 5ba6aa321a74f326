"""`PackedBatch`: whole groups of token sequences, packed end to end.

They are views over Arrow's own buffers. Nothing is padded, collated or copied: the values buffer of
`token_ids` is the packed batch, and the list's int32 offsets are the `cu_seqlens` that
variable-length attention takes. Shapes: B sequences, T tokens, C sampled tokens, S spans, G groups.

Invariants: rows are in delivery order and a batch holds whole groups; a batch cut out of a larger
one (`rows`, `groups`) has its offsets rebased to 0. The arrays and tensors share memory that
belongs to Arrow, often a file mapped read-only: never write to them in place, clone first. This
module does not import torch until `.torch()` is called, and does not promise that a batch survives
a change of the file it is mapped from (the store never changes one).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from prorl.flight.ticket import Cursor
from prorl.schema import STREAM, check_schema
from prorl.schema.sequences import dense
from prorl.types import SpanKind

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from prorl.types import Float32, Int32, UInt8

    Int64 = NDArray[np.int64]

ScalarT = TypeVar("ScalarT", bound=np.generic)


class TorchBatch:
    """`PackedBatch`'s arrays as CPU tensors over the same memory: same names, same shapes. Each is
    made when it is first asked for.
    """

    token_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    logprobs: torch.Tensor
    logprob_offsets: torch.Tensor
    span_offsets: torch.Tensor
    span_end: torch.Tensor
    span_kind: torch.Tensor
    span_version: torch.Tensor
    span_turn: torch.Tensor
    span_temperature: torch.Tensor
    rewards: torch.Tensor
    group_ids: torch.Tensor
    advantages: torch.Tensor | None

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return self._batch.max_seqlen

    def __getattr__(self, name: str) -> Any:
        if name not in TorchBatch.__annotations__:
            raise AttributeError(
                f"a TorchBatch has no {name!r}; it has {', '.join(TorchBatch.__annotations__)}"
            )
        array = getattr(self._batch, name)
        tensor = None if array is None else _tensor(array)
        self.__dict__[name] = tensor
        return tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Whole groups as flat arrays.

    Made by `Client.stream`; `arrow` is the STREAM batch that everything here looks into.

    >>> from prorl.schema import STREAM
    >>> empty = PackedBatch(pa.RecordBatch.from_pylist([], schema=STREAM), run="demo")
    >>> empty.num_sequences, empty.cu_seqlens.tolist(), empty.loss_mask().tolist()
    (0, [0], [])
    """

    arrow: pa.RecordBatch
    run: str
    advantages: Float32 | None = None
    """[B] one for each sequence; siblings of a rollout share it."""

    def __post_init__(self) -> None:
        if not self.arrow.schema.equals(STREAM):
            check_schema(self.arrow.schema, STREAM, "a batch for trainers")

    @property
    def num_sequences(self) -> int:
        return int(self.arrow.num_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_groups(self) -> int:
        return len(self.group_starts) - 1

    @cached_property
    def token_ids(self) -> Int32:
        """[T] prompt, tool output and everything sampled, in order."""
        return self._values("token_ids", np.int32)

    @cached_property
    def cu_seqlens(self) -> Int32:
        """[B+1] where each sequence starts in `token_ids`, then T."""
        return self._offsets("token_ids")

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max(initial=0))

    @cached_property
    def logprobs(self) -> Float32:
        """[C] of sampled tokens only, under the distribution they were sampled from."""
        return self._values("logprobs", np.float32)

    @cached_property
    def logprob_offsets(self) -> Int32:
        """[B+1] where each sequence's sampled tokens start in `logprobs`, then C."""
        return self._offsets("logprobs")

    @cached_property
    def span_offsets(self) -> Int32:
        """[B+1] where each sequence's spans start in the `span_*` arrays, then S."""
        return self._offsets("span_end")

    @cached_property
    def span_end(self) -> Int32:
        """[S] end of each span, counted from the start of its sequence."""
        return self._values("span_end", np.int32)

    @cached_property
    def span_kind(self) -> UInt8:
        """[S] 0 context, 1 trained, 2 sampled but not trained."""
        return self._values("span_kind", np.uint8)

    @cached_property
    def span_version(self) -> Int32:
        """[S] policy version that sampled it, -1 for context."""
        return self._values("span_version", np.int32)

    @cached_property
    def span_turn(self) -> Int32:
        """[S]"""
        return self._values("span_turn", np.int32)

    @cached_property
    def span_temperature(self) -> Float32:
        """[S]"""
        return self._values("span_temperature", np.float32)

    @cached_property
    def rewards(self) -> Float32:
        """[B] the rollout's reward, once per sequence."""
        return _view(self.arrow.column("reward"), np.float32)

    @cached_property
    def group_ids(self) -> Int64:
        """[B]"""
        return _view(self.arrow.column("group_id"), np.int64)

    @cached_property
    def rollout_ids(self) -> Int64:
        """[B]; sequences with equal ids are one rollout."""
        return _view(self.arrow.column("rollout_id"), np.int64)

    @cached_property
    def delivery_seq(self) -> Int64:
        """[B] of the sequence's group."""
        return _view(self.arrow.column("delivery_seq"), np.int64)

    @cached_property
    def group_starts(self) -> Int64:
        """[G+1] row where each group starts, then B."""
        borders = np.flatnonzero(np.diff(self.delivery_seq)) + 1
        ends = [self.num_sequences] if self.num_sequences else []
        return np.concatenate([np.zeros(1, np.int64), borders, np.array(ends, np.int64)])

    @property
    def cursor(self) -> str:
        """Returns the place to resume from behind this batch: keep it in the checkpoint, then
        commit it. Empty for a batch without groups.
        """
        return str(Cursor(self.run, int(self.delivery_seq[-1]) + 1)) if self.num_sequences else ""

    @cached_property
    def span_widths(self) -> Int64:
        """[S] tokens of each span."""
        starts = np.zeros(len(self.span_end), np.int64)
        starts[1:] = self.span_end[:-1]
        starts[self.span_offsets[:-1][np.diff(self.span_offsets) > 0]] = 0
        return self.span_end - starts

    def loss_mask(self) -> NDArray[np.bool_]:
        """[T] whether a token trains."""
        return np.repeat(self.span_kind == SpanKind.TRAINED, self.span_widths)

    def sampled_index(self) -> Int64:
        """[C] position in `token_ids` of each sampled token, aligned with `logprobs`."""
        return np.flatnonzero(np.repeat(self.span_kind != SpanKind.CONTEXT, self.span_widths))

    def per_sampled(self, span_values: NDArray[Any]) -> NDArray[Any]:
        """[C] a per-span array spread over the sampled tokens. `span_values` is `span_kind`,
        `span_temperature` or another one.
        """
        sampled = self.span_kind != SpanKind.CONTEXT
        return np.repeat(span_values[sampled], self.span_widths[sampled])

    def dense(self) -> pa.RecordBatch:
        """The batch with mask, logprobs, versions and temperatures of full length; copies. They are
        as `prorl.schema.sequences.dense` has them.
        """
        return dense(self.arrow)

    def rows(self, start: int, stop: int) -> PackedBatch:
        """Sequences start..stop over the same memory, offsets rebased. May cut a group: for
        micro-batches, not for cursors.
        """
        advantages = None if self.advantages is None else self.advantages[start:stop]
        return PackedBatch(self.arrow.slice(start, stop - start), self.run, advantages)

    def groups(self, start: int, stop: int) -> PackedBatch:
        """Groups start..stop over the same memory, offsets rebased."""
        stop = min(stop, self.num_groups)
        return self.rows(int(self.group_starts[start]), int(self.group_starts[stop]))

    def with_advantages(self, advantages: Float32) -> PackedBatch:
        assert advantages.shape == (self.num_sequences,), (advantages.shape, self.num_sequences)
        return replace(self, advantages=advantages.astype(np.float32, copy=False))

    def with_rewards(self, rewards: Float32) -> PackedBatch:
        """[B]; other columns are shared."""
        at = self.arrow.schema.get_field_index("reward")
        column = pa.array(rewards, STREAM.field("reward").type)
        arrow = self.arrow.set_column(at, STREAM.field("reward"), column)
        return PackedBatch(arrow, self.run, self.advantages)

    @classmethod
    def concat(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """One batch of these, in order: one copy, none for a single one."""
        if len(batches) == 1:
            return batches[0]
        arrow = pa.concat_batches([batch.arrow for batch in batches])
        parts = [batch.advantages for batch in batches if batch.advantages is not None]
        return cls(
            arrow, batches[0].run, np.concatenate(parts) if len(parts) == len(batches) else None
        )

    def torch(self) -> TorchBatch:
        """The batch as tensors over the same memory. Read-only: clone before writing in place.
        Raises ModuleNotFoundError without torch.
        """
        if find_spec("torch") is None:
            raise ModuleNotFoundError(
                "batch.torch() needs torch: install it, or use the batch's NumPy arrays"
                " (batch.token_ids, batch.logprobs ...)",
                name="torch",
            )
        return TorchBatch(self)

    def _values(self, name: str, dtype: type[ScalarT]) -> NDArray[ScalarT]:
        """All items of a list column end to end. Not by `flatten`, which costs ten times as much:
        nothing is null in a STREAM batch.
        """
        column = self.arrow.column(name)
        values, offsets = _view(column.values, dtype), _view(column.offsets, np.int32)
        start, stop = (offsets[0], offsets[-1]) if self.num_sequences else (0, 0)
        return values if stop - start == len(values) else values[start:stop]

    def _offsets(self, name: str) -> Int32:
        if not self.num_sequences:
            return np.zeros(1, np.int32)
        offsets = _view(self.arrow.column(name).offsets, np.int32)
        return offsets - offsets[0] if offsets[0] else offsets


def _view(array: pa.Array, dtype: type[ScalarT]) -> NDArray[ScalarT]:
    view: NDArray[ScalarT] = array.to_numpy(zero_copy_only=True)
    assert view.dtype == dtype, (view.dtype, dtype)
    return view


def regroup(batches: Iterable[PackedBatch], num_groups: int) -> Iterator[PackedBatch]:
    """Yield batches of exactly `num_groups` groups; only the last may have fewer.

    The same groups in the same order give the same batches, however they came: a trainer that is
    fed from a replay repeats the steps of the live run. Groups that lie in one batch are not
    copied. Nothing is fetched ahead of the batch that is asked for.
    """
    parts: list[PackedBatch] = []
    missing = num_groups
    for batch in batches:
        start = 0
        while start < batch.num_groups:
            part = batch.groups(start, start + missing)
            parts.append(part)
            start += part.num_groups
            missing -= part.num_groups
            if missing == 0:
                yield PackedBatch.concat(parts)
                parts, missing = [], num_groups
    if parts:
        yield PackedBatch.concat(parts)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    import torch

    if not array.flags.writeable:
        _take_read_only_warning()
    return torch.from_numpy(array)


@cache
def _take_read_only_warning() -> None:
    """torch warns of the first read-only array of a process: here, where nobody hears it."""
    import torch

    empty = np.zeros(0)
    empty.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(empty)
