"""Makes trajectories durable, and acks them afterwards.

    collect -> take out what may not be committed -> reserve -> write parts -> commit
            -> commits/<seq>.json -> published -> ack

One batch at a time per run; what comes meanwhile waits for the next. Wherever the process dies, a
new one (from the log's snapshot of the run) finds: files that no part of the log names, and removes
them; commits that are in the log and not on disk, and publishes them; rows that come again, and
hears `committed` for those that are durable. So a row is in exactly one part, and an ack always
follows durability. Rows that may not be committed (failed, cut, superseded, invalid) go to
`partial/`, one file a batch.

A disk that is full stops the writer, not the run: it tries again each second and nothing is acked
meanwhile. Any other error of a write ends the process, because what the kernel still holds of the
file is unknown; the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from prorl.control import (
    Failed,
    PartPublished,
    Payload,
    RefusalReason,
    ReplyT,
    Request,
    Reserve,
    Rows,
    RunNews,
    Terminal,
)
from prorl.errors import FencedError, StorageError
from prorl.flight.queues import wire_bytes
from prorl.linux.failpoints import failpoint
from prorl.schema.rows import Row, stack
from prorl.storage.files.durable import WriteDurably, write_durably
from prorl.storage.files.layout import PARTIAL, Commit, PartFile, RunDir
from prorl.storage.files.objects import remove
from prorl.storage.files.parts import empties, encode, encode_partial, part_file
from prorl.storage.keep.compact import remove_dead
from prorl.storage.write.batch import (
    Ack,
    GroupCounts,
    PendingPart,
    WaitingRow,
    commit_request,
    part_tables,
)
from prorl.storage.write.convert import row_verdicts
from prorl.types import AttemptKey, FailureCode, Stage

log = logging.getLogger("prorl.storage")

LINGER_S = 0.02
"""The seconds for which the first row after a pause waits for company."""

SHARED_S = 0.25
"""At least so long between two parts that somebody waits for: a part costs the same for one group
as for ten. Longer delays a trainer that waits for one group, shorter makes a part a group.
"""

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
FULL_DISK_WAIT_S = 1.0
"""Between two tries while the disk is full."""


class ControlPort(Protocol):
    """The control stream as the writer uses it (`prorl.flight.control_client.ControlClient`)."""

    async def request(self, request: Request[ReplyT], *, run_id: str = "") -> ReplyT:
        """Ask; the reply, over as many connections as it takes. Raises FencedError and other errors
        of `prorl.errors`.
        """

    def emit(self, payload: Payload, key: AttemptKey, *, stage: str = "", code: str = "") -> None:
        """Send an event; dropped while there is no connection."""


class Written(NamedTuple):
    """A part that the log has committed."""

    commit: Commit
    tables: Mapping[str, pa.Table]


class _Part(NamedTuple):
    name: str
    files: tuple[PartFile, ...]
    tables: Mapping[str, pa.Table]


class _Refused(NamedTuple):
    num_rows: int
    superseded: list[WaitingRow]
    """The rows among them that were superseded; the others are durable already."""


class RunWriter:
    """Writes one run. `open` first, then `add_*` from the event loop; `run` writes to its end."""

    def __init__(
        self,
        directory: RunDir,
        run_id: str,
        control: ControlPort,
        *,
        flush_s: float,
        flush_bytes: int,
        group_size: int = 1,
        eager: bool = False,
        on_commit: Callable[[Written], None] = lambda written: None,
        write: WriteDurably = write_durably,
    ) -> None:
        """`eager`: flush at the last member of a group, because somebody waits for it. `on_commit`
        runs before the rows are acked.
        """
        self.directory, self.run_id = directory, run_id
        self._control, self._write_file, self._on_commit = control, write, on_commit
        self._flush_s, self._flush_bytes, self._eager = flush_s, flush_bytes, eager
        self._counts = GroupCounts(group_size)
        self._waiting, self._flying = PendingPart(), PendingPart()
        self._urgent, self._arrived = asyncio.Event(), asyncio.Event()
        self._draining = False
        self._last_flush = -math.inf
        self._compacted_upto = 0
        self.outbox_seq = 0
        """The last row of the outbox that is here, or stored."""

    @property
    def in_flight(self) -> list[AttemptKey]:
        return list(self._flying.rows)

    async def open(self, news: RunNews) -> None:
        """Bring the directory to where the log is, once, before `run`: files that were never
        committed are removed, commits without their file are published. Raises
        ForeignDirectoryError, before anything is touched, for a directory that the log does not
        know.
        """
        await asyncio.to_thread(self._prepare, news)
        self._compacted_upto = (await asyncio.to_thread(self.directory.compacted)).last
        for missing in news.unpublished:
            commit = Commit(
                commit_seq=missing.commit_seq,
                part=missing.part,
                files=missing.files,
                run_id=self.run_id,
            )
            await self._show(commit)

    def _prepare(self, news: RunNews) -> None:
        self.directory.check_commits(news.num_commits)
        self.directory.create(empties(self.run_id).items(), self._write_file)
        unpublished = {missing.commit_seq: missing.part for missing in news.unpublished}
        published = min(unpublished, default=news.num_commits + 1) - 1
        removed = self.directory.sweep(set(unpublished.values()), published)
        removed += remove_dead(self.directory)
        if removed:
            log.info("removed what no commit names", extra={"run": self.run_id, "files": removed})

    def add(self, key: AttemptKey, row: Row, ack: Ack, num_bytes: int = 0) -> None:
        """`ack` is called once the row's fate is durable. `num_bytes`: if known."""
        waiting = self._flying.knows(key) or self._waiting.knows(key)
        if waiting is not None:
            waiting.acks.append(ack)
            return
        self._waiting.rows[key] = WaitingRow(key=key, row=row, acks=[ack])
        self._waiting.num_bytes += num_bytes or wire_bytes(row.as_batch)
        self._member(row.value("group_id"), row.value("sample_index"))
        self._touch()

    def add_terminal(self, terminal: Terminal) -> None:
        self._waiting.terminals[terminal.rollout_id] = terminal
        self._member(terminal.group_id, terminal.sample_index)
        self._touch()

    def add_rows(self, rows: Rows) -> None:
        for task in rows.tasks:
            # A gateway that began anew may tell these and later ones as one row of the outbox,
            # whose seq is the last one's.
            if task.group_id in self._flying.tasks:
                continue
            self._waiting.tasks[task.group_id] = task
            self._counts.expect(task.group_id, task.n)
        for event in rows.events:
            self._waiting.events[event.event_seq] = event
        for attempt in rows.attempts:
            self._waiting.attempts[attempt.rollout_id, attempt.attempt] = attempt
        self._touch()

    def _member(self, group_id: int, sample_index: int) -> None:
        if self._counts.arrived(group_id, sample_index) and self._eager:
            self._urgent.set()

    def _touch(self) -> None:
        if self._waiting:
            self._arrived.set()
        if self._waiting.num_bytes >= self._flush_bytes:
            self._urgent.set()

    def drain(self) -> None:
        """Write what is here without waiting; `run` returns when nothing is left."""
        self._draining = True
        self._urgent.set()
        self._arrived.set()

    async def run(self) -> None:
        """Writes until drained. Raises StorageError when the process must start again."""
        while True:
            await self._arrived.wait()
            if not self._waiting and self._draining:
                return
            await self._wait_until_due()
            if not self._draining:
                # Cleared before the batch is taken: what comes from here on is in the next batch,
                # and sets them again. A draining writer never waits, so they stay set.
                self._urgent.clear()
                self._arrived.clear()
            self._flying, self._waiting = self._waiting, PendingPart()
            self._flying.outbox_upto = self.outbox_seq
            await self._write()
            self._flying = PendingPart()

    async def _wait_until_due(self) -> None:
        """Wait until the next part is to be written: `flush_s` after the last one, or `SHARED_S`
        where a trainer waits or memory is short. The first row after a pause is written almost at
        once, with the rows that come together with it.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(
                max(self._last_flush + self._flush_s, loop.time() + min(LINGER_S, self._flush_s))
            ):
                await self._urgent.wait()
                if not self._draining and self._waiting.num_bytes < self._flush_bytes:
                    await asyncio.sleep(self._last_flush + SHARED_S - loop.time())
        except TimeoutError:
            pass
        self._last_flush = loop.time()

    async def _write(self) -> None:
        """Write the batch in `_flying`, commit and ack it, but for rows that the log refuses."""
        cut = await self._uncommittable()
        cut += (await self._reserve()).superseded
        while self._flying:
            part = await self._store_part()
            failpoint("commit.asked")
            commit, refused = await self._commit(part)
            cut += refused
            if commit is not None:
                failpoint("commit.answered")
                # The log has it: from here on it may be decided and served, must become visible to
                # readers, and only then may its senders forget it.
                self._on_commit(Written(commit, part.tables))
                await self._show(commit)
                failpoint("commit.shown")
                self._settle(list(self._flying.rows))
                failpoint("rows.acked")
                self._flying = PendingPart()
        if cut:  # after what counts: hundreds are cut at once when a run has reached its target
            await self._to_partial(cut)

    async def _uncommittable(self) -> list[WaitingRow]:
        """Takes out rows that may not be committed, and reports the invalid ones."""
        waiting_rows = list(self._flying.rows.values())
        if not waiting_rows:
            return []
        rows = stack([waiting.row for waiting in waiting_rows])
        verdicts = await asyncio.to_thread(row_verdicts, rows)
        for waiting, verdict in zip(waiting_rows, verdicts, strict=True):
            if verdict.problem:
                log.error("invalid row of %s: %s", waiting.key, verdict.problem)
                self._control.emit(
                    Failed(message=verdict.problem),
                    waiting.key,
                    stage=Stage.EVAL,
                    code=FailureCode.INVALID_ROW,
                )
        return [
            self._flying.rows.pop(waiting.key)
            for waiting, verdict in zip(waiting_rows, verdicts, strict=True)
            if not verdict.committable
        ]

    async def _reserve(self) -> _Refused:
        """Take out the rows that the log refuses, and ack those that are durable already."""
        if not self._flying.rows:
            return _Refused(0, [])
        request = Reserve(attempts=tuple(self._flying.rows))
        refused = (await self._control.request(request, run_id=self.run_id)).refused
        self._settle([r.key for r in refused if r.reason is RefusalReason.COMMITTED])
        superseded = [r.key for r in refused if r.reason is not RefusalReason.COMMITTED]
        return _Refused(len(refused), [self._flying.rows.pop(key) for key in superseded])

    def _settle(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            self._flying.rows.pop(key).ack()

    async def _to_partial(self, cut: Sequence[WaitingRow]) -> None:
        """Write rows that may not be committed to `partial/`, one file a batch. A row that is there
        twice is read once.
        """
        rows = stack([waiting.row for waiting in cut])
        content = await asyncio.to_thread(encode_partial, rows, self.run_id)
        path = self.directory.path(PARTIAL, f"cut-{uuid.uuid4().hex[:16]}.parquet")
        await self._put({path: content})
        for waiting in cut:
            waiting.ack()

    async def _store_part(self) -> _Part:
        name = f"part-{uuid.uuid4().hex[:16]}"
        part, contents = await asyncio.to_thread(self._encode_part, name)
        await self._put(contents)
        return part

    def _encode_part(self, name: str) -> tuple[_Part, Mapping[str, pa.Buffer]]:
        """A part, and the content of its files by path. For a thread."""
        tables, files, contents = (
            part_tables(self._flying),
            list[PartFile](),
            dict[str, pa.Buffer](),
        )
        for table, rows in tables.items():
            content = encode(table, rows, self.run_id, name)
            file = part_file(table, name, rows, content)
            contents[self.directory.path(file.path)] = content
            files.append(file)
        return _Part(name, tuple(files), tables), contents

    def _write_files(self, contents: Mapping[str, bytes | pa.Buffer]) -> None:
        for path, content in contents.items():
            self._write_file(self.directory.fs, path, content)

    async def _put(self, contents: Mapping[str, bytes | pa.Buffer]) -> None:
        """Make files durable, by path; waits while the disk is full."""
        while True:
            try:
                return await asyncio.to_thread(self._write_files, contents)
            except StorageError as error:
                if error.errno not in FULL_DISK:
                    raise
                log.error(
                    "run %s: the disk is full, nothing is acked until there is room: %s",
                    self.run_id,
                    error,
                )
                await asyncio.sleep(FULL_DISK_WAIT_S)

    async def _commit(self, part: _Part) -> tuple[Commit | None, list[WaitingRow]]:
        """Have the log commit the part, in one transaction. Returns None where it refused a row:
        that row is taken out, and the rest is written again as another part.
        """
        try:
            request = commit_request(part.name, part.files, self._flying, part.tables)
            answer = await self._control.request(request, run_id=self.run_id)
        except FencedError:
            for file in part.files:
                path = self.directory.path(file.path)
                await asyncio.to_thread(remove, self.directory.fs, path)
            refused = await self._reserve()
            if not refused.num_rows:
                raise
            return None, refused.superseded
        commit = Commit(
            commit_seq=answer.commit_seq, part=part.name, files=part.files, run_id=self.run_id
        )
        return commit, []

    async def _show(self, commit: Commit) -> None:
        """Make a commit visible to readers, unless it already is, by its own file or in a range."""
        if commit.commit_seq > self._compacted_upto:
            await self._put({self.directory.commit_path(commit.commit_seq): commit.dumps()})
        await self._control.request(PartPublished(commit_seq=commit.commit_seq), run_id=self.run_id)
