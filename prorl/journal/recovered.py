"""What the last life of a worker left of an attempt, read from its file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from prorl.errors import SchemaError
from prorl.journal import frames
from prorl.journal.records import (
    FrameKind,
    Life,
    Past,
    read,
    read_row,
)
from prorl.schema.columns import read_key
from prorl.schema.rows import Row
from prorl.types import AttemptKey

_KINDS = frozenset(FrameKind)


class Recovered(NamedTuple):
    """What the last life of this worker left of an attempt."""

    key: AttemptKey
    row: Row
    epoch: int
    """Of its last life."""
    records: tuple[Past, ...]
    path: Path
    num_bytes: int
    num_frames: int


def reopened(recovered: Recovered) -> int:
    """A journal of the last life, open behind its last whole frame."""
    fd = os.open(recovered.path, os.O_WRONLY | os.O_APPEND)
    try:
        os.ftruncate(fd, recovered.num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def look(path: Path) -> Recovered | None:
    """What a file holds that another process may be writing; None while it holds no whole row."""
    try:
        prefix = frames.read(path.read_bytes())
    except FileNotFoundError:
        return None
    return parse_journal(path, prefix) if prefix.frames else None


def parse_journal(path: Path, prefix: frames.Prefix) -> Recovered:
    """The records of a file's frames. Raises SchemaError for what a worker cannot have written."""
    row: Row | None = None
    epoch = 0
    records: list[Past] = []
    for place, frame in enumerate(prefix.frames):
        if frame.kind not in _KINDS or (frame.kind == FrameKind.ROW) != (place == 0):
            raise SchemaError(f"frame {place} is of kind {frame.kind}", "a row, then records")
        if place == 0:
            row = Row(read_row(frame.body), 0)
            continue
        record = read(FrameKind(frame.kind), frame.body)
        if isinstance(record, Life):
            epoch = record.epoch
        else:
            records.append(record)
    if row is None:
        raise SchemaError("it holds no row", "a row, then records")
    return Recovered(
        read_key(row), row, epoch, tuple(records), path, prefix.end, len(prefix.frames)
    )
