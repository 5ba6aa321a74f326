"""The groups of a stored run as a twisted replay serves them: other rewards, other members."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.storage.groups import GroupIndex


class RescoredIndex:
    """Groups with the rewards of a scoring."""

    def __init__(self, index: GroupIndex, rewards: dict[int, float]) -> None:
        self._index, self._rewards = index, rewards

    def read(self, group_id: int) -> pa.RecordBatch:
        """As `GroupIndex.read`."""
        rows = self._index.read(group_id)
        given = [self._rewards.get(i) for i in rows.column("rollout_id").to_pylist()]
        place = rows.schema.get_field_index("reward")
        field = rows.schema.field(place)
        rewards = pa.array(given, field.type)
        scored = rows.set_column(place, field, rewards).filter(pc.is_valid(rewards))
        return scored.replace_schema_metadata(rows.schema.metadata)

    def forget(self, group_ids: Iterable[int]) -> None:
        """As `GroupIndex.forget`."""
        self._index.forget(group_ids)


class PickedIndex:
    """Groups with some of their members, several joined where one has too few."""

    def __init__(
        self,
        index: GroupIndex | RescoredIndex,
        size: int,
        seed: int,
        joined: Mapping[int, Sequence[int]],
    ) -> None:
        """`joined`: stored groups by the group that they are together."""
        self._index, self._size, self._seed, self._joined = index, size, seed, joined

    def read(self, group_id: int) -> pa.RecordBatch:
        """As `GroupIndex.read`; members of a joined group are numbered anew."""
        rows = self._index.read(group_id)
        if len(parts := self._joined.get(group_id, ())) > 1:
            rows = join([self._index.read(part) for part in parts], group_id)
        members = sorted(set(rows.column("rollout_id").to_pylist()))
        chance = random.Random(f"{self._seed}/{group_id}")
        chosen = pa.array(sorted(chance.sample(members, self._size)), pa.int64())
        picked = rows.filter(pc.is_in(rows.column("rollout_id"), chosen))
        return picked.replace_schema_metadata(rows.schema.metadata)

    def forget(self, group_ids: Iterable[int]) -> None:
        """As `GroupIndex.forget`."""
        self._index.forget(part for i in group_ids for part in self._joined.get(i, (i,)))


def join(groups: Sequence[pa.RecordBatch], group_id: int) -> pa.RecordBatch:
    """Groups of one task as one: its id, and sample indexes that go on from group to group."""
    first, numbers = 0, []
    for rows in groups:
        samples = rows.column("sample_index").to_numpy()
        numbers.append(samples + first)
        first += int(samples.max(initial=-1)) + 1
    rows = pa.concat_batches(groups)
    made = {
        "group_id": pa.repeat(pa.scalar(group_id, pa.int64()), rows.num_rows),
        "sample_index": pa.array(np.concatenate(numbers).astype(np.int32)),
    }
    columns = [made.get(name, rows.column(name)) for name in rows.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
