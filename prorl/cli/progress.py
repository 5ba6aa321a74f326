"""Displays the progress of a run: bars, reward, tokens a second, what it waits for.

On a terminal the picture changes 3 times a second, off it one plain line comes every 10 s and at
the end. All of it is the gateway's answer to `GET /v1/runs/{run}`: counters for people to watch;
the summary is read back from the files.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prorl.cli.output import clean, note
from prorl.deploy.running import POLL_S
from prorl.pluralize import pluralize
from prorl.types import GroupState, Json, RolloutState, Stage

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.supervisor.service import Supervisor

LINE_EVERY_S = 10.0
KEPT = (GroupState.KEPT, GroupState.STALE, GroupState.DELIVERED, GroupState.COMMITTED)

SHORT_POLL_S = 0.05
"""Between the first looks, so that a short run does not wait for a look to end."""

Run = Mapping[str, Json]


def ended(run: Run) -> int:
    """Rollouts that are in a terminal state."""
    return sum(n for state, n in run["counts"].items() if RolloutState(state).terminal)


def passed(run: Run, stage: Stage) -> int:
    """Rollouts that have left a stage."""
    counts: Mapping[str, int] = run["counts"]
    done = ended(run)
    waiting = sum(counts.get(state, 0) for state in (RolloutState.QUEUED, RolloutState.LEASED))
    past_init = max(0, sum(counts.values()) - waiting)
    if stage is Stage.INIT:
        return past_init
    load = run["stages"].get(Stage.RUN) if stage is Stage.RUN else None
    return max(done, past_init - int(load["busy"] + load["queued"])) if load else done


def figures(run: Run, tokens_per_s: float, more: Iterable[str] = ()) -> str:
    """The line of figures below the bars, behind a command's own."""
    reward = "-" if run["mean_reward"] is None else f"{run['mean_reward']:.3f}"
    parts = [*more, f"reward {reward}", f"{tokens_per_s:,.0f} sampled tokens/s"]
    if lost := run["counts"].get(RolloutState.FAILED, 0):
        parts.append(f"failed {lost:,}")
    return " · ".join(parts)


def decided(run: Run) -> str:
    """Groups that were kept and dropped, with the reasons; empty before the first."""
    states, reasons = run.get("groups", {}), run.get("dropped", {})
    num_kept = sum(states.get(state, 0) for state in KEPT)
    dropped = states.get(GroupState.DROPPED, 0)
    if not num_kept + dropped:
        return ""
    most = sorted(reasons.items(), key=lambda item: -item[1])[:3]
    words = ", ".join(f"{number:,} {clean(reason)}" for reason, number in most)
    return f"groups kept {num_kept:,}, dropped {dropped:,}" + (f" ({words})" if words else "")


def speed(done: int, total: int, seconds: float, in_flight: float = 0) -> str:
    """Rollouts a second since the start, and how long the rest takes at that speed; not before as
    many are done as are in flight, since the first ones say nothing about the others.

    >>> speed(30, 90, 10.0), speed(0, 90, 10.0), speed(2, 90, 10.0, in_flight=32)
    ('3.0 rollouts/s, about 20 s left', '', '0.2 rollouts/s')
    """
    if not done or seconds <= 0:
        return ""
    rate, rest_s = done / seconds, (total - done) * seconds / done
    remaining = f", about {span(rest_s)} left" if in_flight <= done < total else ""
    return f"{rate:.1f} rollouts/s{remaining}"


def span(seconds: float) -> str:
    """A length of time, roughly.

    >>> [span(seconds) for seconds in (4.4, 600.0, 9000.0)]
    ['4 s', '10 min', '2.5 h']
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def waits_for(run: Run) -> str:
    """Returns why a run is not faster: the service's reason, or the last stage whose slots are all
    busy.
    """
    if run.get("stalled"):
        return f"waits: {clean(run['stalled'])}"
    for stage in reversed(Stage):
        load = run["stages"].get(stage)
        if load and load["queued"] and 0 < load.get("slots", 0) <= load["busy"]:
            return f"waits for {stage.upper()}: {pluralize(round(load['busy']), 'slot')}, all busy"
    return ""


class ProgressDisplay:
    """A run's progress: bars on a terminal, plain lines off it, nothing when `quiet`."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._began_s = self._printed_s = clock()
        self._printed_end = False
        self._ended_before: int | None = None
        """The rollouts that had ended at the first look, as a resumed run has them."""
        self._looks: deque[tuple[float, int]] = deque(maxlen=10)
        """The times, and how many tokens there were."""
        self._terminal = not quiet and sys.stderr.isatty()
        if self._terminal:
            from rich.console import Console, Group
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bars
            from rich.text import Text

            name, more = TextColumn("{task.description}"), TextColumn("{task.fields[more]}")
            self._bars = Bars(name, BarColumn(24), MofNCompleteColumn(), more)
            self._tasks = {
                stage: self._bars.add_task(stage.upper(), total=None, more="") for stage in Stage
            }
            self._text = Text("starting")
            picture = Group(self._bars, self._text)
            self._live = Live(picture, console=Console(stderr=True), auto_refresh=False)
            self._live.start()

    def update(self, run: Run, total: int, more: Iterable[str] = ()) -> None:
        """Show the newest answer; `total` rollouts will be asked for."""
        now_s, stages, over = self._clock(), run["stages"], run["state"] != "open"
        total = max(total, sum(run["counts"].values()))
        tokens = sum(int(load["tokens"]) for load in stages.values())
        in_flight = sum(load["busy"] for load in stages.values())
        if self._ended_before is None:
            self._ended_before = ended(run)
        since = ended(run) - self._ended_before
        fast = speed(since, total - self._ended_before, now_s - self._began_s, in_flight)
        self._looks.append((now_s, tokens))
        since_s, before = self._looks[0]
        line = figures(run, max(0, tokens - before) / max(now_s - since_s, 1e-3), more)
        if self._terminal:
            for stage, task in self._tasks.items():
                load = stages.get(stage, {"busy": 0, "queued": 0})
                queue = f" queue {load['queued']:.0f}" if load["queued"] else ""
                load_text = f"in flight {load['busy']:.0f}{queue}"
                self._bars.update(task, completed=passed(run, stage), total=total, more=load_text)
            below = (" · ".join(filter(None, (line, fast))), decided(run), waits_for(run))
            self._text.plain = "\n".join(filter(None, below))
            self._live.refresh()
        elif not self._quiet and (
            over != self._printed_end or now_s - self._printed_s >= LINE_EVERY_S
        ):
            flight = " ".join(f"{stage} {load['busy']:.0f}" for stage, load in stages.items())
            done = f"done {ended(run):,}/{total:,} · in flight {flight or 'none'}"
            note(
                " · ".join(
                    filter(
                        None, (f"{now_s - self._began_s:5.0f} s  {done}", line, fast, decided(run))
                    )
                )
            )
            self._printed_s, self._printed_end = now_s, over
            self._looks = deque(list(self._looks)[-1:], maxlen=10)

    def close(self) -> None:
        if self._terminal:
            self._live.stop()


async def follow(
    client: Client,
    running: Supervisor,
    run: str,
    total: int,
    *,
    quiet: bool = False,
    more: Callable[[Run], Iterable[str]] = lambda run: (),
) -> None:
    """Watch a run until it is finished; a gateway that is being restarted is waited for."""
    progress, is_noted, stalled, began_s = ProgressDisplay(quiet=quiet), False, "", time.monotonic()
    num_restarts = running.restarts
    try:
        while True:
            answer = await asyncio.to_thread(client.run, run)
            for death in running.deaths_since(num_restarts):
                note(f"{death}: started again; its rollouts go on or begin anew")
            num_restarts = running.restarts
            running.note_commits(int(answer["commits"]))
            progress.update(answer, total, more(answer))
            finished = answer["state"] != "open"
            if (why := answer.get("stalled", "")) != stalled and (why or not finished):
                stalled = why
                note(f"{run} is stalled: {clean(stalled)}" if stalled else f"{run} moves again")
            unread = _unread(answer) if finished else 0
            if finished and not unread:
                return
            if unread and not is_noted:
                is_noted = True
                groups = pluralize(unread, "group")
                note(f"done; waiting until the consumer has read and committed {groups}")
            await asyncio.sleep(min(POLL_S, max(SHORT_POLL_S, (time.monotonic() - began_s) / 20)))
    finally:
        progress.close()


def _unread(run: Run) -> int:
    """Kept groups that the primary consumer of a stream has not committed.

    It reads from this service, which must not leave before.
    """
    if run["config"]["delivery"] != "stream" or run["cancelled"]:
        return 0
    return (
        int(run["groups"]["kept"]) + int(run["delivered"]) - int(run["cursors"].get("primary", 0))
    )
