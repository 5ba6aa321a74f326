"""What a run is doing while it goes on: bars, reward, tokens a second, what holds it up.

What is shown is in `snapshot.py`. On a terminal the picture changes 3 times a second, off it one
plain line comes every 10 s and at the end. These are counters for people to watch; the summary is
read back from the files.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from prorl.cli.output import note
from prorl.cli.snapshot import Snapshot, StageLoad, figures, plain, snapshot
from prorl.cli.waits import image_making_s
from prorl.deploy.running import POLL_S, in_thread
from prorl.types import Json, Stage

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
