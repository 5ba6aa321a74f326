"""One run that is going on: its writer, decisions and delivery order, tied over the control log.

    SCORED rows, terminals, tasks, events -> RunWriter -> committed parts -> index, facts
    group_complete -> filter -> propose -> what the log says -> order -> trainers

Made when the gateway tells of the run, fed from the log's outbox; a gateway that was away tells the
outbox again, and what was heard before is passed over by its seq. What an earlier store committed
is read back from the directory. The log decides everything: a decision is a proposal until the
outbox says that it stands, a delivery_seq exists once the log gave it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from prorl.config import StoreConfig
from prorl.control import (
    CommitCursor,
    ControlRow,
    GroupComplete,
    GroupEventRow,
    HandedOut,
    Handout,
    KeptGroup,
    Kind,
    Rows,
    RunNews,
    Stalled,
    Terminal,
)
from prorl.linux.failpoints import failpoint
from prorl.storage.files.layout import PartFile, RunDir
from prorl.storage.files.part_reader import read_part
from prorl.storage.keep.tidy import tidy
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.groups import CACHE_BYTES, GroupIndex
from prorl.storage.serve.decide import Decider
from prorl.storage.serve.delivery import LiveOrder
from prorl.storage.serve.endpoint import Endpoint, on_own_thread
from prorl.storage.serve.history import HISTORY_COLUMNS, History
from prorl.storage.serve.replay import COLUMNS, FactBook, delivery_order
from prorl.storage.write.writer import ControlPort, RunWriter, Written

_LOOK_S = 1.0
"""Between two looks at whether a finished run may be closed."""


class LiveRun:
    def __init__(
        self,
        where: str,
        run_id: str,
        news: RunNews,
        control: ControlPort,
        endpoint: Endpoint,
        settings: StoreConfig,
    ) -> None:
        self.run_id = run_id
        self._control, self._endpoint = control, endpoint
        self._news = news
        self._early: list[GroupEventRow] = []
        """Events that came before the directory was read."""
        self._facts = FactBook()
        self._streams = streams = news.delivery == "stream"
        self._settings = settings
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
        self._history = History()
        self._decider = Decider(
            self.run_id,
            news.filter,
            self._facts,
            control,
            self._history,
            lambda rollout_id: StoredRun(where).rows_of("rollouts", rollout_id),
        )
        self.writer = RunWriter(
            self.index.run,
            run_id,
            control,
            flush_s=settings.flush_s,
            flush_bytes=settings.flush_bytes,
            group_size=news.group_size,
            eager=streams,
            on_commit=self._committed,
        )

    async def run(self) -> None:
        """Work until drained. Raises what only a new start of the process can mend."""
        await self._recover()
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self.writer.run(), name=f"write {self.run_id}")
            group.create_task(self._decide(), name=f"decide {self.run_id}")
            compacting = group.create_task(self._compact(), name=f"compact {self.run_id}")
            retiring = group.create_task(self._retire(), name=f"retire {self.run_id}")
            await writing
            retiring.cancel()
            compacting.cancel()

    async def _decide(self) -> None:
        try:
            await self._decider.run()
        finally:
            self._decider.close()

    async def _recover(self) -> None:
        """Bring disk and memory up to what the log has told; then trainers may ask for groups."""
        await self.writer.open(self._news)
        await on_own_thread(
            lambda: read_back(self.index, self._facts, self.order, self._history),
            f"open {self.run_id}",
        )
        self.order.apply_events(self._early)
        self._early.clear()
        self._endpoint.add(self.order, self.index, self.index.run)
        self.ready.set()
        self.update(self._news)

    def update(self, news: RunNews) -> None:
        """The run as it stands: again when the gateway was away, or when it has ended."""
        self._news = news
        if self.ready.is_set():
            self.order.restore_cursors(news.cursors)
            if news.state == "finished":
                self.finish()

    def handle_control(self, row: ControlRow) -> None:
        """Handles a row of the outbox, or the reason why the run has stalled."""
        if row.kind is Kind.STALLED:
            self.order.tell(row.read(Stalled).reason)
            return
        if row.seq <= self.writer.outbox_seq:
            return
        self.writer.outbox_seq = row.seq
        match row.kind:
            case Kind.ROWS:
                rows = row.read(Rows)
                self.writer.add_rows(rows)
                if self.ready.is_set():
                    self.order.apply_events(rows.events)
                else:
                    self._early += rows.events
            case Kind.TERMINAL:
                self.writer.add_terminal(row.read(Terminal))
            case _:
                self._decider.complete(row.read(GroupComplete))

    def _committed(self, written: Written) -> None:
        """Note a part that the log has: its groups can be decided and served from now on."""
        self._new_commits += 1
        if self._new_commits >= (self._settings.compact_every_commits or math.inf):
            self._many_commits.set()
        if (rollouts := written.tables.get("rollouts")) is not None:
            self._facts.add(rollouts)
            self._decider.note_committed(rollouts)
            self.rows_committed += rollouts.num_rows
        if (rows := written.tables.get("sequences")) is not None:
            files = {file.table: file for file in written.commit.files}
            seq = written.commit.commit_seq
            self._endpoint.soon(self.run_id, lambda: self._index(files, rows, seq))

    def _index(self, files: Mapping[str, PartFile], rows: pa.Table, seq: int) -> None:
        self.index.add_written(files["sequences"], rows, seq, files.get("routed_experts"))
        failpoint("index.added")

    async def _compact(self) -> None:
        """Compact the run whenever many commits have come since the last time."""
        while True:
            await self._many_commits.wait()
            self._many_commits.clear()
            self._new_commits = 0
            await self._tidy()

    async def _tidy(self, *, everything: bool = False) -> None:
        where, grace_s = self.index.run.where, self._settings.keep_replaced_s
        if await tidy(where, grace_s, everything=everything):
            update = await on_own_thread(self.index.look, f"look {self.run_id}")
            await self._endpoint.on_thread(self.run_id, lambda: self.index.take_over(update))

    async def _handout(self, groups: list[KeptGroup]) -> HandedOut:
        request = Handout(groups=tuple(groups))
        failpoint("handout.asked")
        answer = await self._control.request(request, run_id=self.run_id)
        failpoint("handout.answered")
        return answer

    async def _save_cursor(self, consumer: str, seq: int) -> None:
        failpoint("cursor.asked")
        await self._control.request(CommitCursor(consumer=consumer, seq=seq), run_id=self.run_id)
        failpoint("cursor.answered")

    def finish(self) -> None:
        self.order.finish()
        self._finished.set()

    async def _retire(self) -> None:
        """Drain a run that is finished, read to its end, and not asked for lately."""
        idle_s, keep_replaced_s = self._settings.close_after_s, self._settings.keep_replaced_s
        await self._finished.wait()
        while self._owed or self.order.idle_s < idle_s:
            await asyncio.sleep(max(_LOOK_S, idle_s - self.order.idle_s))
        self._decider.drain()  # its filter has threads; compactions on a busy machine take minutes
        if self._settings.compact_every_commits:
            await self._tidy(everything=True)
            await asyncio.sleep(keep_replaced_s)
            await self._tidy(everything=True)
        self.drain()

    @property
    def _owed(self) -> bool:
        """Tells whether the trainer has yet to take or commit groups, as the log counts them
        (`RunRecord.uncommitted_groups`).
        """
        return self._streams and (
            bool(self.order.num_kept) or self.order.committed("primary") < self.order.delivered
        )

    def drain(self) -> None:
        self._decider.drain()
        self.writer.drain()


def read_back(index: GroupIndex, facts: FactBook, order: LiveOrder, history: History) -> None:
    """Reads what earlier incarnations of the store committed. Blocking. Raises StorageError."""
    if not index.run.commits():
        return
    stored = StoredRun(index.run.where)
    index.take_over(index.look(stored.commits))
    for file in stored.files("rollouts"):
        facts.add(read_part(stored.directory, file, COLUMNS))
    past = stored.read("rollouts", HISTORY_COLUMNS)
    history.add(past.filter(pc.is_in(past.column("group_id"), stored.decided())))
    delivered = stored.delivered()
    order.restore(delivered)
    for group_id in delivery_order(stored)[len(delivered) :]:
        order.keep(group_id, facts.min_version(group_id))
