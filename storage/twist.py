"""A replay with a twist: other groups, another order, another reward, another filter.

A twisted run has a name of its own (`RUN~` and eight digits of a hash over run and twist), so that
its cursors are never taken for those of the run: a trainer sees by the name that it is a replay.
Same run and same twist, same values in the same order.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import UserError
from prorl.storage.catalog import StoredRun
from prorl.storage.filter import MEMBERS, TIMEOUT_S, named_filter
from prorl.storage.groups import GroupIndex
from prorl.storage.replay import ReplayOrder, delivery_order, stored_index
from prorl.storage.scores import read_scores
from prorl.storage.sql import LockedDuckDB
from prorl.storage.twist_rows import PickedIndex, RescoredIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Twist:
    """What is other than it was; nothing by default."""

    select: str = ""
    """SQL over the run with a column `group_id`: these groups, in this order; dropped ones too."""
    filter: str = ""
    """`dapo`, or SQL as for a run: decides over the rewards that are served."""
    score: str = ""
    """A scoring (`prorl rescore`) in place of the first reward; members without a verdict are left
    out.
    """
    seed: int | None = None
    """Shuffle the groups by it."""
    group_size: int = 0
    """So many members of each group, chosen by the seed. Groups with fewer are joined with the next
    ones of their task, after the filter has decided; what is not enough is left out.
    """
    until: str = ""
    """As the run was at that moment, ISO 8601: groups decided and delivered later are not."""
    pace: float = 0.0
    """Serve groups as they came, so many times as fast; 0: at once."""

    def __bool__(self) -> bool:
        return self != Twist()


def open_twisted(
    where: str, twist: Twist
) -> tuple[ReplayOrder, GroupIndex | RescoredIndex | PickedIndex]:
    """Order and data of a stored run, twisted.

    Raises UserError for SQL that does not give groups, NotFoundError for a scoring that is not
    there, and as `StoredRun`.
    """
    stored = StoredRun(where)
    index: GroupIndex = stored_index(stored)
    if not twist:
        return ReplayOrder(stored), index
    rewards = _rewards(stored, twist.score) if twist.score else None
    groups, joined = _groups(stored, twist, index, rewards)
    order = _order(stored, twist, groups, joined)
    served = index if rewards is None else RescoredIndex(index, rewards)
    if not twist.group_size:
        return order, served
    return order, PickedIndex(served, twist.group_size, twist.seed or 0, joined)


def _groups(
    stored: StoredRun, twist: Twist, index: GroupIndex, rewards: dict[int, float] | None
) -> tuple[list[int], dict[int, list[int]]]:
    """Groups that can be served, not yet shuffled, and what each is made of if it was joined."""
    groups = _wanted(stored, twist)
    members = _members(stored, rewards)
    valid = set(members.column("group_id").to_pylist())
    groups = [group for group in groups if group in index and group in valid]
    if twist.filter:
        kept = _kept(members, twist.filter)
        groups = [group for group in groups if group in kept]
    if not twist.group_size:
        return groups, {}
    joined = _large_enough(groups, members, twist.group_size)
    return list(joined), joined


def _wanted(stored: StoredRun, twist: Twist) -> list[int]:
    """What was delivered by then, or of that what the twist's own SELECT gives, in its order."""
    then = delivery_order(stored, _moment(twist.until))
    if not twist.select:
        return then
    found, known = _selected(stored, twist.select), set(then)
    return [group for group in found if group in known] if twist.until else found


def _order(
    stored: StoredRun, twist: Twist, groups: list[int], joined: dict[int, list[int]]
) -> ReplayOrder:
    """These groups, shuffled and paced as the twist says."""
    if twist.seed is not None:
        random.Random(twist.seed).shuffle(groups)
    return ReplayOrder(
        stored,
        groups=groups,
        run_id=twisted_name(stored.run_id, twist),
        due_s=_due(stored, groups, twist.pace) if twist.pace else (),
        joined=joined,
    )


def _moment(text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"moment {text!r}", "ISO 8601, as 2026-01-31T12:00:00+00:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _large_enough(groups: Iterable[int], members: pa.Table, size: int) -> dict[int, list[int]]:
    """Groups of that size, each with the stored ones that it is made of.

    In the order in which they are complete, called as their last part.
    """
    ids = members.column("group_id").to_pylist()
    counts = Counter(ids)
    tasks = dict(zip(ids, members.column("task_id").to_pylist(), strict=True))
    waiting: dict[str, list[int]] = {}
    found: dict[int, list[int]] = {}
    for group in groups:
        parts = [group] if counts[group] >= size else [*waiting.pop(tasks[group], ()), group]
        if sum(counts[part] for part in parts) >= size:
            found[group] = parts
        else:
            waiting[tasks[group]] = parts
    if not found:
        most = max(Counter(tasks[i] for i in ids).values(), default=0)
        raise UserError(f"groups of {size}", f"at most {most}, as a task of the run has members")
    return found


def _due(stored: StoredRun, groups: Sequence[int], pace: float) -> list[float]:
    """Seconds after the start at which each group may be served: as it was delivered, or decided.

    After the first; never before one that comes earlier in the order, and with it where nothing is
    known of the group's own moment.
    """
    if pace < 0:
        raise UserError(f"pace {pace:g}", "a positive number; 1 is as it was")
    rows = stored.sql(
        "select group_id, epoch(max(groups.at)) as moment from groups"
        " where event in ('decided', 'delivered') group by 1"
    )
    at = {row["group_id"]: row["moment"] for row in rows.to_pylist()}
    start = next((at[group] for group in groups if group in at), 0.0)
    times = accumulate((at.get(group, start) for group in groups), max)
    return [(moment - start) / pace for moment in times]


def twisted_name(run_id: str, twist: Twist) -> str:
    """What a twisted run is called."""
    first, plain = ("select", "filter", "score", "seed"), asdict(Twist())
    said = {k: v for k, v in asdict(twist).items() if k in first or v != plain[k]}
    digest = hashlib.sha256(orjson.dumps([run_id, said])).hexdigest()
    return f"{run_id}~{digest[:8]}"


def _rewards(stored: StoredRun, score: str) -> dict[int, float]:
    rows = read_scores(stored.directory, score)
    rows = rows.filter(pc.is_valid(rows.column("reward")))
    ids, rewards = (rows.column(name).to_pylist() for name in ("rollout_id", "reward"))
    return dict(zip(ids, rewards, strict=True))


def _selected(stored: StoredRun, select: str) -> list[int]:
    found = stored.sql(select)
    if "group_id" not in found.column_names:
        raise UserError(
            f"the selection gives {', '.join(found.column_names)}", "a column `group_id`"
        )
    return list(dict.fromkeys(map(int, found.column("group_id").drop_null().to_pylist())))


def _members(stored: StoredRun, rewards: dict[int, float] | None) -> pa.Table:
    """Valid members with the rewards that will be served, as a filter sees them."""
    rows = stored.sql(
        "select group_id, task_id, 0::int as num_members, rollout_id, sample_index, attempt,"
        " failure_class, reward from rollouts where valid and num_sequences > 0"
    )
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


def _kept(members: pa.Table, name: str) -> set[int]:
    """The groups that a filter keeps; its SQL is not asked about those that are too small."""
    chosen = named_filter(name)
    enough = pc.greater_equal(members.column("num_members"), chosen.min_valid)
    database = LockedDuckDB(what="filter")
    try:
        database.register("rollouts", members.filter(enough))
        found = database.query(chosen.sql, TIMEOUT_S)
    finally:
        database.close()
    if not {"group_id", "kept"} <= set(found.column_names):
        raise UserError(f"the filter gives {', '.join(found.column_names)}", "group_id, kept")
    kept = found.filter(found.column("kept"))
    return set(map(int, kept.column("group_id").to_pylist()))
