"""One run that is going on: its writer, its decisions, its delivery order, tied together over the
control log.

    SCORED rows, terminals, tasks, events -> RunWriter -> committed parts -> index, facts
    group_complete -> filter -> propose -> what the log says -> order -> trainers

Made from the log's snapshot of the run; a second snapshot (the gateway was away) only adds what is
missing. The log decides everything: a decision is a proposal until the reply, a delivery_seq exists
once the log gave it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pyarrow as pa

from prorl.config import StoreConfig
from prorl.control import (
    CommitCursor,
    Decision,
    GroupComplete,
    HandedOut,
    Handout,
    KeptGroup,
    Propose,
    RunSnapshot,
)
from prorl.linux.failpoints import failpoint
from prorl.members import GroupDecision
from prorl.storage.catalog import StoredRun
from prorl.storage.delivery import LiveOrder
from prorl.storage.endpoint import Endpoint, on_own_thread
from prorl.storage.facts import COLUMNS, FactBook
from prorl.storage.filter import GroupFilter, RefusingFilter, compile_filter, valid_members
from prorl.storage.groups import CACHE_BYTES, GroupIndex
from prorl.storage.helper import Helper
from prorl.storage.layout import PartFile, RunDir
from prorl.storage.parts import read_part
from prorl.storage.writer import ControlPort, RunWriter, Written

DECIDED_AT_ONCE = 500
"""Groups of one proposal: the log's loop does nothing else meanwhile."""

_LOOK_S = 1.0
"""Between two looks at whether a finished run may be closed."""


class LiveRun:
    """Make it from a snapshot, feed it from the control stream and the inlet, `run` it; `drain`
    ends `run`.
    """

    def __init__(
        self,
        where: str,
        snapshot: RunSnapshot,
        control: ControlPort,
        endpoint: Endpoint,
        settings: StoreConfig,
        helper: Helper,
    ) -> None:
        self.run_id = snapshot.run_id
        self._control, self._endpoint = control, endpoint
        self._snapshots = [snapshot]
        self._facts = FactBook()
        self._streams = streams = snapshot.delivery == "stream"
        self._settings, self._helper = settings, helper
        self._new_commits = 0
        self._many_commits = asyncio.Event()
        self._finished = asyncio.Event()
        self.index = GroupIndex(RunDir(where), cache_bytes=CACHE_BYTES if streams else 0)
        self._filter_name = snapshot.filter
        self._filter: GroupFilter | RefusingFilter | None = None
        self._filter_thread = ThreadPoolExecutor(1, thread_name_prefix=f"filter {self.run_id}")
        """Its own: a user's slow SQL delays its run and no other."""
        self._complete: dict[int, GroupComplete] = {}
        self._asked = asyncio.Event()
        self._draining = False
        self.ready = asyncio.Event()
        """Set once it is recovered and can be served."""
        self.rows_committed = 0
        self.order = LiveOrder(
            self.run_id,
            size=self._facts.num_bytes,
            handout=self._handout,
            save_cursor=self._save_cursor,
        )
        self.writer = RunWriter(
            self.index.run,
            self.run_id,
            control,
            flush_s=settings.flush_s,
            flush_bytes=settings.flush_bytes,
            group_size=snapshot.group_size,
            eager=streams,
            on_commit=self._committed,
        )
        self.writer.restore(snapshot)

    async def run(self) -> None:
        """Live the run's life: recover, then write and decide until drained.

        Raises what only a new start of the process can mend.
        """
        await self.writer.open(self._snapshots[0])
        await on_own_thread(
            lambda: read_back(self.index, self._facts, self.order), f"open {self.run_id}"
        )
        while self._snapshots:
            await self._take_over(self._snapshots.pop(0))
        self._endpoint.add(self.order, self.index, self.index.run)
        self.ready.set()
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self.writer.run(), name=f"write {self.run_id}")
                group.create_task(self._decide(), name=f"decide {self.run_id}")
                compacting = group.create_task(self._compact(), name=f"compact {self.run_id}")
                retiring = group.create_task(self._retire(), name=f"retire {self.run_id}")
                await writing
                retiring.cancel()
                compacting.cancel()
        finally:
            self._filter_thread.submit(self._close_filter)
            self._filter_thread.shutdown(wait=False)

    def _close_filter(self) -> None:
        if self._filter is not None:
            self._filter.close()

    async def restore(self, snapshot: RunSnapshot) -> None:
        """The gateway was away: take over what it knows and we may not, after `writer.restore`."""
        if self.ready.is_set():
            await self._take_over(snapshot)
        else:
            self._snapshots.append(snapshot)

    async def _take_over(self, snapshot: RunSnapshot) -> None:
        self.order.told(snapshot.group_events, snapshot.cursors)
        for group_id in snapshot.kept:
            self.order.keep(group_id, self._facts.min_version(group_id))
        for group in snapshot.complete:
            self.complete(group)
        if snapshot.state == "finished":
            self.finish()
        await self.writer.publish_missing(snapshot)

    def _committed(self, written: Written) -> None:
        """A part is in the log: its groups can be decided and served from now on."""
        self._new_commits += 1
        if self._new_commits >= (self._settings.compact_commits or math.inf):
            self._many_commits.set()
        if (rollouts := written.tables.get("rollouts")) is not None:
            self._facts.add(rollouts)
            self.rows_committed += rollouts.num_rows
        if (rows := written.tables.get("sequences")) is not None:
            file = next(file for file in written.commit.files if file.table == "sequences")
            seq = written.commit.commit_seq
            self._endpoint.soon(lambda: self._index(file, rows, seq))

    def _index(self, file: PartFile, rows: pa.Table, seq: int) -> None:
        self.index.add_written(file, rows, seq)
        failpoint("index.added")

    async def _compact(self) -> None:
        """Whenever many commits have come since the last time."""
        while True:
            await self._many_commits.wait()
            self._many_commits.clear()
            self._new_commits = 0
            await self._tidy()

    async def _tidy(self, *, everything: bool = False) -> None:
        if await self._helper.tidy(self.index.run.where, everything=everything):
            found = await on_own_thread(self.index.look, f"look {self.run_id}")
            await self._endpoint.on_thread(lambda: self.index.take_over(found))

    def complete(self, group: GroupComplete) -> None:
        """All members of a group are terminal: decide."""
        self._complete[group.group_id] = group
        self._asked.set()

    async def _decide(self) -> None:
        while True:
            await self._asked.wait()
            if not self._complete and self._draining:
                return
            if not self._draining:
                self._asked.clear()
            groups = list(islice(self._complete.values(), DECIDED_AT_ONCE))
            for group in groups:
                del self._complete[group.group_id]
            if self._complete:
                self._asked.set()
            decisions = await asyncio.get_running_loop().run_in_executor(
                self._filter_thread, self._judge, groups
            )
            proposals = tuple(
                self._proposal(group, found) for group, found in zip(groups, decisions, strict=True)
            )
            failpoint("decision.asked")
            answer = await self._control.request(Propose(decisions=proposals), run_id=self.run_id)
            failpoint("decision.answered")
            for stands in answer.decisions:
                if stands.kept:
                    self.order.keep(stands.group_id, stands.min_version)

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

    async def _handout(self, consumer: str, groups: list[KeptGroup]) -> HandedOut:
        asked = Handout(consumer=consumer, groups=tuple(groups))
        failpoint("handout.asked")
        answer = await self._control.request(asked, run_id=self.run_id)
        failpoint("handout.answered")
        return answer

    async def _save_cursor(self, consumer: str, seq: int) -> None:
        failpoint("cursor.asked")
        await self._control.request(CommitCursor(consumer=consumer, seq=seq), run_id=self.run_id)
        failpoint("cursor.answered")

    def finish(self) -> None:
        """Nothing will be kept any more."""
        self.order.finish()
        self._finished.set()

    async def _retire(self) -> None:
        """Drain once the run is finished, its trainer has read all of it, and nobody has asked for
        anything for a while; compact it to the end before.
        """
        idle_s, replaced_s = self._settings.idle_s, self._settings.replaced_s
        await self._finished.wait()
        while self._owed or self.order.idle_s < idle_s:
            await asyncio.sleep(max(_LOOK_S, idle_s - self.order.idle_s))
        if self._settings.compact_commits:
            await self._tidy(everything=True)
            await asyncio.sleep(replaced_s)
            await self._tidy(everything=True)
        self.drain()

    @property
    def _owed(self) -> bool:
        """Whether the log still counts on us: the same rule by which it tells a store of a run."""
        return self._streams and (
            bool(self.order.num_kept) or self.order.committed("primary") < self.order.delivered
        )

    def drain(self) -> None:
        """Write and decide what is here, then end."""
        self._draining = True
        self._asked.set()
        self.writer.drain()


def read_back(index: GroupIndex, facts: FactBook, order: LiveOrder) -> None:
    """What earlier lives of the store committed.

    Blocking; nobody else has any of them yet. Raises StorageError.
    """
    if not index.run.commits():
        return
    stored = StoredRun(index.run.where)
    index.take_over(index.look(stored.commits))
    for file in stored.files("rollouts"):
        facts.add(read_part(stored.directory, file, COLUMNS))
    order.restore(stored.delivered())
