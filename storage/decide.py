"""Which groups of a run are kept: the filter is asked, and what it says is proposed to the log.

    group_complete -> filter (on a thread of its own) -> Propose -> what stands -> delivery order

The log's first decision of a group stands, whatever is proposed later. What waits here is bounded
by the run's groups that are complete and undecided, of which the log tells again after a restart.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from prorl.control import Decision, GroupComplete, Propose
from prorl.linux.failpoints import failpoint
from prorl.members import GroupDecision
from prorl.storage.delivery import LiveOrder
from prorl.storage.facts import FactBook
from prorl.storage.filter import GroupFilter, RefusingFilter, compile_filter, valid_members
from prorl.storage.writer import ControlPort

DECIDED_AT_ONCE = 500
"""Groups of one proposal: the log's loop does nothing else meanwhile."""


class Decider:
    """Decides the groups of one run; `drain` ends `run` when nothing is undecided, then `close`."""

    def __init__(
        self, run_id: str, filter_name: str, facts: FactBook, order: LiveOrder, control: ControlPort
    ) -> None:
        self._run_id, self._filter_name = run_id, filter_name
        self._facts, self._order, self._control = facts, order, control
        self._filter: GroupFilter | RefusingFilter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"filter {run_id}")
        """Its own: a user's slow SQL delays its run and no other."""
        self._complete: dict[int, GroupComplete] = {}
        self._asked = asyncio.Event()
        self._draining = False

    def complete(self, group: GroupComplete) -> None:
        """All members of a group are terminal: decide."""
        self._complete[group.group_id] = group
        self._asked.set()

    def drain(self) -> None:
        """Decide what is here, then end."""
        self._draining = True
        self._asked.set()

    async def run(self) -> None:
        """Decide whatever is complete, until drained."""
        while True:
            await self._asked.wait()
            if not self._complete and self._draining:
                return
            groups = self._next_groups()
            decisions = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._judge, groups
            )
            proposals = tuple(
                self._proposal(group, found) for group, found in zip(groups, decisions, strict=True)
            )
            failpoint("decision.asked")
            answer = await self._control.request(Propose(decisions=proposals), run_id=self._run_id)
            failpoint("decision.answered")
            for stands in answer.decisions:
                if stands.kept:
                    self._order.keep(stands.group_id, stands.min_version)

    def _next_groups(self) -> list[GroupComplete]:
        """Take the groups of the next proposal; asked again where more are complete."""
        if not self._draining:
            self._asked.clear()
        groups = list(islice(self._complete.values(), DECIDED_AT_ONCE))
        for group in groups:
            del self._complete[group.group_id]
        if self._complete:
            self._asked.set()
        return groups

    def _judge(self, groups: Sequence[GroupComplete]) -> list[GroupDecision]:
        """Decide groups on the filter's thread, which alone owns it: compiling may take a while."""
        self._filter = self._filter or compile_filter(self._filter_name)
        return self._filter.decide(groups)

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
        )

    def close(self) -> None:
        """End the filter on its thread, after what it is at."""
        self._thread.submit(self._close_filter)
        self._thread.shutdown(wait=False)

    def _close_filter(self) -> None:
        if self._filter is not None:
            self._filter.close()
