"""How the rows of a pack are sorted, and a checksum that does not depend on it.

`sequences` lie as trainers read them: in delivery order, then what was never delivered by group.
The other tables lie by their ids, which is by task too, since ids are given in order of acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.storage.commit_files import Commit
from prorl.storage.layout import RunDir
from prorl.storage.part_reader import read_part
from prorl.storage.sql import LockedDuckDB

_Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

ORDER: Mapping[str, tuple[str, ...]] = {
    "sequences": ("sample_index", "segment"),
    "rollouts": ("rollout_id",),
    "turns": ("rollout_id", "turn"),
    "messages": ("rollout_id", "index"),
    "groups": ("event_seq",),
    "tasks": ("group_id",),
}
"""What the rows of a pack are sorted by; `sequences` by the rank of their group first."""


class Checksum(NamedTuple):
    """A checksum of a table's rows by value, whatever their order."""

    rows: int
    sum: int


class Ranks(NamedTuple):
    """Delivered groups and their places."""

    group_ids: _Int64s
    seqs: _Int64s

    def of(self, group_ids: _Int64s) -> _Int64s:
        """Sort keys: delivery_seq, then whatever was not delivered by group."""
        undelivered = np.int64(1 << 40) + group_ids
        if not len(self.group_ids):
            return undelivered
        at = np.minimum(np.searchsorted(self.group_ids, group_ids), len(self.group_ids) - 1)
        return np.where(self.group_ids[at] == group_ids, self.seqs[at], undelivered)


def delivery_ranks(run: RunDir, commits: Sequence[Commit]) -> Ranks:
    """Places in the delivery order, as the `groups` rows of these commits say."""
    columns = ["group_id", "event", "delivery_seq"]
    files = [f for commit in commits for f in commit.files if f.table == "groups" and f.rows]
    if not files:
        return Ranks(np.zeros(0, np.int64), np.zeros(0, np.int64))
    events = pa.concat_tables([read_part(run, file, columns) for file in files])
    given = events.filter(pc.equal(events.column("event"), "delivered")).sort_by("group_id")
    return Ranks(given.column("group_id").to_numpy(), given.column("delivery_seq").to_numpy())


def row_order(table: str, rows: pa.Table, ranks: Ranks) -> _Int64s:
    """Indices that sort the rows of a table as its packs hold them."""
    keys = [rows.column(name).to_numpy() for name in reversed(ORDER[table])]
    if table == "sequences":
        keys.append(ranks.of(rows.column("group_id").to_numpy()))
    order: _Int64s = np.lexsort(keys).astype(np.int64)
    return order


def checksum(rows: pa.Table) -> Checksum:
    """Equal for two tables with the same rows, in whatever order and layout."""
    database = LockedDuckDB(memory="1GB")
    try:
        database.register("given", rows)
        found = database.query("select sum(hash(given))::varchar as h from given")
        return Checksum(rows.num_rows, int(found.column("h")[0].as_py() or 0))
    finally:
        database.close()
