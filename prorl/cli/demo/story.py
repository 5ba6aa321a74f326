"""What was seen of a demo so far: figures of the last looks, and the curve."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass, field

from prorl.cli.demo.recipe import Recipe
from prorl.cli.snapshot import Snapshot, bottleneck, snapshot
from prorl.linux.procfs import cpu_s, descendants
from prorl.types import Json

RECENT = 256
"""Rewards that the shown reward is the mean of, about."""


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


def cpu_seconds() -> float:
    """CPU seconds of this process and everything below it, what has ended included."""
    return sum(cpu_s(pid) for pid in (os.getpid(), *descendants(os.getpid())))
