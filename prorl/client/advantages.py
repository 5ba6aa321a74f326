"""Group-relative advantages over distinct rollouts, broadcast to their sequences.

A rollout whose harness rewrote its history has several sequences with one reward: it counts once in
its group's mean and standard deviation, and all its sequences get its advantage. One none of whose
tokens train (sampled by weights that nobody could name) counts not at all and gets 0. Advantages
are computed when a batch is streamed and never stored. Sums are taken in float64; results are
float32, [B].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from prorl.errors import UserError
from prorl.types import SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.client.packed import PackedBatch
    from prorl.types import Float32

AdvantageFn = Callable[["PackedBatch"], "Float32"]
"""Whole groups in, [B] float32 out."""

Advantages = Literal["group", "centred", "rloo"] | AdvantageFn | None


def mean_centred(batch: PackedBatch) -> Float32:
    """A_i = R_i - mean(R), as Dr. GRPO has it (arXiv 2503.20783). It leaves out the division that
    favours easy and hard groups.
    """
    rollouts = _rollouts(batch)
    return _broadcast(rollouts, rollouts.centred)


def mean_std(batch: PackedBatch, epsilon: float = 1e-6) -> Float32:
    """A_i = (R_i - mean(R)) / (std(R) + epsilon): GRPO and DAPO. GRPO is arXiv 2402.03300 section
    4.1.2, DAPO arXiv 2503.14476 equation 9. std is the sample standard deviation (n - 1). A group
    of one rollout has nothing to compare with: advantage 0.
    """
    rollouts = _rollouts(batch)
    centred, sizes = rollouts.centred, rollouts.sizes
    variance = np.bincount(rollouts.group, centred**2, len(sizes)) / np.maximum(sizes - 1, 1)
    return _broadcast(rollouts, centred / (np.sqrt(variance)[rollouts.group] + epsilon))


def leave_one_out(batch: PackedBatch) -> Float32:
    """A_i = R_i - mean of the other rewards of its group: RLOO (arXiv 2402.14740 section 2.2). n /
    (n - 1) times `mean_centred`. A group of one rollout has nothing to compare with: 0.
    """
    rollouts = _rollouts(batch)
    sizes = rollouts.sizes[rollouts.group]
    return _broadcast(rollouts, rollouts.centred * sizes / np.maximum(sizes - 1, 1))


def overlong(batch: PackedBatch, max_tokens: int, buffer: int) -> PackedBatch:
    """The batch with soft punishment of long rollouts in its rewards (DAPO, arXiv 2503.14476
    equation 13): 0 up to `max_tokens` - `buffer` sampled tokens, then linear down to -1. A
    rollout's tokens are those of all its sequences. For advantages; nothing else sees it.
    """
    _, rollout = np.unique(batch.rollout_ids, return_inverse=True)
    sampled = np.bincount(rollout, np.diff(batch.logprob_offsets))[rollout]
    punished = np.clip((max_tokens - buffer - sampled) / buffer, -1.0, 0.0)
    return batch.with_rewards((batch.rewards + punished).astype(np.float32))


def add_advantages(batch: PackedBatch, how: Advantages) -> PackedBatch:
    """The batch with advantages of a kind. "group" is `mean_std`, "centred" is `mean_centred`,
    "rloo" is `leave_one_out`, None leaves it as it is.
    """
    if how is None:
        return batch
    if isinstance(how, str):
        if how not in _BY_NAME:
            raise UserError(
                f"advantages {how!r}",
                f"one of {', '.join(_BY_NAME)}, a function of a batch, or None",
            )
        how = _BY_NAME[how]
    return batch.with_advantages(how(batch))


_BY_NAME: dict[str, AdvantageFn] = {
    "group": mean_std,
    "centred": mean_centred,
    "rloo": leave_one_out,
}


class _Rollouts(NamedTuple):
    """Figures by distinct rollout, R, and by group: the reward less its group's mean, the position
    of the group, how many train. `rollout`: sequence -> R.
    """

    centred: NDArray[np.float64]
    group: NDArray[np.int64]
    sizes: NDArray[np.int64]
    rollout: NDArray[np.int64]


def _rollouts(batch: PackedBatch) -> _Rollouts:
    _, first, rollout = np.unique(batch.rollout_ids, return_index=True, return_inverse=True)
    rewards = batch.rewards[first].astype(np.float64)
    _, index = np.unique(batch.group_ids[first], return_inverse=True)
    owners = rollout[np.repeat(np.arange(batch.num_sequences), np.diff(batch.span_offsets))]
    trains = np.bincount(owners, batch.span_kind == SpanKind.TRAINED, len(first)) > 0
    count = np.bincount(index, trains).astype(np.int64)
    mean = (np.bincount(index, rewards * trains) / np.maximum(count, 1))[index]
    return _Rollouts((rewards - mean) * trains, index, count, rollout)


def _broadcast(rollouts: _Rollouts, per_rollout: NDArray[np.float64]) -> Float32:
    return per_rollout[rollouts.rollout].astype(np.float32)
