"""A replay that is transformed: other groups, another order, another reward, another filter.

Its run has a name of its own (`RUN~` and eight digits of a hash over run and transform), so that
its cursors are never taken for those of the stored run, and a trainer sees that it is a replay.
The same run and the same transform give the same values in the same order.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import UserError
from prorl.storage.files.appended import read_scores
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.groups import GroupIndex
from prorl.storage.read.sql import LockedDuckDB
from prorl.storage.serve.filter import EMPTY, MEMBERS, TIMEOUT_S, named_filter
from prorl.storage.serve.replay import ReplayOrder, delivery_order, stored_index


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTransform:
    """Holds what a replay changes; nothing by default."""

    select: str = ""
    """SQL over the run with a column `group_id`: these groups, in this order; dropped ones too."""
    filter: str = ""
    """`dapo`, or SQL as for a run: decides over the rewards that are served."""
    score: str = ""
    """A scoring (`prorl eval --stored`) in place of the first reward. Members without a verdict are
    left out.
    """
    seed: int | None = None
    """Shuffle the groups by it."""

    def __bool__(self) -> bool:
        return self != ReplayTransform()


class RescoredIndex:
    """Groups with the rewards of a scoring."""

    def __init__(self, index: GroupIndex, rewards: dict[int, float]) -> None:
        self._index, self._rewards = index, rewards

    def read(self, group_id: int) -> pa.RecordBatch:
        rows = self._index.read(group_id)
        scores = [self._rewards.get(i) for i in rows.column("rollout_id").to_pylist()]
        place = rows.schema.get_field_index("reward")
        field = rows.schema.field(place)
        rewards = pa.array(scores, field.type)
        scored = rows.set_column(place, field, rewards).filter(pc.is_valid(rewards))
        return scored.replace_schema_metadata(rows.schema.metadata)

    def routed_experts(self, group_id: int) -> pa.Table:
        return self._index.routed_experts(group_id)


def open_transformed(
    where: str, transform: ReplayTransform
) -> tuple[ReplayOrder, GroupIndex | RescoredIndex]:
    """Return order and data of a stored run, transformed. Raises UserError for SQL that gives no
    groups, NotFoundError for a scoring that is not there, and as `StoredRun`.
    """
    stored = StoredRun(where)
    index: GroupIndex = stored_index(stored)
    if not transform:
        return ReplayOrder(stored), index
    rewards = _rewards(stored, transform.score) if transform.score else None
    groups = _selected(stored, transform.select) if transform.select else delivery_order(stored)
    members = _members(stored, rewards)
    valid = set(members.column("group_id").to_pylist())
    groups = [group for group in groups if group in index and group in valid]
    if transform.filter:
        kept = _kept_groups(members, transform.filter)
        groups = [group for group in groups if group in kept]
    if transform.seed is not None:
        random.Random(transform.seed).shuffle(groups)
    digest = hashlib.sha256(orjson.dumps([stored.run_id, asdict(transform)])).hexdigest()
    order = ReplayOrder(stored, groups=groups, run_id=f"{stored.run_id}~{digest[:8]}")
    return order, index if rewards is None else RescoredIndex(index, rewards)


def _rewards(stored: StoredRun, score: str) -> dict[int, float]:
    rows = read_scores(stored.directory, score)
    rows = rows.filter(pc.is_valid(rows.column("reward")))
    ids, rewards = (rows.column(name).to_pylist() for name in ("rollout_id", "reward"))
    return dict(zip(ids, rewards, strict=True))


def _selected(stored: StoredRun, select: str) -> list[int]:
    rows = stored.sql(select)
    if "group_id" not in rows.column_names:
        raise UserError(
            f"the selection gives {', '.join(rows.column_names)}", "a column `group_id`"
        )
    return list(dict.fromkeys(map(int, rows.column("group_id").drop_null().to_pylist())))


def _members(stored: StoredRun, rewards: dict[int, float] | None) -> pa.Table:
    """Valid members with the rewards that will be served, as a filter sees them."""
    names = ("0::int as num_members" if n == "num_members" else n for n in MEMBERS.names)
    rows = stored.sql(f"select {', '.join(names)} from rollouts where valid and num_sequences > 0")
    if rewards is not None:
        served = pa.array(
            [rewards.get(i) for i in rows.column("rollout_id").to_pylist()], pa.float32()
        )
        rows = rows.set_column(rows.column_names.index("reward"), "reward", served)
        rows = rows.filter(pc.is_valid(rows.column("reward")))
    sizes = rows.group_by("group_id").aggregate([([], "count_all")]).rename_columns(["g", "n"])
    counts = dict(zip(sizes.column("g").to_pylist(), sizes.column("n").to_pylist(), strict=True))
    members = pa.array([counts[i] for i in rows.column("group_id").to_pylist()], pa.int32())
    place = rows.column_names.index("num_members")
    return rows.set_column(place, "num_members", members).cast(MEMBERS)


def _kept_groups(members: pa.Table, name: str) -> set[int]:
    """Returns the groups that a filter keeps; its SQL does not see groups that are too small.
    It sees no `history`: an order that was made anew does not say what came before a group.
    """
    chosen = named_filter(name)
    enough = pc.greater_equal(members.column("num_members"), chosen.min_valid)
    with LockedDuckDB(label="filter") as database:
        database.register("rollouts", members.filter(enough))
        database.register("history", EMPTY["history"])
        decisions = database.query(chosen.sql, TIMEOUT_S)
    if not {"group_id", "kept"} <= set(decisions.column_names):
        raise UserError(f"the filter gives {', '.join(decisions.column_names)}", "group_id, kept")
    kept = decisions.filter(decisions.column("kept"))
    return set(map(int, kept.column("group_id").to_pylist()))
