"""Other ways to keep token sequences, each with the same rows.

Rows say how many bytes they take, and how long it is until all ids and logprobs are arrays. Every
one reads what it needs and nothing else. Parquet lists that are neither compressed nor checked are
what a reader of lists cannot be faster than.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from prorl.bench.store import COLUMNS

LEVEL = 3


class StoreRival(NamedTuple):
    """One of them, written."""

    name: str
    num_bytes: int
    scan: Callable[[], int]
    """Read all; how many ids and logprobs there were."""


def rivals(folder: Path, rows: pa.Table) -> Iterator[StoreRival]:
    """Each in turn; those whose package is not here are left out."""
    yield _json_lines(rows)
    yield _json_column(folder, rows)
    yield _plain_parquet(folder, rows)
    if find_spec("torch"):
        yield _torch(folder, rows)
    if find_spec("lance"):
        yield _lance(folder, rows)


def _arrays(row: dict[str, Any]) -> int:
    return len(np.array(row["token_ids"], np.int32)) + len(np.array(row["logprobs"], np.float32))


def _count(found: pa.Table) -> int:
    return sum(len(found.column(name).combine_chunks().flatten().to_numpy()) for name in COLUMNS)


def _json_lines(rows: pa.Table) -> StoreRival:
    lines = b"\n".join(orjson.dumps(row) for row in rows.to_pylist())
    packed = pa.Codec("zstd", LEVEL).compress(lines)

    def scan() -> int:
        text = pa.Codec("zstd").decompress(packed, len(lines))
        return sum(map(_arrays, map(orjson.loads, bytes(memoryview(text)).split(b"\n"))))

    return StoreRival(f"JSON lines, zstd level {LEVEL}", len(packed), scan)


def _json_column(folder: Path, rows: pa.Table) -> StoreRival:
    path = folder / "json.parquet"
    text = pa.table({"row": [orjson.dumps(row).decode() for row in rows.to_pylist()]})
    pq.write_table(text, path, compression="zstd", compression_level=LEVEL, use_dictionary=False)

    def scan() -> int:
        found = pq.read_table(path).column("row").to_pylist()
        return sum(map(_arrays, map(orjson.loads, found)))

    return StoreRival("Parquet with one JSON column", path.stat().st_size, scan)


def _plain_parquet(folder: Path, rows: pa.Table) -> StoreRival:
    path = folder / "plain.parquet"
    pq.write_table(rows, path, compression="none", use_dictionary=False)
    name = "Parquet lists, neither compressed nor checked"
    return StoreRival(
        name, path.stat().st_size, lambda: _count(pq.read_table(path, columns=COLUMNS))
    )


def _torch(folder: Path, rows: pa.Table) -> StoreRival:
    torch: Any = import_module("torch")
    path = folder / "rows.pt"
    torch.save(
        {
            name: [torch.from_numpy(np.array(each.values)) for each in rows.column(name)]
            for name in COLUMNS
        },
        path,
    )

    def scan() -> int:
        found = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        return sum(len(each) for name in COLUMNS for each in found[name])

    return StoreRival("torch.save of lists of tensors", path.stat().st_size, scan)


def _lance(folder: Path, rows: pa.Table) -> StoreRival:
    lance: Any = import_module("lance")
    where = folder / "rows.lance"
    lance.write_dataset(rows.select(COLUMNS), str(where))
    size = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    return StoreRival(
        "Lance", size, lambda: _count(lance.dataset(str(where)).to_table(columns=COLUMNS))
    )
