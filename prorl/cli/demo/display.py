"""What `prorl demo` shows while it learns.

It shows phase, policy version, reward, DAPO's decisions, stages, tokens a second and CPU seconds,
as `story.py` has them: figures for people to watch. The table at the end is read back from the
files (`report.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from prorl.cli.demo.recipe import Recipe
from prorl.cli.demo.story import Story
from prorl.cli.output import note
from prorl.cli.progress import Show
from prorl.cli.snapshot import StageLoad
from prorl.types import Json

PHASES = {"before": "held-out, before", "train": "training", "after": "held-out, after"}
BLOCKS = " ▁▂▃▄▅▆▇█"
LINE_EVERY_S = 10.0


class StoryDisplay(Protocol):
    """Shows the demo as a story, one line at a time."""

    def __call__(self, phase: str, run: Json) -> None: ...

    def close(self) -> None:
        """Give the terminal back."""


class StoryLines:
    """A line every 10 s, and one whenever a phase begins or ends."""

    def __init__(self, story: Story) -> None:
        self._story, self._shown = story, 0.0

    def __call__(self, phase: str, run: Json) -> None:
        """Print a line when it is time."""
        fresh = not self._story.looks or self._story.looks[-1].phase != phase
        look = self._story.see(phase, run)
        if fresh or look.snapshot.finished or look.at_s - self._shown >= LINE_EVERY_S:
            self._shown = look.at_s
            spent = f"{look.at_s - self._story.start_s:5.0f} s · {self._story.meter():4.0f} CPU s"
            note(
                f"{spent}  {PHASES[phase]:<16} done {look.snapshot.ended:,} ·"
                f" {' · '.join(self._story.figures())}"
            )

    def close(self) -> None:
        """Nothing to give back."""


class StoryLive:
    """Bars, the curve so far, and a line of figures, on a terminal."""

    def __init__(self, story: Story) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._story, self._text = story, Text("starting")
        self._live = Live(self._text, console=Console(stderr=True), auto_refresh=False)
        self._live.start()

    def __call__(self, phase: str, run: Json) -> None:
        """Redraw."""
        look = self._story.see(phase, run)
        spent = f"{look.at_s - self._story.start_s:.0f} s · {self._story.meter():.0f} CPU s"
        done = (
            look.version / self._story.recipe.steps
            if phase == "train"
            else look.snapshot.ended / max(look.snapshot.total, 1)
        )
        lines = [
            f" {PHASES[phase]:<17}{bar(done)}  {spent}",
            f" {' · '.join(self._story.figures())}",
            *(
                f" {stage.value.upper():<5} {bar(pool.busy_share, 20)} {_load(pool)}"
                for stage, pool in look.snapshot.pools.items()
            ),
            f" reward by version  {spark(self._story.curve)}",
        ]
        self._text.plain = "\n".join(lines)
        self._live.refresh()

    def close(self) -> None:
        """Leave the last picture on the screen."""
        self._live.stop()


class SilentDisplay:
    """Shows nothing, for `--json`."""

    def __call__(self, phase: str, run: Json) -> None: ...

    def close(self) -> None:
        """Nothing to give back."""


def display(recipe: Recipe, show: Show) -> StoryDisplay:
    """What suits `show` and the terminal."""
    if show is Show.NOTHING:
        return SilentDisplay()
    make: Callable[[Story], StoryDisplay] = StoryLive if sys.stderr.isatty() else StoryLines
    return make(Story(recipe))


def bar(share: float, width: int = 40) -> str:
    """A bar of block characters for a share between 0 and 1.

    >>> bar(0.5, 8)
    '████░░░░'
    """
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def spark(curve: dict[int, float]) -> str:
    """A curve of shares in one line, one block a version, with its last value.

    >>> spark({0: 0.0, 1: 0.5, 2: 1.0})
    ' ▄█ 1.00'
    """
    if not curve:
        return ""
    values = [curve[version] for version in sorted(curve)][-60:]
    return (
        "".join(BLOCKS[round(max(0.0, min(1.0, value)) * (len(BLOCKS) - 1))] for value in values)
        + f" {values[-1]:.2f}"
    )


def _load(pool: StageLoad) -> str:
    return f"{pool.busy}/{pool.slots}" + (f" · {pool.queued} queued" if pool.queued else "")
