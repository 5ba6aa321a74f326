"""A packed batch as CPU tensors over the same memory."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from prorl.client.packed import PackedBatch

    Int64 = NDArray[np.int64]


class TorchBatch:
    """`PackedBatch`'s arrays as CPU tensors over the same memory: same names, same shapes.

    Each is made when it is first asked for.
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
