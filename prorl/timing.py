"""One clock that knows when we ourselves were stopped; how long silence is no death.

    heartbeats -> silence -> a dead stream -> grace -> given up

Silence is the age of the last heartbeat on the listener's own clock. `ActiveLoop` is an event loop
whose clock leaves out the time in which it did not turn (SIGSTOP, `docker pause`, a laptop's lid, a
callback that computed for seconds): whoever was stopped gives that time back to every deadline,
time-out and silence that it measures with `now`, and so charges it to nobody.

Not promised: that another process's clock stopped as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from prorl.waits import wait_limit_s

ResultT = TypeVar("ResultT")

BEAT_S: Final = wait_limit_s("process.beat")
HEARTBEAT_S: Final = wait_limit_s("worker.beat")
FAR_HEARTBEAT_S: Final = wait_limit_s("worker.far_beat")

PROCESS_SILENCE_S: Final = wait_limit_s("process.silence")
WORKER_SILENCE_S: Final = wait_limit_s("worker.silence")
GIVE_UP_S: Final = wait_limit_s("worker.give_up")
LEAST_GRACE_S: Final = wait_limit_s("worker.least_grace")
WORKER_GRACE_S: Final = wait_limit_s("worker.grace")
CLAIM_GRACE_S: Final = wait_limit_s("worker.claim")

LATE_S: Final = wait_limit_s("loop.stopped")
TICK_S: Final = 0.5

assert 2 * BEAT_S + LATE_S < PROCESS_SILENCE_S, "nobody is ended for a beat that is late"
assert 4 * FAR_HEARTBEAT_S < WORKER_SILENCE_S
assert WORKER_SILENCE_S + LEAST_GRACE_S <= GIVE_UP_S, "whoever fell silent has had its time"


class ActiveLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the loop does. Its timers go by the same clock,
    `asyncio.timeout` and `sleep` included.
    """

    def __init__(self) -> None:
        self._turned, self._lost_s = time.monotonic(), 0.0
        self._ticking: asyncio.TimerHandle | None = None
        super().__init__()

    def time(self) -> float:
        """Monotonic seconds, less those in which this loop was stopped."""
        now = time.monotonic()
        gap_s, self._turned = now - self._turned, now
        if gap_s > LATE_S:
            self._lost_s += gap_s - TICK_S
        return now - self._lost_s

    def run_forever(self) -> None:
        """Turn at least each TICK_S: a loop that has nothing to do is not stopped."""
        self._tick()
        try:
            super().run_forever()
        finally:
            if self._ticking is not None:
                self._ticking.cancel()

    def _tick(self) -> None:
        self._ticking = self.call_later(TICK_S, self._tick)


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs as `asyncio.run` does, on an `ActiveLoop`."""
    with asyncio.Runner(loop_factory=ActiveLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Returns the seconds on the running loop's clock; on the machine's where no loop runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
