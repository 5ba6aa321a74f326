"""What a run is doing while it goes on: bars, reward, tokens a second, what holds it up.

On a terminal the picture changes 3 times a second, off it one plain line comes every 10 s and at
the end. These are counters for people to watch; the summary is read back from the files. A
`Snapshot` is made from what the gateway answers; what is told of it is pure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prorl.cli.output import clean, note
from prorl.cli.waits import image_making_s, image_words
from prorl.deploy.running import POLL_S, in_thread
from prorl.types import Json, RolloutState, Stage

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.supervisor.service import Supervisor

LINE_EVERY_S = 10.0


class StageLoad(NamedTuple):
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
    stuck: str = ""
    """Why nothing moves, as the gateway says it."""

    @property
    def ended(self) -> int:
        return sum(count for state, count in self.states.items() if RolloutState(state).terminal)

    @property
    def tokens(self) -> int:
        return sum(pool.tokens for pool in self.pools.values())

    def passed(self, stage: Stage) -> int:
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


def snapshot(run: Mapping[str, Json], total: int, at_s: float, image_s: float = 0.0) -> Snapshot:
    """Make a snapshot of the gateway's answer to `GET /v1/runs/{run}`."""
    gauges = run["stages"]
    return Snapshot(
        at_s=at_s,
        total=max(total, sum(run["counts"].values())),
        states=run["counts"],
        mean_reward=run["reward_mean"],
        pools={
            stage: StageLoad(*(int(gauges[stage][name]) for name in StageLoad._fields))
            for stage in Stage
            if stage in gauges
        },
        finished=run["state"] != "open",
        image_s=image_s,
        stuck=run.get("stuck", ""),
    )


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


def figures(now: Snapshot, before: Snapshot, more: Iterable[str] = ()) -> str:
    """The line of figures below the bars, with a command's own; rates since `before`."""
    span_s = max(now.at_s - before.at_s, 1e-3)
    reward = "-" if now.mean_reward is None else f"{now.mean_reward:.3f}"
    rate = f"{max(0, now.tokens - before.tokens) / span_s:,.0f} tokens/s"
    parts = [*more, f"reward {reward}", rate]
    if lost := now.states.get(RolloutState.FAILED, 0):
        parts.append(f"failed {lost:,}")
    if now.image_s:
        parts.append(image_words(now.image_s))
    slow = bottleneck(now.pools)
    if slow is not None:
        pool = now.pools[slow]
        parts.append(
            f"{slow.upper()} is the bottleneck ({pool.busy_share:.0%} busy, {pool.queued} queued)"
        )
    if now.stuck:
        parts.append(f"stuck: {clean(now.stuck)}")
    return " · ".join(parts)


def plain(now: Snapshot, before: Snapshot, start_s: float, more: Iterable[str] = ()) -> str:
    """One line off a terminal."""
    flight = " ".join(f"{stage.value} {pool.busy}" for stage, pool in now.pools.items())
    return (
        f"{now.at_s - start_s:5.0f} s  done {now.ended:,}/{now.total:,} · in flight"
        f" {flight or 'none'} · {figures(now, before, more)}"
    )


class Bars:
    """On a terminal: bars by name, and lines of text below them."""

    def __init__(self, names: Iterable[str]) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        name, more = TextColumn("{task.description}"), TextColumn("{task.fields[more]}")
        self._bars = Progress(name, BarColumn(40), MofNCompleteColumn(), more)
        self._tasks = {each: self._bars.add_task(each, total=None, more="") for each in names}
        self._text = Text("starting")
        self._live = Live(
            Group(self._bars, self._text), console=Console(stderr=True), auto_refresh=False
        )
        self._live.start()

    def set(self, name: str, done: int, total: int, more: str) -> None:
        """How far a bar is."""
        self._bars.update(self._tasks[name], completed=done, total=total, more=more)

    def show(self, text: str) -> None:
        """Redraw, with these lines below the bars."""
        self._text.plain = text
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()


class Progress:
    """A run's progress: bars on a terminal, plain lines off it, nothing when `quiet`."""

    def __init__(self, *, quiet: bool = False, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._quiet = quiet
        terminal = not quiet and sys.stderr.isatty()
        self._bars = Bars(stage.upper() for stage in Stage) if terminal else None
        self._recent: deque[Snapshot] = deque(maxlen=10)
        self._first: Snapshot | None = None
        self._told: Snapshot | None = None

    def update(self, now: Snapshot, more: Iterable[str] = ()) -> None:
        """Show the newest snapshot; rates on a terminal are over the last few seconds.

        `more`: figures of the command's own.
        """
        self._first, self._told = self._first or now, self._told or now
        if self._bars is not None:
            self._recent.append(now)
            for stage in Stage:
                pool = now.pools.get(stage, StageLoad())
                more = f"in flight {pool.busy}" + (f" queue {pool.queued}" if pool.queued else "")
                self._bars.set(stage.upper(), now.passed(stage), now.total, more)
            self._bars.show(f" {figures(now, self._recent[0], more)}")
        elif not self._quiet and (now.finished or now.at_s - self._told.at_s >= self._every_s):
            note(plain(now, self._told, self._first.at_s, more))
            self._told = now

    def close(self) -> None:
        if self._bars is not None:
            self._bars.close()


async def follow(
    client: Client, running: Supervisor, run: str, total: int, *, quiet: bool = False
) -> Snapshot:
    """Watch a run until it is finished; a gateway that is being restarted is waited for."""
    shown, told, stuck = Progress(quiet=quiet), False, ""
    try:
        while True:
            answer = await in_thread(client.run, run)
            working = answer["stages"].get(Stage.INIT, {}).get("busy")
            image_s = image_making_s(running.config.sandbox.images) if working else 0.0
            now = snapshot(answer, total, time.monotonic(), image_s)
            running.note_commits(int(answer["commits"]))
            shown.update(now)
            if now.stuck != stuck:
                stuck = now.stuck
                note(f"{run} is stuck: {clean(stuck)}" if stuck else f"{run} moves again")
            unread = _unread(answer) if now.finished else 0
            if now.finished and not unread:
                return now
            if unread and not told:
                told = True
                note(f"done; waiting until the consumer has read and committed {unread} groups")
            await asyncio.sleep(POLL_S)
    finally:
        shown.close()


def _unread(run: Mapping[str, Json]) -> int:
    """Kept groups that the primary consumer of a stream has not committed.

    It reads from this service, which must not leave before.
    """
    if run["config"]["delivery"] != "stream" or run["cancelled"]:
        return 0
    return (
        int(run["groups"]["kept"]) + int(run["delivered"]) - int(run["cursors"].get("primary", 0))
    )
