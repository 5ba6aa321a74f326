"""All journals of one worker: a file for each attempt in its hands, in a folder of its own.

    ROOT/journal/run-0/ lock 17.1.NAME.journal ...

A file begins with the row as it was received and goes when the row leaves the worker's hands
(committed, failed, cancelled). It is made before the row's sender or the gateway hears that the row
has come, and before a record or a tool call of it, but not while the row is on its way to its
agent. A worker that starts finds the files of its last life: `recover`. One writer: the folder is
locked for as long as its process lives. Bounded by `limit_bytes` over all files; an attempt whose
record does not fit, or cannot be written, loses its journal, aloud, and goes on without one.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from prorl.columns import read_key
from prorl.errors import SchemaError
from prorl.journal import frames
from prorl.journal.attempt import AttemptJournal, ForkOrigin
from prorl.journal.records import (
    SCHEMAS,
    Answer,
    Ended,
    FrameKind,
    Moved,
    Said,
    body,
    moved_body,
    read_answer,
    read_ended,
    read_moved,
    read_said,
    row_of,
)
from prorl.rows import Row
from prorl.types import AttemptKey

Sync = Callable[[int], None]

LIMIT_BYTES = 1 << 30
SUFFIX = ".journal"

log = logging.getLogger("prorl.journal")

Record = Said | Answer | Ended | Moved

_READ: dict[FrameKind, Callable[..., Record]] = {
    FrameKind.SAID: read_said,
    FrameKind.ANSWER: read_answer,
    FrameKind.END: read_ended,
    FrameKind.MOVED: read_moved,
}


class Recovered(NamedTuple):
    """What the last life of this worker left of an attempt."""

    key: AttemptKey
    row: Row
    epoch: int
    """Of its last life."""
    records: tuple[Record, ...]
    path: Path
    num_bytes: int
    num_frames: int


class _Open:
    """A journal that is written."""

    def __init__(self, path: Path, fd: int, num_bytes: int = 0, num_frames: int = 0) -> None:
        self.path, self.fd, self.num_bytes, self.num_frames = path, fd, num_bytes, num_frames


class Journals:
    """The journals of one RUN worker. Belongs to the event loop; writes go to the page cache and do
    not wait, unless there is `sync`, which waits until what a descriptor names is on the disk.
    """

    def __init__(
        self, folder: Path, limit_bytes: int = LIMIT_BYTES, sync: Sync | None = None
    ) -> None:
        self._folder, self._limit_bytes, self._sync = folder, limit_bytes, sync
        self._open: dict[AttemptKey, _Open] = {}
        self._expected: dict[AttemptKey, Row] = {}
        """Rows that have come and whose files are not made yet. Bounded by the worker's slots."""
        self._pasts: dict[AttemptKey, tuple[Recovered, int]] = {}
        self._lock = -1
        self.num_bytes = 0
        """Of all files."""
        self.num_given_up = 0

    def open(self) -> list[Recovered]:
        """Lock the folder; what the last life left, damaged files aside, which are removed aloud.

        While another process has the folder nothing is kept here.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.warning("another process writes %s: no journal is kept", self._folder)
            self.close()
            return []
        found = [self._recover(path) for path in sorted(self._folder.glob("*" + SUFFIX))]
        return [recovered for recovered in found if recovered is not None]

    def close(self) -> None:
        """Close every file; they stay. Idempotent."""
        self._expected.clear()
        for journal in self._open.values():
            os.close(journal.fd)
        self._open.clear()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    # ---- an attempt's life

    def expect(self, row: Row) -> None:
        """A row has come: its journal is begun by the first record, or by `settle`. None is begun
        when its run wants none, or when there is nothing to keep: a policy without tools makes one
        call, which its death costs in any case.
        """
        if self._lock < 0 or not row.value("on_unknown") or row.value("tools") == "[]":
            return
        key = read_key(row)
        if key in self._open:
            return
        self._expected[key] = row
        if row.value("handed"):
            self._begin(key)
            self._move_in(key, row)

    def settle(self) -> None:
        """Begin the journals of all rows that have come, before anybody hears that they have."""
        for key in list(self._expected):
            self._begin(key)

    def _begin(self, key: AttemptKey) -> None:
        """Make an expected row's file; nothing for any other."""
        row = self._expected.pop(key, None)
        if row is None:
            return
        path = self._folder / f"{key.rollout_id}.{key.attempt}.{key.run_id}{SUFFIX}"
        try:
            fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        except OSError as error:
            self._gave_up(key, error)
            return
        self._open[key] = _Open(path, fd)
        batch = row.as_batch
        self._write(key, FrameKind.ROW, batch.replace_schema_metadata(None).serialize())
        self._sync_folder(key)

    def _move_in(self, key: AttemptKey, row: Row) -> None:
        """What another node has handed over of the attempt becomes the beginning of its journal."""
        path = handed_path(self._folder, key)
        try:
            prefix = frames.read(path.read_bytes())
            if prefix.damage:
                raise SchemaError(f"{prefix.damage}, byte {prefix.end}", "sealed frames")
            past = _parse(path, prefix)
        except (OSError, SchemaError) as error:
            log.warning("%s begins anew: what was handed over cannot be read: %s", key, error)
            path.unlink(missing_ok=True)
            return
        for frame in prefix.frames:
            if frame.kind in _READ:
                self._write(key, FrameKind(frame.kind), bytes(frame.body))
        earlier = next((r for r in reversed(past.records) if isinstance(r, Moved)), None)
        moved = Moved(
            resumes=past.epoch + 1 + (earlier.resumes if earlier else 0),
            seed_attempt=earlier.seed_attempt if earlier else past.key.attempt,
            workspace=bool(row.value("sandbox")["sandbox_id"]),
        )
        self._write(key, FrameKind.MOVED, moved_body(moved))
        self._pasts[key] = past._replace(key=key, records=(*past.records, moved)), 0
        path.unlink(missing_ok=True)

    def past(self, key: AttemptKey) -> bytes:
        """A journal as another node can go on with it: without how it ended here; empty when there
        is none, or nothing has happened yet.
        """
        journal = self._open.get(key)
        if journal is None:
            return b""
        kept = [f for f in frames.read(journal.path.read_bytes()).frames if f.kind != FrameKind.END]
        if not any(frame.kind in _READ for frame in kept):
            return b""
        return b"".join(
            frames.seal(frame.kind, number, frame.body) + frame.body
            for number, frame in enumerate(kept)
        )

    def attempt(
        self, key: AttemptKey, *, on_unknown: str, forked: ForkOrigin | None = None, anew: str = ""
    ) -> AttemptJournal:
        """The journal of an attempt that begins, or goes on."""
        recovered, epoch = self._pasts.pop(key, (None, 0))
        kept = key in self._open or key in self._expected
        journal = AttemptJournal(
            partial(self._write, key) if kept else None,
            keep=partial(self._begin, key),
            on_unknown=on_unknown,
            epoch=epoch,
            forked=forked,
            anew="" if recovered else anew,
        )
        for record in recovered.records if recovered else ():
            journal.remember(record)
        return journal

    def adopt(self, recovered: Recovered, epoch: int) -> None:
        """Go on writing what the last life left, as the life `epoch`."""
        try:
            fd = os.open(recovered.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(fd, recovered.num_bytes)
        except OSError as error:
            self._gave_up(recovered.key, error)
            self.refuse(recovered)
        else:
            self._open[recovered.key] = _Open(
                recovered.path, fd, recovered.num_bytes, recovered.num_frames
            )
            self._write(recovered.key, FrameKind.LIFE, body(FrameKind.LIFE, epoch))
        # Last: a journal that cannot be written any more is given up, what was read of it is not.
        self._pasts[recovered.key] = recovered, epoch

    def refuse(self, recovered: Recovered) -> None:
        """Forget what the last life left: another has the attempt, or nobody any more."""
        self.num_bytes -= recovered.num_bytes
        recovered.path.unlink(missing_ok=True)

    def drop(self, key: AttemptKey) -> None:
        """The attempt is no longer in hand; idempotent."""
        self._pasts.pop(key, None)
        self._expected.pop(key, None)
        journal = self._open.pop(key, None)
        if journal is not None:
            os.close(journal.fd)
            self.num_bytes -= journal.num_bytes
            journal.path.unlink(missing_ok=True)

    # ---- writing

    def _write(self, key: AttemptKey, kind: FrameKind, record: bytes) -> None:
        self._begin(key)
        journal = self._open.get(key)
        if journal is None:
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
            self._gave_up(key, error)
            return
        journal.num_frames += 1
        journal.num_bytes += size
        self.num_bytes += size

    def _sync_folder(self, key: AttemptKey) -> None:
        """A file is there after a power cut when its folder is."""
        if self._sync is None or key not in self._open:
            return
        try:
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self._gave_up(key, error)

    def _gave_up(self, key: AttemptKey, error: OSError) -> None:
        self.num_given_up += 1
        log.warning("%s goes on without a journal: %s", key, error)
        self.drop(key)

    # ---- reading

    def _recover(self, path: Path) -> Recovered | None:
        """What a file holds up to its first torn frame; None, aloud, when it is damaged."""
        prefix = frames.read(path.read_bytes())
        try:
            if prefix.damage:
                raise SchemaError(f"{prefix.damage}, byte {prefix.end}", "sealed frames")
            recovered = _parse(path, prefix)
        except SchemaError as error:
            log.warning("the journal %s is refused, its attempt begins anew: %s", path.name, error)
            path.unlink(missing_ok=True)
            return None
        self.num_bytes += prefix.end
        return recovered


def handed_path(folder: Path, key: AttemptKey) -> Path:
    """Where INIT leaves what another node has handed over, for whichever RUN worker of this node
    gets the row; `folder` is that of any of them.
    """
    return folder.parent / "handed" / f"{key.rollout_id}.{key.attempt}.{key.run_id}{SUFFIX}"


def _read(kind: FrameKind, batch: pa.RecordBatch) -> Record:
    try:
        return _READ[kind](batch)
    except (ValueError, TypeError) as error:
        raise SchemaError(f"a {kind.name} record makes no sense: {error}", "a record") from None


def look(path: Path) -> Recovered | None:
    """What a file holds that another process may be writing; None while it holds no whole row."""
    try:
        prefix = frames.read(path.read_bytes())
    except FileNotFoundError:
        return None
    return _parse(path, prefix) if prefix.frames else None


def _parse(path: Path, prefix: frames.Prefix) -> Recovered:
    """The records of a file's frames. Raises SchemaError for what a worker cannot have written."""
    row: Row | None = None
    epoch = 0
    records: list[Record] = []
    for place, frame in enumerate(prefix.frames):
        if frame.kind not in SCHEMAS or (frame.kind == FrameKind.ROW) != (place == 0):
            raise SchemaError(f"frame {place} is of kind {frame.kind}", "a row, then records")
        kind = FrameKind(frame.kind)
        batch = row_of(kind, frame.body)
        if kind is FrameKind.ROW:
            row = Row(batch.replace_schema_metadata(SCHEMAS[kind].metadata), 0)
        elif kind is FrameKind.LIFE:
            epoch = batch.column("epoch")[0].as_py()
        else:
            records.append(_read(kind, batch))
    if row is None:
        raise SchemaError("it holds no row", "a row, then records")
    return Recovered(
        read_key(row), row, epoch, tuple(records), path, prefix.end, len(prefix.frames)
    )
