"""Submits tasks as training goes on, so that the next groups exist and no more than that.

Keeps `groups_per_step * (1 + steps_ahead)` groups waiting: open, kept or handed out and not
committed. What the filter drops is asked for again by the same rule. Group i of the run always has
the idempotency key `feed/i` and the task `tasks[i % len(tasks)]`, so a resumed trainer adds exactly
what is missing. Not promised: anything when somebody else submits to the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

from prorl.client import Client
from prorl.types import GroupState, Task

WAITING = (GroupState.OPEN, GroupState.KEPT, GroupState.DELIVERED)


class Feed:
    """Tops a run up; call it before each step and whenever the stream is idle."""

    def __init__(
        self, client: Client, run: str, tasks: Sequence[Task], *, n: int, target_groups: int
    ) -> None:
        self._client, self._run, self._tasks = client, run, tasks
        self._n, self._target = n, target_groups

    def __call__(self) -> None:
        """Submit what is missing; idempotent."""
        counts = self._client.run(self._run)["groups"]
        submitted = sum(counts[state] for state in GroupState)
        missing = self._target - sum(counts[state] for state in WAITING)
        if missing > 0:
            tasks = [
                self._tasks[i % len(self._tasks)] for i in range(submitted, submitted + missing)
            ]
            self._client.submit(self._run, tasks, self._n, key="feed", first=submitted)
