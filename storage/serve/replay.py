"""A stored run served again: equal values in equal order, from its directory alone.

Order: groups that were delivered, by delivery_seq; then kept groups that were never handed out, in
the order in which they were decided, continuing the dense numbering; stale and dropped groups are
not served. Cursors of the live run mean the same here. Commits are kept in memory only: a replay
changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.delivery import OrderReply, OrderRequest, bounded, check_seq
from prorl.types import RolloutState


class ReplayOrder:
    def __init__(
        self,
        stored: StoredRun,
        *,
        groups: Sequence[int] | None = None,
        run_id: str = "",
    ) -> None:
        self.run_id = run_id or stored.run_id
        self._groups = delivery_order(stored) if groups is None else groups
        self._facts = FactBook()
        self._facts.add(stored.read("rollouts", COLUMNS))
        self._cursors: dict[str, int] = {}

    @property
    def groups(self) -> Sequence[int]:
        return self._groups

    @property
    def delivered(self) -> int:
        return len(self._groups)

    @property
    def finished(self) -> bool:
        return True

    def committed(self, consumer: str) -> int:
        return self._cursors.get(consumer, 0)

    async def take(self, request: OrderRequest) -> OrderReply:
        check_seq(request.seq, self.delivered, self.run_id)
        ahead = (self._groups[seq] for seq in range(request.seq, self.delivered))
        groups = bounded(ahead, self._facts.num_bytes, request.max_groups, request.max_bytes)
        return OrderReply(tuple(groups), end=request.seq + len(groups) == self.delivered)

    async def commit(self, consumer: str, seq: int) -> None:
        check_seq(seq, self.delivered, self.run_id)
        self._cursors[consumer] = max(seq, self.committed(consumer))


def delivery_order(stored: StoredRun) -> list[int]:
    events = stored.read(
        "groups", ["event_seq", "group_id", "event", "kept", "delivery_seq"]
    ).sort_by("event_seq")
    delivered = _ids(_events(events, "delivered").sort_by("delivery_seq"))
    decided = _events(events, "decided")
    kept = _ids(decided.filter(decided.column("kept")))
    excluded = {*delivered, *_ids(_events(events, "stale"))}
    return [*delivered, *(group for group in kept if group not in excluded)]


def _events(events: pa.Table, kind: str) -> pa.Table:
    return events.filter(pc.equal(events.column("event"), kind))


def _ids(events: pa.Table) -> list[int]:
    ids: list[int] = events.column("group_id").to_pylist()
    return ids


def estimate_bytes(rollouts: pa.Table) -> pa.ChunkedArray:
    """Arrow bytes of each rollout's sequences, about: 4 a token, 4 a logprob, keys and spans."""
    tokens = pc.add(rollouts.column("num_tokens"), rollouts.column("num_sampled")).cast(pa.int64())
    return pc.add(pc.multiply(tokens, 4), 256)


def stored_index(stored: StoredRun) -> GroupIndex:
    index = GroupIndex(stored.directory)
    index.take_over(index.look(stored.commits))
    return index


def open_replay(where: str | Path) -> tuple[ReplayOrder, GroupIndex]:
    """Raises as `StoredRun`."""
    stored = StoredRun(where)
    return ReplayOrder(stored), stored_index(stored)


COLUMNS = ["group_id", "status", "min_version", "num_tokens", "num_sampled", "num_sequences"]
"""The columns of `rollouts`: what facts are made of."""


_FACTS = np.dtype(
    [
        ("min_version", "<i4"),
        ("num_rollouts", "<i4"),
        ("num_sequences", "<i4"),
        ("num_bytes", "<i8"),
    ]
)
_UNSEEN = np.array((np.iinfo(np.int32).max, 0, 0, 0), _FACTS)


class FactBook:
    """Facts of every group that has a stored trajectory: 20 bytes an id, ids are dense."""

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
        np.add.at(facts["num_rollouts"], ids, 1)
        np.add.at(facts["num_sequences"], ids, rows.column("num_sequences").to_numpy())
        np.add.at(facts["num_bytes"], ids, estimate_bytes(rows).to_numpy())

    def _grow(self, size: int) -> None:
        if size > len(self._groups):
            more = np.full(max(size, 2 * len(self._groups)), _UNSEEN)
            more[: len(self._groups)] = self._groups
            self._groups = more

    def _of(self, name: str, group_id: int, absent: int = 0) -> int:
        if group_id >= len(self._groups) or not self._groups["num_rollouts"][group_id]:
            return absent
        return int(self._groups[name][group_id])

    def min_version(self, group_id: int) -> int:
        """Oldest version that sampled a token of the group; -1 without a trajectory."""
        return self._of("min_version", group_id, -1)

    def num_rollouts(self, group_id: int) -> int:
        return self._of("num_rollouts", group_id)

    def num_bytes(self, group_id: int) -> int:
        """Returns the bytes of Arrow data in its sequences, about."""
        return self._of("num_bytes", group_id)

    def can_be_served(self, group_id: int) -> bool:
        return self._of("num_sequences", group_id) > 0
