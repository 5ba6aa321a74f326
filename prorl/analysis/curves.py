"""Curves that a team follows while a policy trains: over policy versions, trainer steps or time.

Each curve is rows of `x`, `y` and, of several lines, `z`; `n` says of how many rollouts or groups.
What the trainer of a replay logged is a line under the replay's name.
A rollout may hold tokens of several versions, so that the axis says which one counts: `oldest` or
`newest`. `step` is the trainer step during which a rollout was stored (the first step that was
logged after it); `time` is seconds since the run's first stored rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prorl.types import Json

Ask = Callable[[str], list[dict[str, Json]]]

POINTS = 60
"""The points of a curve over time: more than a chart of 380 pixels can show, and few enough to
average.
"""

MAX_NAMES = 60
"""Names of logged metrics that are drawn; a trainer that logs each layer has hundreds."""

TITLED = ("loss", "kl", "entropy", "grad_norm", "idle_share")
"""Metrics with a chart of their own title; all others are drawn under their name."""


class Axis(NamedTuple):
    title: str
    rollout: str
    """x of a row `r` of `rollouts`."""
    group: str
    """x of an event `g` of `groups`."""
    metric: str
    """x of a row `m` of `metrics`."""
    where: str = ""
    """The rollouts that an x stands for, as a filter in which it is `{x}`."""


_VERSION = "coalesce(m.version, v.version)"
_BUCKET = "floor(epoch({0} - clock.began) / clock.width) * clock.width"

AXES: Mapping[str, Axis] = {
    "oldest": Axis(
        "policy version (a rollout's oldest)",
        "nullif(r.min_version, -1)",
        "nullif(g.min_version, -1)",
        _VERSION,
        "valid and min_version = {x}",
    ),
    "newest": Axis(
        "policy version (a rollout's newest)",
        "nullif(r.max_version, -1)",
        "nullif(g.min_version, -1)",
        _VERSION,
        "valid and max_version = {x}",
    ),
    "step": Axis("trainer step", "s.step", "s.step", "m.step"),
    "time": Axis(
        "time since the first rollout",
        _BUCKET.format("r.committed_at"),
        _BUCKET.format("g.event_at"),
        "epoch(m.time - clock.began)",
    ),
}

_ROLLOUTS = """
with clock as (select min(committed_at) as began,
        greatest(epoch(max(committed_at) - min(committed_at)) / {points}, 1) as width
    from rollouts),
steps as (select step, min(time) as time from metrics
    where run_id in (select run_id from rollouts) group by step),
r as (select {x} as x, r.* from rollouts r asof left join steps s on r.committed_at <= s.time
    cross join clock where r.status = 'completed' and r.valid)
"""

_MEMBERS = """{rollouts}
select x::double as x, count(*) as n, avg(reward) as reward, avg(num_sampled) as length,
    sum(logprob_sum) / nullif(sum(num_sampled) filter (logprob_sum is not null), 0) as logprob,
    sum(num_sampled) / nullif({seconds}, 0) as tokens_s
from r where x is not null group by 1 order by 1"""

_PASS = """{rollouts}, placed as (select group_id, {chosen}(x) as x from r group by group_id)
select x::double as x, 'pass@' || k as z, avg(pass_at_k) as y, count(*) as n
from passk join placed using (group_id)
where x is not null and (k = 1 or k = (select max(k) from passk))
group by x, k order by x, k"""

_GROUPS = """{rollouts}
select {group}::double as x, avg(g.kept::int) as y, count(*) as n
from groups g asof left join steps s on g.event_at <= s.time cross join clock
where g.event = 'decided' group by 1 having x is not null order by 1"""

_STALENESS = """{rollouts}
select {group}::double as x, avg(v.version - g.min_version) as y, count(*) as n
from groups g asof join versions v on g.event_at >= v.published_at
    asof left join steps s on g.event_at <= s.time cross join clock
where g.event = 'delivered' and g.min_version >= 0 group by 1 having x is not null order by 1"""

_METRICS = """{rollouts}, own as (select any_value(run_id) as run_id from rollouts)
select m.name as name, {metric}::double as x, avg(m.value) as y,
    if(m.run_id = own.run_id, '', m.run_id) as z
from metrics m asof left join versions v on m.time >= v.published_at cross join clock
    cross join own
where m.name in (select name from metrics group by name order by name limit {names})
group by all having x is not null order by 1, 2"""

_OF_MEMBERS = {
    "reward": "Mean reward",
    "length": "Sampled tokens of a rollout",
    "logprob": "Mean logprob of sampled tokens",
    "tokens_s": "Sampled tokens per second",
}
_OF_METRICS = {
    "loss": "Loss",
    "kl": "KL divergence",
    "entropy": "Entropy of the trainer's policy",
    "grad_norm": "Gradient norm",
    "idle_share": "Share of a step in which the trainer waited",
}


def curves(axis: str, ask: Ask) -> list[dict[str, Json]]:
    """Returns the curves of a run over an axis of `AXES`; those without a point are left out."""
    place = AXES[axis]
    rollouts = _ROLLOUTS.format(x=place.rollout, points=POINTS)
    span = "epoch(max(committed_at) - min(committed_at))"
    seconds = "(select width from clock)" if axis == "time" else span
    members = ask(_MEMBERS.format(rollouts=rollouts, seconds=seconds))
    chosen = "min" if axis == "oldest" else "max"
    drawn: list[dict[str, Json]] = [
        {
            "name": name,
            "title": title,
            "where": place.where,
            "rows": [
                {"x": row["x"], "y": row[name], "n": row["n"]}
                for row in members
                if row[name] is not None
            ],
        }
        for name, title in _OF_MEMBERS.items()
    ]
    per_group = {
        "pass": ("Share of tasks solved in k tries (pass@k)", _PASS),
        "kept": ("Share of groups that the filter kept", _GROUPS),
        "staleness": ("Versions that a group was behind when it was delivered", _STALENESS),
    }
    for name, (title, sql) in per_group.items():
        rows = ask(sql.format(rollouts=rollouts, chosen=chosen, group=place.group))
        drawn.append({"name": name, "title": title, "where": "", "rows": rows})
    logged: dict[str, list[Json]] = {}
    for row in ask(_METRICS.format(rollouts=rollouts, metric=place.metric, names=MAX_NAMES)):
        logged.setdefault(row.pop("name"), []).append(row)
    for name in (*TITLED, *sorted(logged.keys() - set(TITLED))):
        title = _OF_METRICS.get(name, name)
        rows = logged.get(name, [])
        drawn.append(
            {"name": f"metric:{name}", "title": title, "where": "", "rows": rows}
            | {"logged": True, "known": name in TITLED}
        )
    return [curve for curve in drawn if curve["rows"]]
