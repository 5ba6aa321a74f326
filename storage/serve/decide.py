"""Decides which groups of a run are kept: proposes the filter's decisions to the log.

    group_complete -> filter (on a thread of its own) -> Propose -> outbox -> delivery order

The log's first decision of a group stands, whatever is proposed later. What waits here is bounded
by the run's groups that are complete and undecided, of which the log tells again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.control import Decision, GroupComplete, Propose
from prorl.errors import ConfigError
from prorl.filters import GroupDecision
from prorl.linux.failpoints import failpoint
from prorl.schema import ROLLOUTS
from prorl.storage.serve.filter import (
    FILTER_COLUMNS,
    GroupFilter,
    filter_error,
    valid_members,
)
from prorl.storage.serve.filter_process import FilterLostError
from prorl.storage.serve.history import HISTORY_COLUMNS, History
from prorl.storage.serve.replay import FactBook
from prorl.storage.write.writer import ControlPort
from prorl.types import RolloutState

AGAIN_S, MAX_AGAIN_S = 0.5, 30.0
"""Before a filter whose process was lost is asked again: at first, at most."""

log = logging.getLogger("prorl.storage")

DECIDED_AT_ONCE = 500
"""Groups of one proposal: the log's loop does nothing else meanwhile."""


class Decider:
    """Decides the groups of one run. `drain` ends `run` when nothing is undecided; then `close`."""

    def __init__(
        self,
        run_id: str,
        filter_name: str,
        facts: FactBook,
        control: ControlPort,
        history: History,
        find: Callable[[int], pa.Table],
    ) -> None:
        """`find` reads a rollout's row of an earlier incarnation; blocking."""
        self._run_id, self._filter_name = run_id, filter_name
        self._facts, self._control, self._find = facts, control, find
        self._filter: GroupFilter | None = None
        self._refused = ""
        """The reason why the filter does not compile, in a run that exists already: all groups are
        dropped.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"filter {run_id}")
        """Its own: a user's slow SQL delays its run and no other."""
        self._complete: dict[int, GroupComplete] = {}
        self._rows: dict[int, list[pa.Table]] = {}
        """Stored members of groups that are not decided."""
        self._history = history
        self._wakeup = asyncio.Event()
        self._draining = False

    def complete(self, group: GroupComplete) -> None:
        self._complete[group.group_id] = group
        self._wakeup.set()

    def note_committed(self, rollouts: pa.Table) -> None:
        """Note that these rows were committed: groups that waited for them may be decided."""
        rows = rollouts.select(DECISION_COLUMNS).filter(
            pc.equal(rollouts.column("status"), RolloutState.COMPLETED.value)
        )
        rows = rows.sort_by("group_id")
        ids, starts = np.unique(rows.column("group_id").to_numpy(), return_index=True)
        bounds = pairwise([*starts, rows.num_rows])
        for group_id, (start, end) in zip(ids.tolist(), bounds, strict=True):
            self._rows.setdefault(group_id, []).append(rows.slice(start, end - start))
        if self._complete:
            self._wakeup.set()

    def drain(self) -> None:
        self._draining = True
        self._wakeup.set()

    async def run(self) -> None:
        while True:
            await self._wakeup.wait()
            groups = self._next_groups()
            if not groups and self._draining:
                return
            if not groups:
                continue
            decisions = await self._decided(groups)
            proposals = tuple(
                self._proposal(group, decision)
                for group, decision in zip(groups, decisions, strict=True)
            )
            failpoint("decision.asked")
            await self._control.request(Propose(decisions=proposals), run_id=self._run_id)
            failpoint("decision.answered")
            for group in groups:
                self._rows.pop(group.group_id, None)

    async def _decided(self, groups: Sequence[GroupComplete]) -> list[GroupDecision]:
        """Returns the filter's verdicts; a process that was lost gives none and is asked again."""
        loop, wait_s = asyncio.get_running_loop(), AGAIN_S
        while True:
            try:
                return await loop.run_in_executor(self._thread, self._decide, groups)
            except FilterLostError as error:
                log.warning("run %s: %s; asked again in %g s", self._run_id, error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_AGAIN_S)

    def _next_groups(self) -> list[GroupComplete]:
        """Take the groups of the next proposal. Sets the event again where more can be decided."""
        if not self._draining:
            self._wakeup.clear()
        ready = (group for group in self._complete.values() if self._is_committed(group))
        groups = list(islice(ready, DECIDED_AT_ONCE))
        for group in groups:
            del self._complete[group.group_id]
        if len(groups) == DECIDED_AT_ONCE:
            self._wakeup.set()
        return groups

    def _is_committed(self, group: GroupComplete) -> bool:
        """Returns whether every member's commit is here: the log may announce the end earlier."""
        completed = sum(member.state is RolloutState.COMPLETED for member in group.members)
        return self._facts.num_rollouts(group.group_id) >= completed

    def _decide(self, groups: Sequence[GroupComplete]) -> list[GroupDecision]:
        """Decide groups on the filter's thread, which alone owns it: compiling may take a while."""
        if self._filter is None and not self._refused:
            try:
                self._filter = GroupFilter(self._filter_name)
            except ConfigError as error:
                self._refused = filter_error(error)
        if self._filter is None:
            return [GroupDecision(g.group_id, kept=False, reason=self._refused) for g in groups]
        stored = self._stored(groups)
        decisions = self._filter.decide(groups, stored, self._history)
        self._history.add(stored)
        return decisions

    def _stored(self, groups: Sequence[GroupComplete]) -> pa.Table:
        """Returns the rows of these groups' members, from disk if an earlier process wrote them."""
        tables: list[pa.Table] = [ROLLOUTS.empty_table().select(DECISION_COLUMNS)]
        for group in groups:
            rows = list(self._rows.get(group.group_id, ()))
            have = {i for table in rows for i in table.column("rollout_id").to_pylist()}
            tables += rows
            tables += (
                self._find(member.rollout_id).select(DECISION_COLUMNS)
                for member in group.members
                if member.state is RolloutState.COMPLETED and member.rollout_id not in have
            )
        return pa.concat_tables(tables)

    def _proposal(self, group: GroupComplete, decision: GroupDecision) -> Decision:
        kept, reason = decision.kept, decision.reason
        if kept and not self._facts.can_be_served(group.group_id):
            kept, reason = False, "incomplete"
        valid = valid_members(group)
        rewards = [member.reward for member in valid if member.reward is not None]
        return Decision(
            group_id=group.group_id,
            kept=kept,
            reason=reason,
            num_valid=len(rewards),
            mean_reward=statistics.fmean(rewards) if rewards else None,
            min_version=self._facts.min_version(group.group_id),
            rest=decision.rest,
            siblings=decision.siblings,
        )

    def close(self) -> None:
        """End the filter on its thread, after what it is at."""
        self._thread.submit(lambda: self._filter.close() if self._filter is not None else None)
        self._thread.shutdown(wait=False)


DECISION_COLUMNS = list(dict.fromkeys(["rollout_id", *FILTER_COLUMNS, *HISTORY_COLUMNS]))
"""Columns of `rollouts` that the filter and the history are made of."""
