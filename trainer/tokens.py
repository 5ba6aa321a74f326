"""Which sampled tokens of a batch train, and what the loss needs to know of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from prorl.client import PackedBatch
from prorl.types import SpanKind


class Tokens(NamedTuple):
    """What the loss knows of each sampled token besides its ids, [C]."""

    trained_C: torch.Tensor
    """1.0 where it trains."""
    fresh_C: torch.Tensor
    """1.0 where these very weights sampled it: there the trainer's logprobs must equal the
    sampler's.
    """
    proximal_C: torch.Tensor | None

    def rows(self, batch: PackedBatch, rows: range) -> Tokens:
        """The tokens of these sequences."""
        here = slice(int(batch.logprob_offsets[rows.start]), int(batch.logprob_offsets[rows.stop]))
        return Tokens(
            self.trained_C[here],
            self.fresh_C[here],
            None if self.proximal_C is None else self.proximal_C[here],
        )

    def to(self, device: str) -> Tokens:
        return Tokens(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


def tokens_of(
    batch: PackedBatch, version: int, max_staleness: int, proximal_C: torch.Tensor | None
) -> Tokens:
    """What the loss knows of a batch's tokens; those older than `max_staleness` do not train."""
    trained = batch.per_sampled(batch.span_kind) == SpanKind.TRAINED
    age = version - batch.per_sampled(batch.span_version)
    if max_staleness >= 0:
        trained &= age <= max_staleness
    return Tokens(
        torch.from_numpy(trained.astype(np.float32)),
        torch.from_numpy((age == 0).astype(np.float32)),
        proximal_C,
    )
