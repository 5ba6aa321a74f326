"""Where rows come from: a path -> rows, each with its place for people.

| path | rows |
|---|---|
| file | JSON Lines, plain or gzipped; one JSON list; Parquet |
| folder | what `datasets.save_to_disk` wrote; else its only split of Parquet or JSON Lines files |

What kind of file it is, is seen from its first bytes, not from its name. A row that cannot be read
is given as a TaskError, so that a reader may go on behind it; a file that cannot be read raises
one.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from prorl.errors import TaskError
from prorl.tasks.formats import Row
from prorl.tasks.row_files import files_of, is_rows
from prorl.types import Json

_GZIP_MAGIC, _PARQUET_MAGIC = b"\x1f\x8b", b"PAR1"
_BATCH_ROWS = 256


class Placed(NamedTuple):
    """A row and where it was found."""

    place: str
    """`FILE, line 3` or `FILE, row 3`."""
    row: Row | TaskError
    """An error without a place for what is no row."""


def read_rows(path: Path) -> Iterator[Placed]:
    """Rows in their order. Raises TaskError for a file or folder that cannot be read."""
    for file in files_of(path) if path.is_dir() else [path]:
        if file.suffix == ".arrow":
            yield from _arrow(file)
            continue
        head = _open(file)
        yield from _parquet(file) if head.startswith(_PARQUET_MAGIC) else _json(file)


def _open(path: Path) -> bytes:
    """A file's first bytes. Raises TaskError."""
    try:
        with path.open("rb") as file:
            return file.read(4)
    except FileNotFoundError as cause:
        near = (
            sorted(other.name for other in path.parent.iterdir() if is_rows(other))[:5]
            if path.parent.is_dir()
            else []
        )
        raise TaskError(
            f"no file {path}", "a task file", f"beside it: {', '.join(near)}" if near else ""
        ) from cause
    except OSError as cause:
        raise TaskError(f"cannot read {path}: {cause.strerror}", "a readable file") from cause


# ---- columns


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _batches(path, file.iter_batches(_BATCH_ROWS))
    except (pa.ArrowException, OSError) as cause:
        raise TaskError(
            f"{path} is not a whole Parquet file ({cause})", "an intact file"
        ) from cause


def _arrow(path: Path) -> Iterator[Placed]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            yield from _batches(path, reader)
    except (pa.ArrowException, OSError) as cause:
        raise TaskError(
            f"{path} is not a whole Arrow stream ({cause})", "an intact file"
        ) from cause


def _batches(path: Path, batches: Json) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Placed(f"{path}, row {number}", {key: _plain(row[key]) for key in row})


def _plain(value: Json) -> Json:
    """A value of a column as JSON has it: times as text, bytes as base64."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


# ---- lines


def _json(path: Path) -> Iterator[Placed]:
    content = _unpacked(path)
    if content.lstrip()[:1] == b"[" and (listed := _list(content)) is not None:
        for number, row in enumerate(listed, start=1):
            yield Placed(f"{path}, row {number}", _object(row))
        return
    # as bytes: text may hold U+2028, at which a split of text would cut
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield Placed(f"{path}, line {number}", _line(line))


def _list(content: bytes) -> list[Json] | None:
    """The whole file as one list of objects; None when it is none."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return value if value and all(isinstance(row, dict) for row in value) else None


def _line(line: bytes) -> Row | TaskError:
    try:
        return _object(orjson.loads(line))
    except orjson.JSONDecodeError as cause:
        shown = line.strip()[:60].decode("utf-8", "replace")
        return TaskError(f"{shown!r} is not valid JSON ({cause})", "one JSON object a line")


def _object(value: Json) -> Row | TaskError:
    if isinstance(value, dict):
        return value
    return TaskError(f"found {type(value).__name__}", "one JSON object a line")


def _unpacked(path: Path) -> bytes:
    """The file's bytes, unpacked, without a byte order mark. Raises TaskError."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
        raise TaskError(
            f"{path} is not a whole gzip file ({cause})", "an intact file", "fetch it again"
        ) from cause
    except OSError as cause:
        raise TaskError(f"cannot read {path}: {cause.strerror}", "a readable file") from cause
    return content.removeprefix(b"\xef\xbb\xbf")
