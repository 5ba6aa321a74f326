"""Reads rows from a path, each with its place for people (docs/tasks.md, Containers).

A row that cannot be read is given as a TaskError, so that a reader may go on behind it; a file that
cannot be read raises one.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from prorl import exact_json
from prorl.errors import TaskError
from prorl.tasks.formats import Row
from prorl.tasks.formats.questions import ANSWERS
from prorl.types import Json

_GZIP_MAGIC, _PARQUET_MAGIC = b"\x1f\x8b", b"PAR1"
_UTF8_MARK = b"\xef\xbb\xbf"
_BATCH_ROWS = 256
_HEAD = 4096
MEND_LINE = (
    "mend or remove the line, or leave such lines out: --skip-invalid (in Python skip_invalid=True)"
)
CSV_TO_JSON = (
    'python3 -c "import csv, json, sys;'
    ' [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]" < {} > {}'
)
_CSV_HEADER = re.compile(rb"[\w .\"-]+([,;\t][\w .\"-]+)+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")

TASK_DEPTH = 3
"""Levels below a folder at which Harbor's task folders are looked for: collections keep them one or
two levels deep.
"""
MAX_LINE = 64 << 20
"""Bytes of a line: a file without ends of lines is not read whole to find that out."""


class Placed(NamedTuple):
    place: str
    """`FILE, line 3` or `FILE, row 3`."""
    row: Row | TaskError
    """An error without a place for what is no row."""


def read_rows(path: Path) -> Iterator[Placed]:
    """Rows in their order. Raises TaskError for a file or folder that cannot be read."""
    if path.is_dir() and (folders := list(task_folders(path))):
        for folder in folders:
            place = str(folder) if str(folder).isprintable() else repr(str(folder))
            yield Placed(place, {"harbor_folder": str(folder)})
        return
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
            f"no file {path}",
            "a task file, or a folder of Harbor tasks",
            f"beside it: {', '.join(near)}" if near else "",
        ) from cause
    except OSError as cause:
        raise TaskError(f"cannot read {path}: {cause.strerror}", "a readable file") from cause


# ---- columns


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow.parquet as pq

    from prorl.schema import ARROW_ERRORS

    try:
        with pq.ParquetFile(path) as file:
            yield from _batches(path, file.iter_batches(_BATCH_ROWS))
    except ARROW_ERRORS as cause:
        raise TaskError(
            f"{path} is not a whole Parquet file ({cause})", "an intact file"
        ) from cause


def _arrow(path: Path) -> Iterator[Placed]:
    import pyarrow as pa

    from prorl.schema import ARROW_ERRORS

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            yield from _batches(path, reader)
    except ARROW_ERRORS as cause:
        raise TaskError(
            f"{path} is not a whole Arrow stream ({cause})", "an intact file"
        ) from cause


def _batches(path: Path, batches: Json) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Placed(f"{path}, row {number}", _plain(row))


def _plain(value: Json) -> Json:
    """A value of a column as JSON has it: times as text, bytes as base64, decimals exactly.

    Arrow gives each object the keys of all rows' objects; those without a value are left out.
    """
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else str(value)
    return value


# ---- lines


def _json(path: Path) -> Iterator[Placed]:
    """Lines one by one, so that a limit bounds what is read; a list of objects whole."""
    try:
        with _unpacked(path) as file:
            # as bytes: text may hold U+2028, at which a split of text would cut
            head = file.peek(_HEAD).removeprefix(_UTF8_MARK)
            if head.lstrip()[:1] == b"[" and (listed := _list(path, file)) is not None:
                yield from listed
                return
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE:
                    problem = f"more than {MAX_LINE >> 20} MiB without an end of line"
                    raise TaskError(f"{place}: {problem}", "one JSON object a line")
                if number == 1:
                    line = line.removeprefix(_UTF8_MARK)
                    _refuse_csv(path, line)
                if line.strip():
                    yield Placed(place, _line(line))
    except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
        raise TaskError(
            f"{path} is not a whole gzip file ({cause})", "an intact file", "fetch it again"
        ) from cause
    except OSError as cause:
        raise TaskError(f"cannot read {path}: {cause.strerror}", "a readable file") from cause


def _refuse_csv(path: Path, line: bytes) -> None:
    """Raises TaskError for the header of a CSV file: its rows are not bad lines to be left out."""
    if _CSV_HEADER.fullmatch(line.strip()):
        raise TaskError(
            f"{path} looks like CSV: its first line is {line.strip()[:60].decode()!r}",
            "JSON Lines, a JSON list or Parquet",
            "convert it: "
            + CSV_TO_JSON.format(shlex.quote(str(path)), shlex.quote(f"{path}.jsonl")),
        )


def _list(path: Path, file: Any) -> list[Placed] | None:
    """The whole file as one list of objects; None, and back at the start, when it is none."""
    text = file.read().removeprefix(_UTF8_MARK)
    try:
        value = exact_json.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not value or not all(isinstance(row, dict) for row in value):
        file.seek(0)
        return None
    if any(map(_float_answers, value)):
        for row, written in zip(value, exact_json.loads_as_written(text), strict=True):
            _keep_answers(row, written)
    return [Placed(f"{path}, row {i}", _object(row)) for i, row in enumerate(value, 1)]


def _line(line: bytes) -> Row | TaskError:
    try:
        value = exact_json.loads(line)
        if _float_answers(value):
            _keep_answers(value, exact_json.loads_as_written(line))
        return _object(value)
    except orjson.JSONDecodeError as cause:
        excerpt = line.strip()[:60].decode("utf-8", "replace")
        return TaskError(
            f"{excerpt!r} is not valid JSON ({cause.msg})", "one JSON object a line", MEND_LINE
        )


def _object(value: Json) -> Row | TaskError:
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if inner is not None}
    return TaskError(f"found {type(value).__name__}", "one JSON object a line")


def _float_answers(row: Json) -> list[tuple[str, str]]:
    """Returns where answers stand that are floats: (the object's key or "", the answer's key). As a
    float `0.50` and `1e25` are other texts, and the grader reads the text.
    """
    if not isinstance(row, dict) or row.get("env", "math") not in ("math", "stem"):
        return []
    holders = {"": row, **{key: row.get(key) for key in ("data", "reward_model")}}
    return [
        (name, key)
        for name, values in holders.items()
        if isinstance(values, dict)
        for key in ANSWERS
        if isinstance(values.get(key), float)
    ]


def _keep_answers(row: dict[str, Json], written: dict[str, Json]) -> None:
    for name, key in _float_answers(row):
        values, texts = (row[name], written[name]) if name else (row, written)
        values[key] = texts[key]


@contextmanager
def _unpacked(path: Path) -> Iterator[Any]:
    """The file's bytes, unpacked. Raises TaskError for one that is no UTF-8."""
    with path.open("rb") as packed:
        head = packed.peek(_HEAD)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise TaskError(f"{path} is UTF-16", "UTF-8", "save it as UTF-8")
        if not head.startswith(_GZIP_MAGIC):
            yield packed
            return
        with gzip.GzipFile(fileobj=packed) as file, BufferedReader(file) as unpacked:
            yield unpacked


# ---- the files of a folder of rows


def is_rows(path: Path) -> bool:
    return path.name.endswith(_SUFFIXES)


def files_of(folder: Path) -> list[Path]:
    """Returns the files of a folder's one split. Raises TaskError."""
    if (splits := folder / "dataset_dict.json").exists():
        names = _splits(splits)
        if len(names) > 1:
            problem = f"{folder} holds the splits {', '.join(names)}"
            raise TaskError(problem, "one of them", f"name it: {folder / names[0]}")
        folder = folder / names[0]
    if (folder / "state.json").exists():
        return sorted(folder.glob("*.arrow"))
    paths = []
    for path in sorted(filter(is_rows, folder.rglob("*"))):
        parts = path.relative_to(folder).parts
        if len(parts) <= 3 and not any(part.startswith((".", "_")) for part in parts):
            paths.append(path)
    names = sorted({_SHARD.sub("", path.name.partition(".")[0]) for path in paths})
    if len(names) != 1:
        raise TaskError(
            f"{folder} is a directory with {', '.join(names) or 'no task file'}",
            "files of one split",
            f"name one: {paths[0]}" if paths else "",
        )
    return paths


def _splits(path: Path) -> list[str]:
    try:
        names = orjson.loads(path.read_bytes())["splits"]
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise TaskError(f"{path} cannot be read ({cause})", "what `datasets` writes") from cause
    if not isinstance(names, list) or not names or any("/" in str(name) for name in names):
        raise TaskError(f"{path} names the splits {names!r}", "what `datasets` writes")
    return [str(name) for name in names]


# ---- Harbor's task folders


TASK_FILES = ("task.toml", "task.yaml")
"""The files of Harbor, and of terminal-bench 1."""


def task_folders(path: Path, depth: int = TASK_DEPTH) -> Iterator[Path]:
    """The task folders at or below a folder, in the order of their names.

    A folder that has the other parts of a task but no `task.toml` counts, so that it is reported.
    """
    has_parts = (path / "instruction.md").is_file() and (path / "tests").is_dir()
    if has_parts or any((path / name).is_file() for name in TASK_FILES):
        yield path
    elif depth:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from task_folders(Path(entry.path), depth - 1)
