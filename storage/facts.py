"""A few numbers per group that decisions and hand-outs need: oldest version, size, whether there is
anything to serve.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from prorl.storage.replay import estimate_bytes
from prorl.types import RolloutState

COLUMNS = ["group_id", "status", "min_version", "num_tokens", "num_sampled", "num_sequences"]
"""Of `rollouts`: what facts are made of."""


@dataclass(slots=True, kw_only=True)
class GroupFacts:
    """What is known of a group from the members that are stored so far."""

    min_version: int
    num_bytes: int
    num_sequences: int


class FactBook:
    """Facts of every group of a run that has a stored trajectory."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupFacts] = {}

    def add(self, rollouts: pa.Table) -> None:
        """`rollouts` rows that were committed; rows without a trajectory count nothing."""
        rows = rollouts.select(COLUMNS).filter(
            pc.equal(rollouts.column("status"), RolloutState.COMPLETED.value)
        )
        sizes = estimate_bytes(rows).to_pylist()
        columns = (
            rows.column(name).to_pylist() for name in ("group_id", "min_version", "num_sequences")
        )
        for group_id, version, sequences, size in zip(*columns, sizes, strict=True):
            facts = self._groups.setdefault(
                group_id, GroupFacts(min_version=version, num_bytes=0, num_sequences=0)
            )
            facts.min_version = min(facts.min_version, version)
            facts.num_bytes += size
            facts.num_sequences += sequences

    def min_version(self, group_id: int) -> int:
        """Oldest version that sampled a token of the group; -1 without a trajectory."""
        facts = self._groups.get(group_id)
        return facts.min_version if facts else -1

    def num_bytes(self, group_id: int) -> int:
        """About how many bytes of Arrow data the group's sequences are."""
        facts = self._groups.get(group_id)
        return facts.num_bytes if facts else 0

    def can_be_served(self, group_id: int) -> bool:
        """Whether the group has a sequence."""
        facts = self._groups.get(group_id)
        return facts is not None and facts.num_sequences > 0
