"""The end of what was started, bit by bit.

A run that is cancelled, or has enough, may have ten thousand rollouts in hand, and no step of the
loop may cost by that.
"""

from __future__ import annotations

from prorl.service.lifecycle import Event, EventKind
from prorl.service.rollouts import Rollouts
from prorl.service.state import GroupRecord, RunRecord
from prorl.types import FailureCode, GroupState

PIECE = 250
"""Rollouts that are ended in one go."""


class Endings:
    """Ends groups of all runs; `RunRecord.ending` is what is left to do."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def begin(self, run: RunRecord, code: FailureCode) -> None:
        """End every group of the run that is in memory and open: a piece now, the rest by `go_on`.
        Until then the run is given no lease.
        """
        if not run.ending:
            groups = [group for group in run.groups.values() if group.state is GroupState.OPEN]
            run.ending.extend((group, code) for group in groups)
            self.go_on(run, PIECE)

    def go_on(self, run: RunRecord, room: int) -> int:
        """End up to `room` rollouts, and the rest of their group; the room that is left."""
        while run.ending and room > 0:
            group, code = run.ending.popleft()
            room -= self.cancel(group, code)
        return room

    def cancel(self, group: GroupRecord, code: FailureCode) -> int:
        """End every member that has not ended; how many."""
        living = [rollout for rollout in group.rollouts if not rollout.life.state.terminal]
        for rollout in living:
            self._rollouts.apply(rollout, Event(kind=EventKind.CANCEL, code=code))
        return len(living)
