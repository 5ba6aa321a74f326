"""Reports how a demo ended: SQL over the Parquet files of its runs and its trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

from prorl.cli.demo.recipe import checkpoints_dir, newest_checkpoint
from prorl.cli.output import say, table
from prorl.cli.passk import evaluation
from prorl.cli.runs import root_option
from prorl.pluralize import pluralize
from prorl.types import Json

BEFORE, AFTER = "-before", "-after"

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

CURVE = """
select s.min_version as version, data_source as "set", avg(reward) as reward, count(*) as rollouts
from rollouts s where valid and status = 'completed' group by all order by 1, 2
"""

BY_VERSION_SQL = "select min_version, avg(reward) from rollouts where valid group by all order by 1"
"""The query that a person may run next: as the viewer's chart has it."""

PHASES = ("wait", "train", "checkpoint", "publish")
"""The phases of a step of the trainer."""

COLUMNS = (
    *("set", "held-out before", "held-out after", "greedy"),
    *("DAPO kept", "dropped"),
)


def report(root: Path, name: str) -> dict[str, Json]:
    import pyarrow.dataset as ds

    from prorl.storage.read.catalog import StoredRun

    stored = StoredRun(root / name)
    sets: list[dict[str, Json]] = stored.sql(SETS).to_pylist()
    for when, run in (("before", name + BEFORE), ("after", name + AFTER)):
        passed = {(each.data_source, each.mode): each for each in evaluation(root / run)}
        for row in sets:
            for mode in ("sampled", "greedy"):
                outcome = passed.get((row["set"], mode))
                row[f"{mode}_{when}"] = outcome.at[1]._asdict() if outcome and outcome.at else None
    files = sorted(map(str, (root / name / "training" / "metrics").glob("step-*.parquet")))
    steps: list[dict[str, Json]] = (
        ds.dataset(files).to_table().sort_by("step").to_pylist() if files else []
    )
    rows = steps[1:] or steps  # the first step waits for torch and for the evaluation
    return {
        "run": name,
        "directory": str(root / name),
        "sets": sets,
        "curve": stored.sql(CURVE).to_pylist(),
        "steps": steps,
        "times": {
            **{
                f"{phase}_s": sum(row.get(f"{phase}_s", 0.0) for row in rows) / max(len(rows), 1)
                for phase in PHASES
            },
            # How far the sampler's logprobs are from the trainer's; only tokens that its weights
            # of that moment sampled can be compared.
            "logprob_diff_max": max((row["logprob_diff_max"] for row in steps), default=None),
            "compared_tokens": int(sum(row["compared_tokens"] for row in steps)),
        },
    }


def present(figures: dict[str, Json]) -> None:
    def with_interval(share: Json) -> str:
        return f"{share['value']:.3f} [{share['low']:.2f}, {share['high']:.2f}]" if share else "-"

    def greedy(share: Json) -> str:
        return f"{share['value']:.3f}" if share else "-"

    rows = [
        (
            row["set"],
            with_interval(row["sampled_before"]),
            with_interval(row["sampled_after"]),
            f"{greedy(row['greedy_before'])} -> {greedy(row['greedy_after'])}",
            row["kept"],
            row["dropped"],
        )
        for row in figures["sets"]
    ]
    say()
    title = f"{figures['run']}: held-out reward at temperature 1 (95 % Wilson), greedy beside it"
    table(COLUMNS, rows, title=title)
    for row in figures["sets"]:
        groups = pluralize(row["groups"], "group")
        say(
            f"  {row['set']:<9} {groups}, {row['turns']:.2f} turns a rollout,"
            f" {row['tokens']:,} tokens, {row['exact_share']:.2%} of them exact ids"
        )
    times, directory = figures["times"], Path(figures["directory"])
    name, root = directory.name, root_option(directory.parent)
    loads = "(transformers, vLLM and `prorl eval --policy DIR` load them)"
    checkpoints = checkpoints_dir(directory.parent, name)
    if figures["steps"]:  # what the shipped trainer measures of itself
        step_s = sum(times[f"{phase}_s"] for phase in PHASES)
        spent = " · ".join(f"{phase} {times[f'{phase}_s']:.2f}" for phase in PHASES)
        num_steps, planned = len(figures["steps"]), figures["recipe"]["steps"]
        say(f"  steps     {num_steps} of {planned}, {step_s:.1f} s each: {spent}")
        if num_steps < planned:
            say(
                f"            stopped early: the {figures['recipe']['minutes']:g} minutes were over"
            )
        apart = "no token could be compared"
        if count := times["compared_tokens"]:
            most = f"at most {times['logprob_diff_max']:.1e} apart"
            apart = f"{most} in {count:,} tokens that could be compared"
        say(f"  logprobs  sampler against trainer: {apart}")
    elif newest := newest_checkpoint(directory.parent, name):
        say(f"  steps     TRL's figures of each: {newest / 'trainer_state.json'}")
    say(
        f"  cost      {figures['elapsed_s']:.0f} s, {figures['cpu_s']:.0f} CPU s,"
        " sandboxes included"
    )
    say(f"  weights   {checkpoints}  {loads}")
    say(f"  next      prorl view {shlex.quote(str(directory))}")
    say(f"            prorl show {name} --best{root}")
    say(f'            prorl sql {name} "{BY_VERSION_SQL}"{root}')
    say(f"            prorl replay {name}{root}")
