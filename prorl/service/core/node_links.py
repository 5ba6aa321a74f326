"""Nodes whose line breaks again and again with nothing coming through: no leases for a while.

Small packets may pass where large ones do not (MTU): such a node comes back each time, takes leases
and falls silent. What it held is charged to nobody, so that nothing else would end it.

    gives up what it held, `BREAKS` times without a row of it in the store -> no leases for a rest,
    twice as long each time; a row of it in the store -> as if nothing had been
    keeps its control stream, and what it finished does not reach the store -> no leases until it
    does, or for `LAST_REST_S` when it is not here any more

Pure but for the clock. Bounded by the names of nodes.
"""

from __future__ import annotations

from collections import defaultdict

from prorl.limits import Clock
from prorl.service.core.state import WorkerRecord

BREAKS = 3
"""One break is a cable, two a switch that restarts; three without a row are large packets that
never pass.
"""
FIRST_REST_S, LAST_REST_S = 60.0, 960.0
HINT = "do large packets pass? compare the MTU of both ends"


class NodeLinks:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        """The sessions by node and worker: those that ended and lost what they held."""
        self._rests: dict[str, tuple[int, float]] = {}
        """The rests by node: breaks when its last rest began, and when that ends."""
        self._stalled: dict[str, float] = {}
        """The stall of each node: until when nothing is sent to it."""

    def lost(self, worker: WorkerRecord) -> None:
        """Something that a session of the worker held was given up."""
        self._sessions[worker.node][worker.name].add(worker.session)
        num_breaks = self._num_breaks(worker.node)
        before, _ = self._rests.get(worker.node, (BREAKS - 1, 0.0))
        if num_breaks > before:
            rest_s = min(LAST_REST_S, FIRST_REST_S * 2.0 ** (num_breaks - BREAKS))
            self._rests[worker.node] = num_breaks, self._clock() + rest_s

    def stalls(self, node: str) -> None:
        self._stalled[node] = self._clock() + LAST_REST_S

    def works(self, node: str) -> None:
        self._stalled.pop(node, None)

    def delivered(self, worker: WorkerRecord) -> None:
        self._sessions.pop(worker.node, None)
        self._rests.pop(worker.node, None)
        self.works(worker.node)

    def troubles(self) -> list[tuple[str, str]]:
        return [(n, why) for n in {*self._rests, *self._stalled} if (why := self.trouble(n))]

    def trouble(self, node: str) -> str:
        """Returns why a node gets no leases now; empty when it does."""
        if self._stalled.get(node, 0.0) > self._clock():
            return f"its line broke and what it finished does not reach the store ({HINT})"
        _, until = self._rests.get(node, (0, 0.0))
        remaining_s = until - self._clock()
        if remaining_s <= 0:
            return ""
        return (
            f"its line broke {self._num_breaks(node)} times and nothing came through; tried again"
            f" in {remaining_s:.0f} s ({HINT})"
        )

    def _num_breaks(self, node: str) -> int:
        return max((len(ended) for ended in self._sessions[node].values()), default=0)
