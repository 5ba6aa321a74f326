"""The control experiment of a training run: advantages that say nothing.

A policy that still improves improves for another reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prorl.client.advantages import mean_std

if TYPE_CHECKING:
    from prorl.client import PackedBatch
    from prorl.types import Float32


def shuffled(batch: PackedBatch) -> Float32:
    """GRPO's advantages, dealt to other rollouts of the same group.

    Equal in number and size, with no relation to what was done.

    Who gets what depends on the group's id alone, so that a replay repeats it.
    """
    _, first, rollout = np.unique(batch.rollout_ids, return_index=True, return_inverse=True)
    advantages, groups = mean_std(batch)[first], batch.group_ids[first]
    dealt = advantages.copy()
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        dealt[members] = advantages[np.random.default_rng(int(group)).permutation(members)]
    return dealt[rollout]
