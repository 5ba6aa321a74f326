"""How a demo ended: every figure is SQL over the Parquet files of its runs and its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prorl.cli.demo.learning import AFTER, BEFORE
from prorl.cli.passk import evaluation
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.cli.passk import Passed

SETS = """
with sets as (select distinct group_id, data_source from rollouts),
decided as (
    select data_source, count(*) filter (kept) as kept,
        count(*) filter (reason = 'all_equal') as dropped,
        count(*) filter (not kept and reason <> 'all_equal') as cut
    from groups join sets using (group_id) where event = 'decided' group by data_source),
sampled as (
    select data_source, sum(len(logprobs)) as trained_ids
    from sequences join sets using (group_id) group by data_source),
said as (
    select data_source, sum(completion_tokens) as said_ids
    from turns join (select rollout_id, attempt, data_source from rollouts where valid)
        using (rollout_id, attempt) group by data_source)
select data_source as "set", kept + dropped as groups, kept, dropped, cut,
    count(*) filter (valid) as rollouts, avg(num_turns) filter (valid) as turns,
    sum(num_tokens) filter (valid)::bigint as tokens,
    sum(num_sampled) filter (valid)::bigint as sampled,
    any_value(trained_ids / said_ids) as exact_share
from rollouts join decided using (data_source) join sampled using (data_source)
    join said using (data_source)
group by all order by 1
"""

TIMES = """
select sum(llm_s) as llm_s, sum(tool_s) as tool_s, sum(init_s) as init_s,
    sum(eval_s) as eval_s, sum(run_s) as run_s,
    sum(num_sampled)::bigint as sampled
from rollouts where status = 'completed' and max_version >= {oldest}
"""

CURVE = """
select s.min_version as version, data_source as "set", avg(reward) as reward, count(*) as rollouts
from rollouts s where valid and status = 'completed' group by all order by 1, 2
"""


def report(root: Path, name: str, run_slots: int) -> dict[str, Json]:
    """All figures of a finished demo as JSON values."""
    from prorl.storage.catalog import StoredRun

    stored = StoredRun(root / name)
    all_steps = steps(root / name / "training" / "metrics")
    rows = all_steps[1:] or all_steps  # the first step waits for torch and for the evaluation
    (times,) = stored.sql(TIMES.format(oldest=min(1, len(rows) - 1))).to_pylist()
    return {
        "run": name,
        "directory": str(root / name),
        "sets": _with_held_out(stored.sql(SETS).to_pylist(), root, name),
        "curve": stored.sql(CURVE).to_pylist(),
        "steps": all_steps,
        "times": _times(times, rows, run_slots),
    }


def _with_held_out(sets: list[dict[str, Json]], root: Path, name: str) -> list[dict[str, Json]]:
    """The rows of the sets, each with what was right of its held-out tasks, before and after."""
    runs = {"before": _passed(root / (name + BEFORE)), "after": _passed(root / (name + AFTER))}
    for row in sets:
        for when, found in runs.items():
            for mode in ("sampled", "greedy"):
                one = found.get((row["set"], mode))
                row[f"{mode}_{when}"] = one.at[1]._asdict() if one and one.at else None
    return sets


def _passed(directory: Path) -> dict[tuple[str, str], Passed]:
    return {(one.data_source, one.mode): one for one in evaluation(directory)}


def steps(metrics: Path) -> list[dict[str, Json]]:
    """The trainer's rows, in order."""
    import pyarrow.dataset as ds

    files = sorted(str(file) for file in metrics.glob("step-*.parquet"))
    return list(ds.dataset(files).to_table().sort_by("step").to_pylist()) if files else []


def _times(
    rollouts: dict[str, Json], rows: list[dict[str, Json]], run_slots: int
) -> dict[str, Json]:
    """Where the time of a step goes."""
    spent = {
        name: sum(row.get(f"{name}_s", 0.0) for row in rows)
        for name in ("wait", "train", "checkpoint", "publish")
    }
    wall_s, count = sum(spent.values()), max(len(rows), 1)
    sampled, run_s = sum(row["sampled_tokens"] for row in rows), rollouts["run_s"] or 0.0
    waiting = max(0.0, 1.0 - run_s / (run_slots * wall_s)) if wall_s else None
    return {
        "step_s": wall_s / count,
        **_waits(rollouts, spent["wait"] / count),
        "training_s": spent["train"] / count,
        "checkpoint and publish_s": (spent["checkpoint"] + spent["publish"]) / count,
        "run_waiting_share": waiting,
        "sampled_tokens_per_s": sampled / wall_s if wall_s else None,
        "logprob_diff_max": max((row["logprob_diff_max"] for row in rows), default=None),
    }


def _waits(rollouts: dict[str, Json], wait_s: float) -> dict[str, Json]:
    """The trainer's wait in a step, split as its rollouts spent their time."""
    parts = {
        "sampling": rollouts["llm_s"],
        "tools": rollouts["tool_s"],
        "sandbox start": rollouts["init_s"],
        "scoring": rollouts["eval_s"],
    }
    whole = sum(value or 0.0 for value in parts.values()) or 1.0
    return {f"{name}_s": wait_s * (value or 0.0) / whole for name, value in parts.items()}
