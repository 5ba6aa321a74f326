"""Packed batches: the same memory from Arrow to torch, rebased slices, masks that agree with the
dense view.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.client import PackedBatch
from prorl.client.packed import regroup
from prorl.errors import SchemaError
from prorl.schema import SEQUENCES

SHAPE = SyntheticShape(n=3, num_tokens=40, rewritten_share=0.4)


def make(num_groups: int, shape: SyntheticShape = SHAPE, first_seq: int = 0) -> PackedBatch:
    return PackedBatch(
        delivered([group(first_seq + i, shape) for i in range(num_groups)], first_seq), "demo"
    )


@pytest.mark.parametrize("cut", [False, True])
def test_tensors_are_arrows_own_memory(cut: bool) -> None:
    batch = make(4).groups(1, 3) if cut else make(4)
    column = batch.arrow.column("token_ids")
    start = column.offsets[0].as_py() * 4
    tensors = batch.torch()
    assert tensors.token_ids.data_ptr() == column.values.buffers()[1].address + start
    assert (
        tensors.logprobs.data_ptr()
        == batch.logprobs.ctypes.data
        == batch.arrow.column("logprobs").flatten().to_numpy().ctypes.data
    )
    assert tensors.rewards.data_ptr() == batch.rewards.ctypes.data
    if not cut:
        assert tensors.cu_seqlens.data_ptr() == column.offsets.buffers()[1].address
    assert tensors.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
    assert tensors.max_seqlen == int(np.diff(batch.cu_seqlens).max())


def test_memory_lives_as_long_as_the_tensor() -> None:
    tensor = make(2).torch().token_ids
    assert tensor.sum().item() == make(2).token_ids.sum()


@given(num_groups=st.integers(1, 5), start=st.integers(0, 4), width=st.integers(1, 5))
def test_a_cut_batch_equals_a_batch_of_those_groups(
    num_groups: int, start: int, width: int
) -> None:
    start %= num_groups
    cut = make(num_groups).groups(start, start + width)
    alone = make(min(width, num_groups - start), first_seq=start)
    assert cut.cursor == alone.cursor
    for name in (
        "token_ids",
        "cu_seqlens",
        "logprobs",
        "logprob_offsets",
        "span_end",
        "span_offsets",
        "rewards",
        "group_ids",
    ):
        np.testing.assert_array_equal(getattr(cut, name), getattr(alone, name))
    np.testing.assert_array_equal(cut.loss_mask(), alone.loss_mask())
    np.testing.assert_array_equal(cut.sampled_index(), alone.sampled_index())


def test_masks_agree_with_the_dense_view() -> None:
    batch = make(5).groups(1, 4)
    dense = batch.dense()
    np.testing.assert_array_equal(
        batch.loss_mask(), dense.column("loss_mask").flatten().to_numpy().astype(bool)
    )
    index = batch.sampled_index()
    np.testing.assert_array_equal(
        batch.logprobs, dense.column("logprobs").flatten().to_numpy()[index]
    )
    np.testing.assert_array_equal(
        batch.per_sampled(batch.span_turn), dense.column("turns").flatten().to_numpy()[index]
    )
    np.testing.assert_array_equal(
        batch.per_sampled(batch.span_version), dense.column("versions").flatten().to_numpy()[index]
    )


def test_groups_and_cursor_follow_delivery() -> None:
    batch = make(3, first_seq=7)
    assert (batch.num_groups, batch.cursor) == (3, "demo@10")
    assert batch.groups(0, 1).cursor == "demo@8"
    assert batch.groups(0, 0).cursor == ""


@given(sizes=st.lists(st.integers(0, 4), max_size=6), num_groups=st.integers(1, 5))
def test_regrouping_does_not_depend_on_the_streams_boundaries(
    sizes: list[int], num_groups: int
) -> None:
    total = sum(sizes)
    starts = np.cumsum([0, *sizes])
    pieces = [
        make(size, first_seq=int(start)) for start, size in zip(starts, sizes, strict=False) if size
    ]
    steps = list(regroup(pieces, num_groups))
    assert [step.num_groups for step in steps[:-1]] == [num_groups] * (len(steps) - 1)
    assert sum(step.num_groups for step in steps) == total
    whole = regroup([make(total)] if total else [], num_groups)
    for regrouped, other in zip(steps, whole, strict=True):
        assert regrouped.arrow.to_pydict() == other.arrow.to_pydict()


def test_regrouping_inside_a_single_batch_copies_nothing() -> None:
    batch = make(4)
    step = next(regroup([batch], 2))
    assert step.token_ids.ctypes.data == batch.token_ids.ctypes.data


def test_concat_keeps_advantages() -> None:
    parts = [
        make(1).with_advantages(np.ones(make(1).num_sequences, np.float32)),
        make(1, first_seq=1),
    ]
    assert PackedBatch.concat(parts).advantages is None
    full = [
        part.with_advantages(np.full(part.num_sequences, i, np.float32))
        for i, part in enumerate(parts)
    ]
    joined = PackedBatch.concat(full).advantages
    assert joined is not None
    assert joined.tolist() == [0.0] * parts[0].num_sequences + [1.0] * parts[1].num_sequences


def test_another_schema_is_refused() -> None:
    with pytest.raises(SchemaError, match="a batch for trainers"):
        PackedBatch(pa.RecordBatch.from_pylist([], schema=SEQUENCES), "demo")


def test_the_client_imports_no_torch() -> None:
    code = "import sys, prorl.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_padded_view_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "trainer.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "def padded" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    batch = PackedBatch(delivered([group(i, SyntheticShape()) for i in range(2)]), "demo")
    ids, mask = (names["padded"](batch, name) for name in ("token_ids", "loss_mask"))
    assert ids.shape == (batch.num_sequences, batch.max_seqlen)
    lengths = np.diff(batch.cu_seqlens)
    np.testing.assert_array_equal(ids[0, : lengths[0]], batch.token_ids[: lengths[0]])
    assert mask.sum() == batch.loss_mask().sum()
