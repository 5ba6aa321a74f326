"""Blocks leases to a node whose connection breaks again and again while nothing comes through.

Small packets may pass where large ones do not (MTU): such a node comes back each time, takes leases
and falls silent. Its attempts are charged to nobody, so nothing else would end that circle.

    its attempts were given up `BREAKS` times,    -> no leases for FIRST_BLOCK_S,
    and none of its rows reached the store           twice as long each further time
    its control stream lives, but its finished    -> no leases until one does,
    rows do not reach the store                      at most for LAST_BLOCK_S
    one of its rows reaches the store             -> everything is forgotten

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
FIRST_BLOCK_S, LAST_BLOCK_S = 60.0, 960.0
HINT = "do large packets pass? compare the MTU of both ends"


class NodeLinks:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Sessions by node and worker that ended and whose attempts were given up."""
        self._blocks: dict[str, tuple[int, float]] = {}
        """By node: its breaks when it was blocked last, and when that block ends."""
        self._stalls: dict[str, float] = {}
        """By node: when the block of a stalled node ends."""

    def note_break(self, worker: WorkerRecord) -> None:
        """Note that an attempt of a session of the worker was given up."""
        self._sessions[worker.node][worker.name].add(worker.session)
        num_breaks = self._num_breaks(worker.node)
        before, _ = self._blocks.get(worker.node, (BREAKS - 1, 0.0))
        if num_breaks > before:
            block_s = min(LAST_BLOCK_S, FIRST_BLOCK_S * 2.0 ** (num_breaks - BREAKS))
            self._blocks[worker.node] = num_breaks, self._clock() + block_s

    def note_stall(self, node: str) -> None:
        """Note that finished rows of a node do not reach the store, though its streams live."""
        self._stalls[node] = self._clock() + LAST_BLOCK_S

    def clear_stall(self, node: str) -> None:
        self._stalls.pop(node, None)

    def note_delivery(self, worker: WorkerRecord) -> None:
        """Note that a row of the worker's node has reached the store: its connection works."""
        self._sessions.pop(worker.node, None)
        self._blocks.pop(worker.node, None)
        self.clear_stall(worker.node)

    def blocked_nodes(self) -> list[tuple[str, str]]:
        """Returns the nodes that get no leases now, and why."""
        return [(n, why) for n in {*self._blocks, *self._stalls} if (why := self.block_reason(n))]

    def block_reason(self, node: str) -> str:
        """Returns why a node gets no leases now; empty when it does."""
        if self._stalls.get(node, 0.0) > self._clock():
            return f"its line broke and what it finished does not reach the store ({HINT})"
        _, until = self._blocks.get(node, (0, 0.0))
        remaining_s = until - self._clock()
        if remaining_s <= 0:
            return ""
        return (
            f"its line broke {self._num_breaks(node)} times and nothing came through; tried again"
            f" in {remaining_s:.0f} s ({HINT})"
        )

    def _num_breaks(self, node: str) -> int:
        return max((len(ended) for ended in self._sessions[node].values()), default=0)
