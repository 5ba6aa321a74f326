"""The curve of a demo as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prorl.types import Json

if TYPE_CHECKING:
    pass


def draw(found: dict[str, Json], path: Path) -> bool:
    """The reward of what each version sampled, and held-out reward at both ends, as a PNG.

    False without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.2, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    last = max((row["version"] for row in found["curve"]), default=0)
    for color, row in zip(("tab:blue", "tab:orange", "tab:green"), found["sets"], strict=False):
        points = [point for point in found["curve"] if point["set"] == row["set"]]
        versions, rewards = ([point[key] for point in points] for key in ("version", "reward"))
        axes.plot(versions, rewards, color=color, label=f"{row['set']}, training")
        for x, when in ((-0.8, "before"), (last + 0.8, "after")):
            if held := row[f"sampled_{when}"]:
                error = [[held["value"] - held["low"]], [held["high"] - held["value"]]]
                axes.errorbar([x], [held["value"]], yerr=error, fmt="o", color=color, capsize=3)
    title = "prorl demo: sampled at temperature 1; dots: held-out tasks"
    axes.set(xlabel="policy version", ylabel="mean reward", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    return True
