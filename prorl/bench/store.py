"""Measures the cost of stored trajectories: bytes a token and CPU to read, beside JSON lines with
zstd of the same rows, and a durable commit.

Tokens are drawn as words are (Zipf over 50,000 ids), each by itself; real text compresses better on
both sides. Logprobs are continuous float32, as a log-softmax gives them; every second token has
one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.analysis.synthetic_runs import make_run, rollout_tables
from prorl.bench.report import Figure, Report, median, verdict
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import Commit, RunDir
from prorl.storage.files.parts import encode, part_file
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import StoredRun

BARS = (2.0, 20.0)
"""The bars of size and speed beside JSON lines."""
LEVEL = 3
COLUMNS = ["token_ids", "logprobs"]


async def run(quick: bool) -> Report:
    rollouts, tokens = (400, 6000) if quick else (4000, 4000)
    with tempfile.TemporaryDirectory(prefix="prorl-store-") as folder:
        rows = [
            *_format(Path(folder), rollouts, tokens),
            _commit(Path(folder) / "commits", 20 if quick else 100),
        ]
    return Report(bench="store", rows=tuple(rows))


def _format(folder: Path, rollouts: int, tokens: int) -> list[Figure]:
    run = make_run(folder / "tokens", rollouts, max(1, rollouts // 100), tokens)
    compact(run)
    stored = StoredRun(run.where)
    rows = stored.read("sequences")
    total = len(rows.column("token_ids").combine_chunks().flatten())
    ours = sum(file.bytes for file in stored.files("sequences"))
    lines = b"\n".join(orjson.dumps(row) for row in rows.to_pylist())
    packed = pa.Codec("zstd", LEVEL).compress(lines)
    scan, theirs = partial(_scan, run), partial(_scan_lines, packed, len(lines))
    assert scan() == theirs()
    size = Figure(name="bytes_per_token", value=ours / total, unit="B")
    speed = Figure(name="scan_tokens_per_cpu_s", value=total / _cpu(scan), unit="tokens/s")
    name, same = f"JSON lines, zstd level {LEVEL}", "the same rows, the same run"
    pair = (
        size.beside(name, len(packed) / total, same),
        speed.beside(name, total / _cpu(theirs), same, more_is_better=True),
    )
    return [
        replace(row, note=f"bar {bar:g}x: {'met' if (row.ratio or 0.0) >= bar else 'missed'}")
        for row, bar in zip(pair, BARS, strict=True)
    ]


def _scan(run: RunDir) -> int:
    table = StoredRun(run.where).read("sequences", COLUMNS)
    return sum(len(column.combine_chunks().flatten().to_numpy()) for column in table.columns)


def _scan_lines(packed: Any, size: int) -> int:
    """Ids and logprobs of JSON lines as arrays."""
    count = 0
    for line in bytes(pa.Codec("zstd").decompress(packed, size)).split(b"\n"):
        row = orjson.loads(line)
        count += len(np.array(row["token_ids"], np.int32))
        count += len(np.array(row["logprobs"], np.float32))
    return count


def _cpu(work: Callable[[], int]) -> float:
    """Median CPU seconds of three times."""
    spent = []
    for _ in range(3):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def _commit(where: Path, count: int) -> Figure:
    """Eight rollouts of 1,000 tokens: encode, hash, make durable, publish; without the log."""
    run = RunDir(where)
    make_run(where, 8, 1)
    waits = []
    for seq in range(2, count + 2):
        began = time.perf_counter()
        ids, rng = np.arange(seq * 8, seq * 8 + 8), np.random.default_rng(seq)
        files = []
        for table, rows in rollout_tables(ids, 1000, rng).items():
            content = encode(table, rows, "b", f"part-{seq}")
            files.append(part_file(table, f"part-{seq}", rows, content))
            write_durably(run.fs, run.path(files[-1].path), content)
        commit = Commit(commit_seq=seq, part=f"part-{seq}", files=tuple(files), run_id="b")
        write_durably(run.fs, run.commit_path(seq), commit.dumps())
        waits.append(1e3 * (time.perf_counter() - began))
    return median("commit_p50_ms", waits, "ms", note=verdict(statistics.median(waits), 50.0))
