"""The trackers that open runs ask for (`run.track`), each a process beside the service.

A tracker that fails costs the service nothing: it is started again a minute later, while its run is
open, and people are told once. Its log is ROOT/logs/track-RUN.log, what it writes lies in
ROOT/tracked.

The end of its standard input is what has a tracker look a last time and end: a signal that came
while it starts would kill it, and the curves of a short run would be lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress

from prorl.config.trackers import OTLP
from prorl.supervisor.service import Supervisor
from prorl.waits import wait_limit_s

AGAIN_S = 60.0
"""Before one that failed is started again: who is away for a moment must not fill a log."""

LAST_S = wait_limit_s("tracker.last")


class RunTrackers:
    """Holds one task for each run that is tracked, as long as the service lives."""

    def __init__(self, running: Supervisor, report: Callable[[str], None]) -> None:
        self._config, self._report = running.config, report
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._closing = asyncio.Event()

    def follow(self, run: str, names: Collection[str]) -> None:
        """Start the trackers of a run. Idempotent."""
        if run in self._tasks or not names:
            return
        curves = [name for name in names if name != OTLP]
        self._tasks[run] = [
            asyncio.create_task(self._keep(run, group), name=f"track {run}")
            for group in (curves, [OTLP] if OTLP in names else [])
            if group
        ]
        self._report(f"tracking {run} by {', '.join(names)}: {self._config.root / 'tracked'}")

    async def _keep(self, run: str, names: list[str]) -> None:
        root, is_reported = self._config.root, False
        key = f"{run} {' '.join(names)}"
        options = {"--folder": root / "tracked", "--service": root}
        words = [str(word) for option in options.items() for word in option]
        log = root / "logs" / f"track-{run}{'-otlp' if names == [OTLP] else ''}.log"
        while True:
            with log.open("ab") as written:
                process = self._processes[key] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "prorl.analysis.tracking"),
                    *(self._config.run_directory(run), "--to", *names, *words),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=written,
                    stderr=written,
                    process_group=0,  # Ctrl-C is the service's to hear
                )
            status = await self._status_of(process)
            if status == 0 or self._closing.is_set():
                return
            if not is_reported:
                is_reported = True
                ended = f"the tracker of {run} ended with exit status {status}"
                self._report(f"{ended}; it is started again each {AGAIN_S:g} s; log: {log}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), AGAIN_S)
                return

    async def _status_of(self, process: asyncio.subprocess.Process) -> int:
        """Returns the exit status of a process that is told when all trackers shall end."""
        assert process.stdin is not None
        closing = asyncio.create_task(self._closing.wait())
        exiting = asyncio.create_task(process.wait())
        await asyncio.wait((closing, exiting), return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        process.stdin.close()
        return await exiting

    async def close(self) -> None:
        """Have all send what is stored by now, and end."""
        self._closing.set()
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_S)
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def run_trackers(
    running: Supervisor, report: Callable[[str], None]
) -> AsyncIterator[RunTrackers]:
    """Trackers for the length of a block, which send the rest at its end."""
    trackers = RunTrackers(running, report)
    try:
        yield trackers
    finally:
        await trackers.close()
