"""All journals of one worker: a file for each attempt in its hands, in a folder of its own.

    ROOT/journal/run-0/ lock 0.journal 1.journal ...

A file begins with the row as it was received, which is written before its sender or the gateway
learns of the arrival. When the attempt ends here (committed, failed, cancelled), the file is
emptied and used for another attempt, since making and removing one costs eight times as much. A
worker that starts finds the files of its last incarnation. One writer: the folder is locked for as
long as its process lives. Bounded by `limit_bytes` over all files; an attempt whose record does not
fit, or cannot be written, loses its journal, with a warning, and goes on without one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow as pa

from prorl.errors import SchemaError
from prorl.journal import frames
from prorl.journal.attempt import AttemptJournal
from prorl.journal.records import FrameKind, Recovered, parse_journal, takeover_body
from prorl.linux import locks
from prorl.schema.columns import read_key
from prorl.schema.rows import Row
from prorl.types import AttemptKey

LIMIT_BYTES = 1 << 30
SUFFIX = ".journal"

log = logging.getLogger("prorl.journal")


class _Open:
    """The journal of an attempt in hand; without a file: given up, or of an attempt that ended."""

    __slots__ = ("fd", "key", "num_bytes", "num_frames", "path")

    def __init__(self, key: AttemptKey, path: Path, fd: int) -> None:
        self.key, self.path, self.fd = key, path, fd
        self.num_bytes = self.num_frames = 0


class Journals:
    """The journals of one RUN worker; they belong to its event loop.

    Writes do not wait, unless there is `sync`, which puts what a descriptor names on the disk.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int = LIMIT_BYTES,
        sync: Callable[[int], None] | None = None,
    ) -> None:
        self._folder, self._limit_bytes, self._sync = folder, limit_bytes, sync
        self._open: dict[AttemptKey, _Open] = {}
        """The journals of all attempts in hand; bounded by the worker's slots."""
        self._spare: list[tuple[Path, int]] = []
        """Files that are empty."""
        self._recovered: dict[AttemptKey, tuple[Recovered, int]] = {}
        self._lock = -1
        self._numbers = count()
        self.num_bytes = 0
        """The size of all files together."""

    def open(self) -> list[Recovered]:
        """Lock the folder. Returns what the last incarnation left; damaged files are removed, and
        logged.

        While another process has the folder nothing is kept here.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock = locks.take(self._folder / "lock")
        except OSError:
            log.warning("another process writes %s: no journal is kept", self._folder)
            return []
        paths = sorted(self._folder.glob("*" + SUFFIX))
        self._numbers = count(1 + max((int(p.stem) for p in paths if p.stem.isdigit()), default=-1))
        return [recovered for path in paths if (recovered := self._recover(path)) is not None]

    def close(self) -> None:
        """Close every file; those that hold something stay. Idempotent."""
        for journal in self._open.values():
            if journal.fd >= 0:
                os.close(journal.fd)
                journal.fd = -1
        for path, fd in self._spare:
            os.close(fd)
            path.unlink(missing_ok=True)
        self._open.clear()
        self._spare.clear()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    # ---- an attempt begins and ends

    def begin(self, row: Row) -> None:
        """Write a row down that has come, before its sender or the gateway learns that it has.

        Not when its run wants no journal, or when there is nothing to keep: a policy without tools
        to which the env says nothing makes one call, which its death costs in any case.
        """
        has_turns = row.value("tools") != "[]" or row.value("responds")
        if self._lock < 0 or not row.value("on_lost_tool_call") or not has_turns:
            return
        key = read_key(row)
        if key in self._open:
            return
        journal = self._open[key] = _Open(key, Path(), -1)
        fresh = not self._spare
        try:
            journal.path, journal.fd = self._new_file() if fresh else self._spare.pop()
        except OSError as error:
            self._give_up(journal, error)
            return
        self._write(journal, FrameKind.ROW, row.as_batch.serialize())
        if fresh:
            self._sync_folder(journal)

    def _new_file(self) -> tuple[Path, int]:
        path = self._folder / f"{next(self._numbers)}{SUFFIX}"
        return path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)

    def attempt(self, key: AttemptKey, *, on_lost_tool_call: str) -> AttemptJournal:
        recovered, resumes = self._recovered.pop(key, (None, 0))
        opened = self._open.get(key)
        sink = partial(self._write, opened) if opened is not None else None
        journal = AttemptJournal(sink, on_lost_tool_call=on_lost_tool_call, resumes=resumes)
        for record in recovered.records if recovered else ():
            journal.restore(record)
        return journal

    def adopt(self, recovered: Recovered, resumes: int) -> None:
        """Go on writing the journal of the last incarnation, behind its last whole frame.
        `resumes`: how many workers have taken the attempt over, this one included.
        """
        journal = _Open(recovered.key, recovered.path, -1)
        journal.num_frames = recovered.num_frames
        try:
            journal.fd = os.open(recovered.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(journal.fd, recovered.num_bytes)
        except OSError as error:
            self._give_up(journal, error)
            self.refuse(recovered)
        else:
            journal.num_bytes = recovered.num_bytes
            self._open[recovered.key] = journal
            self._write(journal, FrameKind.TAKEOVER, takeover_body(resumes))
        # Last: a journal that cannot be written any more is given up, what was read of it is not.
        self._recovered[recovered.key] = recovered, resumes

    def refuse(self, recovered: Recovered) -> None:
        """Remove what the last incarnation left of an attempt that does not go on here."""
        self.num_bytes -= recovered.num_bytes
        recovered.path.unlink(missing_ok=True)

    def drop(self, key: AttemptKey) -> None:
        """The attempt is no longer in hand; idempotent."""
        self._recovered.pop(key, None)
        journal = self._open.pop(key, None)
        if journal is not None:
            self._end(journal, again=True)

    def _end(self, journal: _Open, *, again: bool) -> None:
        """Removes what a journal holds; `again`: its file waits for another attempt."""
        fd, journal.fd = journal.fd, -1
        if fd < 0:
            return
        self.num_bytes -= journal.num_bytes
        if again:
            with suppress(OSError):
                os.ftruncate(fd, 0)
                self._spare.append((journal.path, fd))
                return
        os.close(fd)
        journal.path.unlink(missing_ok=True)

    # ---- writing

    def _write(self, journal: _Open, kind: FrameKind, record: bytes | pa.Buffer) -> None:
        if journal.fd < 0:
            return
        head = frames.seal(kind, journal.num_frames, record)
        size = len(head) + len(record)
        try:
            if self.num_bytes + size > self._limit_bytes:
                raise OSError(f"the journals of this worker would exceed {self._limit_bytes} bytes")
            if (done := os.writev(journal.fd, (head, record))) != size:
                raise OSError(f"{done} of {size} bytes were written")
            if self._sync is not None:
                self._sync(journal.fd)
        except OSError as error:
            self._give_up(journal, error)
            return
        journal.num_frames += 1
        journal.num_bytes += size
        self.num_bytes += size

    def _sync_folder(self, journal: _Open) -> None:
        """A file is there after a power cut when its folder is."""
        if self._sync is None or journal.fd < 0:
            return
        try:
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self._give_up(journal, error)

    def _give_up(self, journal: _Open, error: OSError) -> None:
        log.warning("%s goes on without a journal: %s", journal.key, error)
        self._end(journal, again=False)
        self.drop(journal.key)

    # ---- reading

    def _recover(self, path: Path) -> Recovered | None:
        """Returns what a file holds up to its first torn frame; None, with a warning, when it is
        damaged.
        """
        if not path.stat().st_size:
            path.unlink()
            return None
        prefix = frames.read(path.read_bytes())
        try:
            if prefix.damage:
                raise SchemaError(f"{prefix.damage}, byte {prefix.end}", "sealed frames")
            recovered = parse_journal(path, prefix)
        except SchemaError as error:
            log.warning("the journal %s is refused, its attempt begins anew: %s", path.name, error)
            path.unlink(missing_ok=True)
            return None
        self.num_bytes += prefix.end
        return recovered
