"""What stored trajectories cost: bytes a token, time to read, commits.

Bytes and the time to read them all into arrays stand beside JSON lines with zstd and others
(`store_rivals.py`) of the same rows. Then come a durable commit, and what readers pay for the
number of commits, before and after compaction, each measured in a process of its own. Tokens are
drawn as words are (Zipf over 50,000 ids), each by itself; real text compresses better on both
sides. Logprobs are continuous float32, as a log-softmax gives them; every second token has one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from prorl.bench.machine import machine
from prorl.bench.readers import READERS, reader
from prorl.bench.report import Figure, Report
from prorl.bench.store_rivals import COLUMNS, rivals
from prorl.bench.stored import make_run
from prorl.bench.stored_tables import rollout_tables
from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.commit_files import Commit
from prorl.storage.compact import compact
from prorl.storage.durable import write_durably
from prorl.storage.layout import RunDir
from prorl.storage.parts import encode, part_file

SAME_ROWS = "the same rows, the same run"
BARS = (2.0, 20.0)
"""Of size and speed beside JSON lines."""
GROWTH = ("count_sql", "show_rollout", "replay_first_batch")


async def run(quick: bool) -> Report:
    """Measure; `quick` takes half a minute."""
    rollouts, tokens = (400, 6000) if quick else (4000, 4000)
    commits, each = (400, 5) if quick else (4000, 5)
    with tempfile.TemporaryDirectory(prefix="prorl-store-") as folder:
        rows = [
            *_format(Path(folder), rollouts, tokens),
            _commit(Path(folder) / "commits", 20 if quick else 100),
            *await _growth(Path(folder), commits, each),
        ]
    return Report(bench="store", machine=machine(), rows=tuple(rows))


def _format(folder: Path, rollouts: int, tokens: int) -> list[Figure]:
    run = make_run(folder / "tokens", rollouts, max(1, rollouts // 100), tokens)
    compact(run)
    stored = StoredRun(run.where)
    rows = stored.read("sequences")
    total = len(rows.column("token_ids").combine_chunks().flatten())
    ours = sum(file.bytes for file in stored.files("sequences"))
    scan = partial(_scan, run)
    size = Figure(what="bytes_per_token", value=ours / total, unit="B")
    speed = Figure(what="scan_tokens_per_cpu_s", value=total / _cpu(scan), unit="tokens/s")
    figures = []
    for rival in rivals(folder, rows):
        assert rival.scan() == scan(), rival.name
        scanned = total / _cpu(rival.scan)
        pair = (
            size.beside(rival.name, rival.num_bytes / total, SAME_ROWS),
            speed.beside(rival.name, scanned, SAME_ROWS, more_is_better=True),
        )
        barred = rival.name.startswith("JSON lines")
        figures += [
            _barred(row, bar) if barred else row for row, bar in zip(pair, BARS, strict=True)
        ]
    return figures


def _scan(run: RunDir) -> int:
    """Open the run and read every value of the sequences."""
    found = StoredRun(run.where).read("sequences", COLUMNS)
    return sum(len(column.combine_chunks().flatten().to_numpy()) for column in found.columns)


def _barred(row: Figure, bar: float) -> Figure:
    return replace(row, note=_bar(row.ratio or 0.0, bar))


def _bar(ratio: float, bar: float) -> str:
    return f"bar {bar:g}x" if ratio >= bar else f"missed: bar {bar:g}x"


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
    value = statistics.median(waits)
    note = "bar 50 ms" if value <= 50 else "missed: bar 50 ms"
    return Figure(what="commit_p50_ms", value=value, unit="ms", repeats=tuple(waits), note=note)


async def _growth(folder: Path, commits: int, each: int) -> list[Figure]:
    """CPU of whole reader processes, before and after: the rival is the run not compacted."""
    run = make_run(folder / "long", commits * each, commits)
    before = {
        name: await reader(run.where, code) for name, code in READERS.items() if name in GROWTH
    }
    began = time.process_time()
    compact(run)
    spent = time.process_time() - began
    collect(run, grace_s=0)
    rows = [Figure(what="compact_cpu_ms_per_commit", value=1e3 * spent / commits, unit="ms")]
    for name in GROWTH:
        code = READERS[name]
        after = await reader(run.where, code)
        note = f"{after.rss_mb:.0f} MB, before {before[name].rss_mb:.0f}"
        row = Figure(what=f"{name}_cpu_s", value=after.cpu_s, unit="s", note=note)
        rows.append(row.beside(f"{commits:,} commits, not compacted", before[name].cpu_s))
    return rows
