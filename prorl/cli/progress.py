"""What a run is doing while it goes on: bars, reward, tokens a second, what holds it up.

`Snapshot` is made from what the gateway answers; everything after it is pure. On a terminal the
picture changes 3 times a second, off it one plain line comes every 10 s and at the end. These are
counters for people to watch; the summary is read back from the files.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from prorl.cli.output import note
from prorl.cli.waits import image_making_s, image_words
from prorl.deploy.running import POLL_S, in_thread
from prorl.types import Json, RolloutState, Stage

if TYPE_CHECKING:
    from rich.progress import Progress

    from prorl.client.client import Client
    from prorl.deploy.running import Running

LINE_EVERY_S = 10.0


class Show(StrEnum):
    """How much of its progress a command shows."""

    AUTO = "auto"
    """Bars on a terminal, plain lines off it."""
    NOTHING = "nothing"


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


class Display(Protocol):
    """Where snapshots of a run's progress are shown."""

    def update(self, now: Snapshot) -> None:
        """Show the newest snapshot."""

    def close(self) -> None:
        """Give the terminal back."""


class Plain:
    """A line every 10 s, and one at the end."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._first: Snapshot | None = None
        self._shown: Snapshot | None = None

    def update(self, now: Snapshot) -> None:
        """Print a line when it is time."""
        if self._first is None or self._shown is None:
            self._first = self._shown = now
        elif now.finished or now.at_s - self._shown.at_s >= self._every_s:
            note(plain(now, self._shown, self._first.at_s))
            self._shown = now

    def close(self) -> None:
        """Nothing to give back."""


class Bars:
    """A bar per stage and a line of figures, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        self._progress = _bars()
        self._tasks = {
            stage: self._progress.add_task(stage.upper(), total=None, more="") for stage in Stage
        }
        self._text = Text("starting")
        self._live = Live(
            Group(self._progress, self._text), console=Console(stderr=True), auto_refresh=False
        )
        self._shown: list[Snapshot] = []
        self._live.start()

    def update(self, now: Snapshot) -> None:
        """Redraw; rates are over the last few seconds."""
        self._shown = [*self._shown[-10:], now]
        for stage, task in self._tasks.items():
            pool = now.pools.get(stage, StageLoad())
            more = f"in flight {pool.busy}" + (f" queue {pool.queued}" if pool.queued else "")
            self._progress.update(task, completed=now.passed(stage), total=now.total, more=more)
        self._text.plain = f" {figures(now, self._shown[0])}"
        self._live.refresh()

    def close(self) -> None:
        """Leave the last picture on the screen."""
        self._live.stop()


def _bars() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    name, more = TextColumn("{task.description:<5}"), TextColumn("{task.fields[more]}")
    return Progress(name, BarColumn(40), MofNCompleteColumn(), more)


class _Nothing:
    def update(self, now: Snapshot) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to give back."""


def display(show: Show) -> Display:
    """What suits `show` and the terminal."""
    if show is Show.NOTHING:
        return _Nothing()
    return Bars() if sys.stderr.isatty() else Plain()


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


def _image_s(run: Mapping[str, Json], running: Running) -> float:
    """For how long an image has been in the making, while INIT has work; 0 otherwise."""
    busy = run["stages"].get(Stage.INIT, {}).get("busy")
    return image_making_s(running.config.sandbox.images) if busy else 0.0


def _unread(run: Mapping[str, Json]) -> int:
    """Kept groups that the primary consumer of a stream has not committed.

    It reads from this service, which must not leave before.
    """
    if run["config"]["delivery"] != "stream" or run["cancelled"]:
        return 0
    return (
        int(run["groups"]["kept"]) + int(run["delivered"]) - int(run["cursors"].get("primary", 0))
    )


async def follow(client: Client, running: Running, run: str, total: int, show: Show) -> Snapshot:
    """Watch a run until it is finished; a gateway that is being restarted is waited for."""
    shown, told = display(show), False
    try:
        while True:
            answer = await in_thread(client.run, run)
            now = snapshot(answer, total, time.monotonic(), _image_s(answer, running))
            running.note_commits(int(answer["commits"]))
            shown.update(now)
            unread = _unread(answer) if now.finished else 0
            if now.finished and not unread:
                return now
            if unread and not told:
                told = True
                note(f"done; waiting until the consumer has read and committed {unread} groups")
            await asyncio.sleep(POLL_S)
    finally:
        shown.close()
