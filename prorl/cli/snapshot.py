"""One look at a run: how far each stage is, and which one holds the others up.

A `Snapshot` is made from what the gateway answers; everything here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prorl.cli.waits import image_words
from prorl.types import Json, RolloutState, Stage

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage, all its workers together."""

    slots: int = 0
    busy: int = 0
    queued: int = 0
    tokens: int = 0

    @property
    def busy_share(self) -> float:
        """The share of its slots that a stage uses, 0 to 1."""
        return self.busy / self.slots if self.slots else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at a run."""

    at_s: float
    total: int
    """Rollouts that will be asked for."""
    states: Mapping[str, int]
    mean_reward: float | None
    pools: Mapping[Stage, StageLoad]
    finished: bool
    image_s: float = 0.0
    """For so long an image has been in the making while INIT had work; 0 = none is."""

    @property
    def ended(self) -> int:
        """Rollouts whose fate is decided."""
        return sum(count for state, count in self.states.items() if RolloutState(state).terminal)

    @property
    def tokens(self) -> int:
        """How many tokens the run has sampled so far."""
        return sum(pool.tokens for pool in self.pools.values())

    def passed(self, stage: Stage) -> int:
        """Rollouts that have left a stage behind."""
        waiting = sum(
            self.states.get(state, 0) for state in (RolloutState.QUEUED, RolloutState.LEASED)
        )
        past_init = max(0, sum(self.states.values()) - waiting)
        if stage is Stage.INIT:
            return past_init
        if stage is Stage.RUN:
            run = self.pools.get(Stage.RUN, StageLoad())
            return max(self.ended, past_init - run.busy - run.queued)
        return self.ended


def bottleneck(pools: Mapping[Stage, StageLoad]) -> Stage | None:
    """The stage that holds the others up: the busiest one; None when all have room.

    Between equals the longer queue decides.

    >>> pools = {Stage.INIT: StageLoad(slots=4, busy=1), Stage.EVAL: StageLoad(slots=4, busy=4)}
    >>> pools[Stage.RUN] = StageLoad(slots=8, busy=8, queued=3)
    >>> bottleneck(pools).value
    'run'
    """
    busiest = max(
        pools,
        key=lambda stage: (round(pools[stage].busy_share, 1), pools[stage].queued),
        default=None,
    )
    return busiest if busiest is not None and pools[busiest].busy_share >= 0.5 else None


def figures(now: Snapshot, before: Snapshot) -> str:
    """The line of figures below the bars; rates since `before`."""
    span_s = max(now.at_s - before.at_s, 1e-3)
    reward = "-" if now.mean_reward is None else f"{now.mean_reward:.3f}"
    parts = [f"reward {reward}", f"{max(0, now.tokens - before.tokens) / span_s:,.0f} tokens/s"]
    lost = now.states.get(RolloutState.FAILED, 0)
    if lost:
        parts.append(f"failed {lost:,}")
    if now.image_s:
        parts.append(image_words(now.image_s))
    slow = bottleneck(now.pools)
    if slow is not None:
        pool = now.pools[slow]
        parts.append(
            f"{slow.upper()} is the bottleneck ({pool.busy_share:.0%} busy, {pool.queued} queued)"
        )
    return " · ".join(parts)


def plain(now: Snapshot, before: Snapshot, start_s: float) -> str:
    """One line off a terminal."""
    flight = " ".join(f"{stage.value} {pool.busy}" for stage, pool in now.pools.items())
    return (
        f"{now.at_s - start_s:5.0f} s  done {now.ended:,}/{now.total:,} · in flight"
        f" {flight or 'none'} · {figures(now, before)}"
    )


def snapshot(run: Mapping[str, Json], total: int, at_s: float, image_s: float = 0.0) -> Snapshot:
    """Make a snapshot of the gateway's answer to `GET /v1/runs/{run}`."""
    gauges = run["stages"]
    pools = {
        stage: StageLoad(
            **{name: int(gauges[stage][name]) for name in ("slots", "busy", "queued", "tokens")}
        )
        for stage in Stage
        if stage in gauges
    }
    return Snapshot(
        at_s=at_s,
        total=max(total, sum(run["counts"].values())),
        states=run["counts"],
        mean_reward=run["reward_mean"],
        pools=pools,
        finished=run["state"] != "open",
        image_s=image_s,
    )
