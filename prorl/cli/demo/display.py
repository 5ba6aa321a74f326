"""What `prorl demo` shows while it learns.

It shows phase, policy version, reward, DAPO's decisions, stages, tokens a second and CPU seconds.
All is made from what the gateway answers: figures for people to watch. The table at the end is read
back from the files (`report.py`).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prorl.cli.demo.recipe import Recipe
from prorl.cli.output import note
from prorl.cli.progress import Show, Snapshot, StageLoad, bottleneck, snapshot
from prorl.linux.procfs import cpu_s, descendants
from prorl.types import Json

PHASES = {"before": "held-out, before", "train": "training", "after": "held-out, after"}
BLOCKS = " ▁▂▃▄▅▆▇█"
RECENT = 256
"""Rewards that the shown reward is the mean of, about."""
LINE_EVERY_S = 10.0
METER_S = 2.0


@dataclass(slots=True, kw_only=True)
class Look:
    """One look at the run in hand."""

    phase: str
    at_s: float
    version: int
    kept: int
    dropped: int
    snapshot: Snapshot
    rewards: int
    reward_sum: float


class Meter:
    """CPU seconds of this process and everything below it, what has ended included.

    They are looked up every two seconds at most.
    """

    def __init__(self) -> None:
        self._at_s, self._found = -math.inf, 0.0

    def __call__(self) -> float:
        """The last figure that was looked up."""
        if time.monotonic() - self._at_s >= METER_S:
            self._at_s, self._found = time.monotonic(), cpu_seconds()
        return self._found


@dataclass(slots=True)
class Story:
    """What was seen so far, for rates and for the curve."""

    recipe: Recipe
    start_s: float = field(default_factory=time.monotonic)
    meter: Meter = field(default_factory=Meter)
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=400))
    curve: dict[int, float] = field(default_factory=dict)
    """Policy version -> mean reward of what it was seen to earn."""

    def see(self, phase: str, run: Json) -> Look:
        """Add an answer of the gateway."""
        groups = run["groups"]
        look = Look(
            phase=phase,
            at_s=time.monotonic(),
            version=run["version"],
            kept=groups["kept"] + groups["delivered"] + groups["acked"],
            dropped=groups["dropped"] + groups["stale"],
            snapshot=snapshot(run, self._total(phase), time.monotonic()),
            rewards=run["num_rewards"],
            reward_sum=(run["reward_mean"] or 0.0) * run["num_rewards"],
        )
        if self.looks and self.looks[-1].phase != phase:
            self.looks.clear()
        self.looks.append(look)
        if phase == "train" and (reward := self.reward()) is not None:
            self.curve[look.version] = reward
        return look

    def _total(self, phase: str) -> int:
        recipe = self.recipe
        return (
            recipe.steps * recipe.groups_per_step * recipe.n
            if phase == "train"
            else 2 * (recipe.heldout + recipe.greedy)
        )

    def reward(self) -> float | None:
        """Mean of about the last `RECENT` rewards."""
        last = self.looks[-1]
        before = next(
            (look for look in reversed(self.looks) if last.rewards - look.rewards >= RECENT),
            self.looks[0],
        )
        first = before if last.rewards > before.rewards else None
        if first is None or first is self.looks[0]:
            return last.reward_sum / last.rewards if last.rewards else None
        return (last.reward_sum - first.reward_sum) / (last.rewards - first.rewards)

    def tokens_per_s(self) -> float:
        """Over the last few seconds."""
        last = self.looks[-1]
        first = next(
            (look for look in reversed(self.looks) if last.at_s - look.at_s >= 5.0), self.looks[0]
        )
        return max(0, last.snapshot.tokens - first.snapshot.tokens) / max(
            last.at_s - first.at_s, 0.1
        )

    def figures(self) -> list[str]:
        """The last look in words."""
        last, reward = self.looks[-1], self.reward()
        step = (
            f"step {min(last.version, self.recipe.steps)}/{self.recipe.steps}"
            if last.phase == "train"
            else "evaluation"
        )
        parts = [
            step,
            f"reward {'-' if reward is None else f'{reward:.2f}'}",
            f"{self.tokens_per_s():,.0f} tokens/s",
        ]
        if last.phase == "train":
            parts.append(f"DAPO kept {last.kept} dropped {last.dropped}")
            parts.append(f"policy v{last.version}")
        slow = bottleneck(last.snapshot.pools)
        return [*parts, f"busiest {slow.value.upper()}"] if slow else parts


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


def cpu_seconds() -> float:
    """CPU seconds of this process and everything below it, what has ended included."""
    return sum(cpu_s(pid) for pid in (os.getpid(), *descendants(os.getpid())))


def _load(pool: StageLoad) -> str:
    return f"{pool.busy}/{pool.slots}" + (f" · {pool.queued} queued" if pool.queued else "")
