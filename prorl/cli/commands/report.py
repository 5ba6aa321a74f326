"""`prorl report`: a stored run as one HTML file that needs nothing else, or two side by side."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prorl.analysis.analyses import ANALYSES, Analysis
from prorl.analysis.opened import Runs, open_runs
from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import open_to_write, say, say_json, table
from prorl.cli.runs import run_directory
from prorl.cli.summary import lines, summarise
from prorl.errors import UserError
from prorl.types import Json

WIDTH, HEIGHT, PAD = 640, 180, 36
STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em;color:#222}pre{background:#f6f6f6;"
    "padding:1em}table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px;text-align:"
    "left}svg{background:#fafafa}"
)


FIGURES = (
    *("rollouts", "groups", "valid", "rewarded", "mean_reward", "model_calls", "tool_calls"),
    *("tokens", "sampled_tokens", "bytes"),
)
"""Of two runs side by side."""
TASKS = "select task_id, avg(reward) as reward from rollouts where valid group by 1"


class Point(NamedTuple):
    """A place in the picture, in its units; y grows downwards."""

    x: float
    y: float


def report(
    run: StoredName,
    other: str = "",
    /,
    *,
    out: Path | None = None,
    only: str = "",
    limit: int = 20,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Ready analyses of a run with a picture each; with OTHER, what is other in that run.

    Reward by version, pass@k, the way from accepted to delivered groups, staleness, failures,
    slowest tasks, reward-hack suspects ...

    Example: prorl report my-run --out my-run.html

    Example: prorl report before after

    Parameters
    ----------
    other
        A second run: figures side by side, and tasks by how far their mean reward moved.
    limit
        How many tasks.
    out
        HTML file. Default: RUN.html here.
    only
        One analysis, printed as rows: reward, pass, funnel, dropped, staleness, drift, tools,
        length, slow, stragglers, failures, suspects, reuse, cost. x and y are what its picture
        shows: a value, and how much or how many of it.
    """
    if other:
        if out or only:
            raise UserError("--out or --only with two runs", "two runs alone, or one with options")
        return _compare((run, other), root, limit, json=json)
    runs = open_runs(run_directory(run, root))
    if only and only not in ANALYSES:
        raise UserError(f"no analysis {only!r}", f"one of {', '.join(ANALYSES)}")
    chosen = {only: ANALYSES[only]} if only else ANALYSES
    found = {name: runs.sql(asked.sql).rows() for name, asked in chosen.items()}
    if json:
        say_json(found)
    elif only:
        rows = found[only]
        table(list(rows[0]) if rows else ("x", "y"), (list(row.values()) for row in rows))
    else:
        path = out or Path(f"{runs.runs[0].run_id}.html")
        with open_to_write(path) as file:
            file.write("\n".join(page(runs, found)))
        say(f"{runs.runs[0].run_id}: {len(found)} analyses in {path}")
    return 0


def _compare(names: tuple[str, str], root: str, limit: int, *, json: bool) -> int:
    places = [run_directory(name, root) for name in names]
    first, second = (summarise(place) for place in places)
    figures = {name: [first[name], second[name]] for name in FIGURES}
    before, after = (
        {row["task_id"]: row["reward"] for row in open_runs(place).sql(TASKS).rows()}
        for place in places
    )
    moved = moved_tasks(before, after)
    num_shared = len(before.keys() & after.keys())
    if json:
        say_json({"figures": figures, "shared_tasks": num_shared, "moved": moved[:limit]})
        return 0
    table(("", *names), [(name, *pair) for name, pair in figures.items()])
    say(f"{num_shared:,} tasks in both, {len(moved):,} with another mean reward")
    if moved:
        table(("task", *names), [tuple(row.values()) for row in moved[:limit]])
    return 0


def moved_tasks(a: Mapping[str, float], b: Mapping[str, float]) -> list[dict[str, Json]]:
    """Tasks of both whose reward is another one, the largest move first.

    >>> moved_tasks({"t": 0.5, "u": 1.0, "v": 0.0}, {"t": 0.25, "u": 0.0, "v": 0.0})[0]
    {'task_id': 'u', 'a': 1.0, 'b': 0.0}
    """
    shared = sorted(a.keys() & b.keys(), key=lambda task: -abs(b[task] - a[task]))
    return [{"task_id": task, "a": a[task], "b": b[task]} for task in shared if a[task] != b[task]]


def page(runs: Runs, found: dict[str, list[dict[str, Json]]]) -> Iterator[str]:
    """The HTML. Whatever a task or a policy wrote is escaped."""
    (run,) = runs.runs
    title = html.escape(run.run_id)
    yield f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    yield f"<h1>{title}</h1><pre>"
    yield html.escape("\n".join(lines(summarise(run.directory.where))))
    yield "</pre>"
    for name, rows in found.items():
        asked = ANALYSES[name]
        yield f"<h2>{html.escape(asked.title)}</h2>"
        yield svg(asked, rows) if rows else "<p>nothing</p>"
        yield f"<details><summary>{len(rows)} rows</summary>{_table(rows)}"
        yield f"<pre>{html.escape(asked.sql.strip())}</pre></details>"


def _table(rows: Sequence[dict[str, Json]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_short(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows[:200]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _short(value: Json) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]


def svg(asked: Analysis, rows: Sequence[dict[str, Json]]) -> str:
    """Bars or a line over `x` and `y`; values from 0 (or their least) to their greatest."""
    values = [float(row["y"] or 0.0) for row in rows]
    low, high = min(0.0, *values), max(0.0, *values)
    span, step = (high - low) or 1.0, (WIDTH - 2 * PAD) / len(rows)

    def up(value: float) -> float:
        return HEIGHT - PAD - (value - low) / span * (HEIGHT - 2 * PAD)

    middles = [PAD + (i + 0.5) * step for i in range(len(rows))]
    points = [Point(x, up(value)) for x, value in zip(middles, values, strict=True)]
    shapes = _polyline(points) if asked.picture == "line" else _bars(points, step, up(0))
    ends = "".join(
        f'<text x="2" y="{up(v):.1f}" font-size="10">{_short(v)}</text>' for v in {low, high}
    )
    labels = _labels(middles, [_short(row["x"]) for row in rows])
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{shapes}{labels}{ends}</svg>'


def _polyline(points: Sequence[Point]) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="#2563eb" stroke-width="2"/>'


def _bars(points: Sequence[Point], step: float, zero: float) -> str:
    """A bar from the height of zero to each point, four fifths of a step wide."""
    return "".join(
        f'<rect x="{x - step * 0.4:.1f}" y="{min(y, zero):.1f}" width="{step * 0.8:.1f}"'
        f' height="{abs(y - zero):.1f}" fill="#2563eb"/>'
        for x, y in points
    )


def _labels(middles: Sequence[float], texts: Sequence[str]) -> str:
    """At most about twelve of the texts below the axis."""
    every = max(1, len(texts) // 12)
    return "".join(
        f'<text x="{x:.1f}" y="{HEIGHT - 12}" font-size="10" text-anchor="middle">'
        f"{html.escape(text[:14])}</text>"
        for x, text in list(zip(middles, texts, strict=True))[::every]
    )
