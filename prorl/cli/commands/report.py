"""`prorl report`: the pages of `prorl view` frozen into one HTML file, or two runs side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.difference import difference, logged_metrics
from prorl.analysis.opened import open_runs
from prorl.analysis.provenance import provenance
from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import open_to_write, say, say_json, table
from prorl.cli.runs import run_directory
from prorl.cli.summary import summarise
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.storage.read.catalog import StoredRun
from prorl.view.frozen import freeze

FIGURES = (
    *("rollouts", "groups", "valid", "rewarded", "mean_reward", "model_calls", "tool_calls"),
    *("tokens", "sampled_tokens", "bytes"),
)
"""The figures of two runs side by side."""


def report(
    run: StoredName,
    other: str = "",
    /,
    *,
    out: Path | None = None,
    only: str = "",
    limit: int = 20,
    rollout: list[int] | None = None,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Write a run's pages to one self-contained HTML file; with OTHER, print the differences.

    The file has the charts of all analyses, a table of the first 500 rollouts, and some rollouts
    with their tokens: the worst, the best, some that failed.

    Example: prorl report my-run --out my-run.html

    Example: prorl report before after

    For two runs it prints the mean difference over the tasks that both have scored, and for each
    task that changed the difference with its 95 % interval, tasks that flipped first.

    Parameters
    ----------
    other
        A second run: prints both runs' figures side by side, what their trainers had logged by the
        last step that both have, and the tasks whose mean reward changed: flipped ones first, then
        the largest changes.
    limit
        With OTHER: the number of tasks to print.
    out
        HTML file. Default: RUN.html here.
    only
        Print the rows of one analysis: reward, rewards, sources, time, outcomes, kept, mismatch,
        servers, pass, funnel, dropped, staleness, drift, tools, length, slow, stragglers,
        failures, suspects, reuse, cost. Columns x and y are those of its chart.
    rollout
        Id of a rollout to include in full; may be repeated.
    """
    if other:
        if out or only:
            raise UserError("--out or --only with two runs", "two runs alone, or one with options")
        return _compare((run, other), root, limit, json=json)
    place = run_directory(run, root)
    if only and only not in ANALYSES:
        raise UserError(f"no analysis {only!r}", f"one of {', '.join(ANALYSES)}")
    if only or json:
        chosen = {only: ANALYSES[only]} if only else ANALYSES
        runs = open_runs(place)
        tables = {name: runs.table(analysis.sql).to_pylist() for name, analysis in chosen.items()}
        if json:
            say_json(tables)
            return 0
        rows = tables[only]
        table(list(rows[0]) if rows else ("x", "y"), (list(row.values()) for row in rows))
        return 0
    name = place.rstrip("/").rpartition("/")[2]
    path = out or Path(f"{name}.html")
    with open_to_write(path) as file:
        file.write(freeze(place, rollout or ()))
    say(f"{name}: {len(ANALYSES)} analyses and its rollouts in {path}")
    return 0


def _compare(names: tuple[str, str], root: str, limit: int, *, json: bool) -> int:
    places = [run_directory(name, root) for name in names]
    first, second = (summarise(place) for place in places)
    figures = {name: [first[name], second[name]] for name in FIGURES}
    makers = [_provenance(StoredRun(place)) for place in places]
    provenance = {
        fact: [facts.get(fact, "") for facts in makers] for fact in {**makers[0], **makers[1]}
    }
    first_run, second_run = (open_runs(place) for place in places)
    ask_first, ask_second = (
        partial(lambda opened, sql: opened.table(sql).to_pylist(), opened)
        for opened in (first_run, second_run)
    )
    comparison, metrics = difference(ask_first, ask_second), logged_metrics(ask_first, ask_second)
    changed = [task for task in comparison.tasks if task.difference]
    interval = [comparison.mean, comparison.low, comparison.high]
    if json:
        say_json(
            {
                "figures": figures,
                "provenance": provenance,
                "shared_tasks": len(comparison.tasks),
                "difference": dict(zip(("mean", "low", "high"), interval, strict=True)),
                "metrics": None if metrics is None else metrics._asdict(),
                "changed_tasks": [task._asdict() for task in changed[:limit]],
            }
        )
        return 0
    table(("", *names), [(name, *pair) for name, pair in figures.items()])
    if metrics is not None:
        rows = [(name, *pair) for name, pair in metrics.values.items()]
        table((f"trainer at step {metrics.step}", *names), rows)
    other = {fact: pair for fact, pair in provenance.items() if pair[0] != pair[1]}
    if other:
        table(("made by", *names), [(fact, *pair) for fact, pair in other.items()])
    else:
        same = [fact for fact in provenance if not fact.startswith("run.")]
        same += ["settings"] if len(same) < len(provenance) else []
        say(f"both made by the same: {', '.join(same)}")
    if not comparison.tasks:
        say("no task is in both runs")
    else:
        shared = pluralize(len(comparison.tasks), "task")
        say(f"{shared} in both, {len(changed):,} with another mean reward")
        mean, low, high = interval
        say(f"mean difference {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")
    if changed:
        rows = [
            (
                *(task.task_id, task.a, task.b, f"{task.difference:+.3f}"),
                *(f"{task.low:+.2f} to {task.high:+.2f}", "flipped" if task.flipped else ""),
            )
            for task in changed[:limit]
        ]
        table(("task", *names, "difference", "95 % interval", ""), rows)
    return 0


def _provenance(stored: StoredRun) -> dict[str, str]:
    return provenance(stored, lambda sql: stored.sql(sql).to_pylist())
