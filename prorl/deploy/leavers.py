"""Nodes of a cluster that are leaving: Dask forgets them at once, we see them off.

Dask's own ways to make a cluster smaller (a batch system's cancel, a signal) leave half a minute.
So a node that is not wanted any more is drained first, in the background, and ended only then; the
cluster may grow meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from prorl.client.client import Client
from prorl.deploy.leaving import FINISH_S
from prorl.errors import NotFoundError, ProrlError

LOOK_S = 1.0
"""Seconds between two looks at a node that leaves."""

Drain = Callable[[str, float], object]
"""Name of a node and a deadline in seconds; returns when the node has left. Blocking."""


class NodeDrainer:
    """The nodes that leave. Each has `drain_s` for it, at the cluster's end `sigterm_drain_s`."""

    def __init__(self, drain_s: float, sigterm_drain_s: float, drain: Drain | None = None) -> None:
        self.ending = False
        self._drain_s, self._term_s, self._drain = drain_s, sigterm_drain_s, drain
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def deadline_s(self) -> float:
        """The seconds that a node has which is asked to leave now."""
        return self._term_s if self.ending else self._drain_s

    @property
    def patience_s(self) -> float:
        """The seconds after which a node that has not left is ended."""
        return self.deadline_s + FINISH_S

    def drain_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, node: str) -> None:
        """Drain a node through the service, as far as the service can be asked."""
        if self._drain is not None:
            leaving = asyncio.to_thread(self._drain, node, self.deadline_s)
            try:
                await asyncio.wait_for(leaving, self.patience_s)
            except (ProrlError, TimeoutError):
                pass  # whoever ends it then does so the hard way: SIGTERM has a grace of its own

    async def wait_ended(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)


def drain_and_wait(client: Client, node: str, deadline_s: float | None) -> int:
    """Drain a node, and return once it has left: how many rollouts it had in hand.

    It is asked again and again: a worker that was started again in between was not asked yet.
    Raises NotFoundError when it is not there.
    """
    end = None if deadline_s is None else time.monotonic() + deadline_s
    num_rollouts: int = client.drain(node, deadline_s=deadline_s)["in_flight"]
    while True:
        time.sleep(LOOK_S)
        remaining_s = None if end is None else max(0.0, end - time.monotonic())
        try:
            client.drain(node, deadline_s=remaining_s)
        except NotFoundError:
            return num_rollouts
