"""One run that is going on: its writer, decisions and delivery order, tied over the control log.

    SCORED rows, terminals, tasks, events -> RunWriter -> committed parts -> index, facts
    group_complete -> filter -> propose -> what the log says -> order -> trainers

Made from the log's snapshot of the run; a second snapshot (the gateway was away) only adds what is
missing. The log decides everything: a decision is a proposal until the reply, a delivery_seq exists
once the log gave it.
"""

from __future__ import annotations

import asyncio
import math

import pyarrow as pa

from prorl.config import StoreConfig
from prorl.control import (
    CommitCursor,
    GroupComplete,
    HandedOut,
    Handout,
    KeptGroup,
    RunSnapshot,
)
from prorl.linux.failpoints import failpoint
from prorl.storage.catalog import StoredRun
from prorl.storage.decide import Decider
from prorl.storage.delivery import LiveOrder
from prorl.storage.endpoint import Endpoint, on_own_thread
from prorl.storage.facts import COLUMNS, FactBook
from prorl.storage.groups import CACHE_BYTES, GroupIndex
from prorl.storage.helper import Helper
from prorl.storage.layout import PartFile, RunDir
from prorl.storage.part_reader import read_part
from prorl.storage.writer import ControlPort, RunWriter, Written

_LOOK_S = 1.0
"""Between two looks at whether a finished run may be closed."""


class LiveRun:
    """Made from a snapshot, fed from the control stream and the inlet; `drain` ends `run`."""

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
        self.ready = asyncio.Event()
        """Set once it is recovered and can be served."""
        self.rows_committed = 0
        self.order = LiveOrder(
            self.run_id,
            size=self._facts.num_bytes,
            handout=self._handout,
            save_cursor=self._save_cursor,
        )
        self._decider = Decider(self.run_id, snapshot.filter, self._facts, self.order, control)
        self.writer = self._make_writer(snapshot)

    def _make_writer(self, snapshot: RunSnapshot) -> RunWriter:
        """The run's writer, which knows what the log knows."""
        writer = RunWriter(
            self.index.run,
            self.run_id,
            self._control,
            flush_s=self._settings.flush_s,
            flush_bytes=self._settings.flush_bytes,
            group_size=snapshot.group_size,
            eager=self._streams,
            on_commit=self._committed,
        )
        writer.restore(snapshot)
        return writer

    async def run(self) -> None:
        """Live the run's life: recover, then write and decide until drained.

        Raises what only a new start of the process can mend.
        """
        await self._recover()
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self.writer.run(), name=f"write {self.run_id}")
                group.create_task(self._decider.run(), name=f"decide {self.run_id}")
                compacting = group.create_task(self._compact(), name=f"compact {self.run_id}")
                retiring = group.create_task(self._retire(), name=f"retire {self.run_id}")
                await writing
                retiring.cancel()
                compacting.cancel()
        finally:
            self._decider.close()

    async def _recover(self) -> None:
        """Bring disk and memory up to the snapshots; then it may be asked for groups."""
        await self.writer.open(self._snapshots[0])
        await on_own_thread(
            lambda: read_back(self.index, self._facts, self.order), f"open {self.run_id}"
        )
        while self._snapshots:
            await self._take_over(self._snapshots.pop(0))
        self._endpoint.add(self.order, self.index, self.index.run)
        self.ready.set()

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
        self._decider.complete(group)

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
        """Drain once the run is finished, read to its end, and not asked for anything for a while.

        It is compacted to the end before.
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
        self._decider.drain()
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
