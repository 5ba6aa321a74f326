"""What stored trajectories cost: bytes a token, time to read, commits.

Bytes and the time to read them all into arrays stand beside JSON lines with zstd and others
(`rivals/store.py`) of the same rows. Then come a durable commit, and what readers pay for the
number of commits, before and after compaction, each measured in a process of its own. Tokens are
drawn as words are (Zipf over 50,000 ids), each by itself; real text compresses better on both
sides. Logprobs are continuous float32, as a log-softmax gives them; every second token has one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prorl.bench.children import NO_RIVALS, RIVALS
from prorl.bench.report import Figure, Report, median, verdict
from prorl.bench.stored import make_run, rollout_tables
from prorl.storage.files.commit_files import Commit
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.files.parts import encode, part_file
from prorl.storage.keep.collect import collect
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import StoredRun

SAME_ROWS = "the same rows, the same run"
BARS = (2.0, 20.0)
"""Of size and speed beside JSON lines."""
COLUMNS = ["token_ids", "logprobs"]


async def run(quick: bool) -> Report:
    rollouts, tokens = (400, 6000) if quick else (4000, 4000)
    commits, each = (400, 5) if quick else (4000, 5)
    with tempfile.TemporaryDirectory(prefix="prorl-store-") as folder:
        rows = [
            *_format(Path(folder), rollouts, tokens),
            _commit(Path(folder) / "commits", 20 if quick else 100),
            *await _growth(Path(folder), commits, each),
        ]
    return Report(bench="store", rows=tuple(rows))


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
    if not RIVALS:
        return [replace(size, note=NO_RIVALS), speed]
    from prorl.bench.rivals.store import rivals

    figures = []
    for rival in rivals(folder, rows):
        assert rival.scan() == scan(), rival.name
        scanned = total / _cpu(rival.scan)
        pair = (
            size.beside(rival.name, rival.num_bytes / total, SAME_ROWS),
            speed.beside(rival.name, scanned, SAME_ROWS, more_is_better=True),
        )
        for row, bar in zip(pair, BARS, strict=True):
            met = f"bar {bar:g}x: {'met' if (row.ratio or 0.0) >= bar else 'missed'}"
            barred = rival.name.startswith("JSON lines")
            figures.append(replace(row, note=met) if barred else row)
    return figures


def _scan(run: RunDir) -> int:
    found = StoredRun(run.where).read("sequences", COLUMNS)
    return sum(len(column.combine_chunks().flatten().to_numpy()) for column in found.columns)


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


async def _growth(folder: Path, commits: int, each: int) -> list[Figure]:
    """CPU of whole reader processes, before and after: the rival is the run not compacted."""
    run = make_run(folder / "long", commits * each, commits)
    before = {name: await reader(run.where, code) for name, code in READERS.items()}
    began = time.process_time()
    compact(run)
    spent = time.process_time() - began
    collect(run, grace_s=0)
    rows = [Figure(what="compact_cpu_ms_per_commit", value=1e3 * spent / commits, unit="ms")]
    for name, code in READERS.items():
        after = await reader(run.where, code)
        note = f"{after.rss_mb:.0f} MB, before {before[name].rss_mb:.0f}"
        row = Figure(what=f"{name}_cpu_s", value=after.cpu_s, unit="s", note=note)
        rows.append(row.beside(f"{commits:,} commits, not compacted", before[name].cpu_s))
    return rows


READERS = {
    "count_sql": "from prorl.storage.read.catalog import query\n"
    "query(WHERE, 'select count(*) from rollouts')",
    "show_rollout": "from prorl.storage.read.catalog import query\n"
    "query(WHERE, 'select * from rollouts where rollout_id = 7')\n"
    "query(WHERE, 'select * from messages where rollout_id = 7')",
    "replay_first_batch": "import asyncio\n"
    "from prorl.storage.read.replay import open_replay\n"
    "from prorl.storage.serve.delivery import Wanted\n"
    "order, index = open_replay(WHERE)\n"
    "for group in asyncio.run(order.take(Wanted('b', 0, 16, 1 << 30, 0.0))).groups:\n"
    "    index.read(group)",
}


_PEAK = """
import sys
with open("/proc/self/status") as status:
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
"""
"""The peak of its own memory: what the kernel tells of an ended child counts the memory of the
process that started it, too.
"""


class Spent(NamedTuple):
    """What one process spent on reading."""

    cpu_s: float
    rss_mb: float
    wall_s: float


async def reader(where: str, code: str) -> Spent:
    """Run one; raises when it fails."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", f"WHERE = {where!r}\n{code}\n{_PEAK}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with child:
        assert child.stderr is not None
        said = (await asyncio.to_thread(child.stderr.read)).decode()
        # Not `child.wait()`: what the child used is told once, to whoever reaps it.
        _, status, used = await asyncio.to_thread(os.wait4, child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - began
    assert child.returncode == 0, f"a reader ended with {child.returncode}: {said}"
    return Spent(used.ru_utime + used.ru_stime, int(said.split()[-1]) / 1024, wall_s)
