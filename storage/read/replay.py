"""A stored run served again: equal values in equal order, from its directory alone.

Order: groups that were delivered, by delivery_seq; then kept groups that were never handed out, in
the order in which they were decided, continuing the dense numbering; stale and dropped groups are
not served. Cursors of the live run mean the same here. Commits are kept in memory only: a replay
changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.delivery import Given, Wanted, bounded, check_seq


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
        self._sizes = group_bytes(stored)
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

    async def take(self, wanted: Wanted) -> Given:
        check_seq(wanted.seq, self.delivered, self.run_id)
        ahead = (self._groups[seq] for seq in range(wanted.seq, self.delivered))
        groups = bounded(
            ahead, lambda group: self._sizes.get(group, 0), wanted.max_groups, wanted.max_bytes
        )
        return Given(tuple(groups), end=wanted.seq + len(groups) == self.delivered)

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
    gone = {*delivered, *_ids(_events(events, "stale"))}
    return [*delivered, *(group for group in kept if group not in gone)]


def _events(events: pa.Table, kind: str) -> pa.Table:
    return events.filter(pc.equal(events.column("event"), kind))


def _ids(events: pa.Table) -> list[int]:
    found: list[int] = events.column("group_id").to_pylist()
    return found


def group_bytes(stored: StoredRun) -> dict[int, int]:
    rows = stored.read("rollouts", ["group_id", "num_tokens", "num_sampled"])
    sums = (
        pa.table({"group": rows.column("group_id"), "bytes": estimate_bytes(rows)})
        .group_by("group")
        .aggregate([("bytes", "sum")])
    )
    return dict(
        zip(sums.column("group").to_pylist(), sums.column("bytes_sum").to_pylist(), strict=True)
    )


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
