"""A few numbers per group that decisions and hand-outs need.

They are the oldest version, the size, and whether there is anything to serve.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from prorl.storage.replay import estimate_bytes
from prorl.types import RolloutState

COLUMNS = ["group_id", "status", "min_version", "num_tokens", "num_sampled", "num_sequences"]
"""Of `rollouts`: what facts are made of."""


_FACTS = np.dtype([("min_version", "<i4"), ("num_sequences", "<i4"), ("num_bytes", "<i8")])
_NONE = np.array((-1, 0, 0), _FACTS)
_UNSEEN = np.array((np.iinfo(np.int32).max, 0, 0), _FACTS)


class FactBook:
    """Facts of every group of a run that has a stored trajectory.

    16 bytes for each id; ids are dense in a run.
    """

    def __init__(self) -> None:
        self._groups = np.empty(0, _FACTS)

    def add(self, rollouts: pa.Table) -> None:
        """`rollouts` rows that were committed; rows without a trajectory count nothing."""
        rows = rollouts.select(COLUMNS).filter(
            pc.equal(rollouts.column("status"), RolloutState.COMPLETED.value)
        )
        ids = rows.column("group_id").to_numpy()
        self._grow(int(ids.max(initial=-1)) + 1)
        facts = self._groups
        np.minimum.at(facts["min_version"], ids, rows.column("min_version").to_numpy())
        np.add.at(facts["num_sequences"], ids, rows.column("num_sequences").to_numpy())
        np.add.at(facts["num_bytes"], ids, estimate_bytes(rows).to_numpy())

    def _grow(self, size: int) -> None:
        if size > len(self._groups):
            more = np.full(max(size, 2 * len(self._groups)), _UNSEEN)
            more[: len(self._groups)] = self._groups
            self._groups = more

    def _of(self, group_id: int) -> NDArray[np.void]:
        """A record of no dimension."""
        found = self._groups[group_id : group_id + 1]
        return found[0] if len(found) and found[0] != _UNSEEN else _NONE

    def min_version(self, group_id: int) -> int:
        """Oldest version that sampled a token of the group; -1 without a trajectory."""
        return int(self._of(group_id)["min_version"])

    def num_bytes(self, group_id: int) -> int:
        """About how many bytes of Arrow data the group's sequences are."""
        return int(self._of(group_id)["num_bytes"])

    def can_be_served(self, group_id: int) -> bool:
        """Whether the group has a sequence."""
        return bool(self._of(group_id)["num_sequences"] > 0)
