"""The picture of `prorl bench learning`: one panel a set, one curve a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from prorl.bench.learning_study import GOAL, Study
from prorl.tasks.generated import SETS
from prorl.types import Json

LEGEND = (
    "lines: training · dots: held-out tasks, 95 % Wilson · blue, orange: two checkpoints ·"
    " grey: shuffled rewards"
)


def draw(heldout: pa.Table, curves: pa.Table, path: Path) -> None:
    """One panel a set: every study's reward per version, its held-out shares at both ends.

    The control is dashed and grey.
    """
    from matplotlib.figure import Figure as Plot

    figure = Plot(figsize=(9, 3.6), dpi=100, layout="constrained")
    points, ends = curves.to_pylist(), heldout.to_pylist()
    last = max(point["version"] for point in points)
    studies = dict.fromkeys(Study(row["checkpoint"], row["seed"], row["control"]) for row in ends)
    for axes, name in zip(figure.subplots(1, len(SETS), sharey=True), SETS, strict=True):
        for study in studies:
            _draw_curve(axes, study, _rows_of(points, study, name))
            _draw_ends(axes, study, _rows_of(ends, study, name), last)
        axes.set(title=name, xlabel="policy version", ylim=(0, 1))
        axes.axhline(GOAL, color="black", linewidth=0.5)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean reward, temperature 1")
    figure.suptitle(LEGEND, fontsize=10)
    figure.savefig(path)


def _color(study: Study) -> str:
    return "grey" if study.control else ("tab:blue", "tab:orange")[study.checkpoint]


def _draw_curve(axes: Any, study: Study, points: list[dict[str, Json]]) -> None:
    axes.plot(
        [point["version"] for point in points],
        [point["reward"] for point in points],
        color=_color(study),
        linestyle=":" if study.control else "-",
        linewidth=1,
        alpha=0.8,
    )


def _draw_ends(axes: Any, study: Study, ends: list[dict[str, Json]], last: int) -> None:
    """Held-out shares with their intervals, beside the curve's first and last version."""
    for row in ends:
        if row["mode"] == "sampled":
            x = -1 if row["when"] == "before" else last + 1
            error = [[row["value"] - row["low"]], [row["high"] - row["value"]]]
            style = {"fmt": "o", "markersize": 3, "capsize": 2, "color": _color(study)}
            axes.errorbar([x], [row["value"]], yerr=error, **style)


def _rows_of(rows: list[dict[str, Json]], study: Study, name: str) -> list[dict[str, Json]]:
    return [
        row
        for row in rows
        if (row["checkpoint"], row["seed"], row["control"], row["set"]) == (*study, name)
    ]
