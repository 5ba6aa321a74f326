"""The life of a run: open, told its last group, paused, cancelled, over. The only code that changes
it; what follows for groups and rollouts is for those who call.
"""

from __future__ import annotations

from prorl.service.core.changes import CorePart
from prorl.service.core.state import RunRecord


class RunLifecycle(CorePart):
    def end_of_groups(self, run: RunRecord) -> None:
        """The run takes no more groups."""
        if not run.life.last:
            run.life.last = True
            self._changes.mark_run(run)

    def pause(self, run: RunRecord, paused: bool) -> None:
        """Start no groups of the run until it goes on."""
        run.life.paused = paused
        self._changes.mark_run(run)

    def start(self, run: RunRecord) -> None:
        """The run gets a lease; the first one is its start."""
        if not run.life.started_at:
            run.life.started_at = self._wall()
            self._changes.mark_run(run)

    def cancel(self, run: RunRecord, problem: str = "") -> None:
        """The run takes nothing more, and nothing of it starts. `problem`: why, where nobody asked
        for it; the first one stays.
        """
        run.life.cancelled = run.life.last = True
        run.life.problem = run.life.problem or problem
        self._changes.mark_run(run)

    def finish(self, run: RunRecord) -> None:
        """Everything of the run has ended and is stored."""
        self._end(run, "finished")
        self._changes.tell_run(run)

    def fail(self, run: RunRecord, reason: str) -> None:
        """Nothing of the run can be stored."""
        if run.life.state == "open":
            run.life.problem = reason
            self._end(run, "failed")

    def _end(self, run: RunRecord, state: str) -> None:
        run.life.state, run.life.finished_at = state, self._wall()
        self._state.open.pop(run.run_id, None)
        self._changes.mark_run(run)
        self._changes.urgent = True
