"""What stored trajectories cost: bytes a token and the time to read them all into arrays, against
JSON lines with zstd and others (`store_rivals.py`) of the same rows; a durable commit; and what
readers pay for the number of commits, before and after compaction, each measured in a process of
its own.

Tokens are drawn as words are (Zipf over 50,000 ids), each by itself; real text compresses better on
both sides. Logprobs are continuous float32, as a log-softmax gives them; every
second token has one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prorl.bench.readers import READERS, reader
from prorl.bench.report import Figure, Report, machine
from prorl.bench.store_rivals import COLUMNS, rivals
from prorl.bench.stored import make_run, rollout_tables
from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.compact import compact
from prorl.storage.durable import write_durably
from prorl.storage.layout import Commit, RunDir
from prorl.storage.parts import encode, part_file

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

    def scan() -> int:
        found = StoredRun(run.where).read("sequences", COLUMNS)
        return sum(len(column.combine_chunks().flatten().to_numpy()) for column in found.columns)

    mine = _cpu(scan)
    figures = []
    for rival in rivals(folder, rows):
        assert rival.scan() == scan(), rival.name
        theirs = _cpu(rival.scan)
        barred = rival.name.startswith("JSON lines")
        figures += [
            Figure(
                what="bytes_per_token",
                value=ours / total,
                unit="B",
                rival_value=rival.num_bytes / total,
                ratio=rival.num_bytes / ours,
                note=_bar(rival.num_bytes / ours, 2.0) if barred else "",
                rival=rival.name,
                rival_command="the same rows, the same run",
            ),
            Figure(
                what="scan_tokens_per_cpu_s",
                value=total / mine,
                unit="tokens/s",
                rival_value=total / theirs,
                ratio=theirs / mine,
                note=_bar(theirs / mine, 20.0) if barred else "",
                rival=rival.name,
                rival_command="the same rows, the same run",
            ),
        ]
    return figures


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
        rows.append(
            Figure(
                what=f"{name}_cpu_s",
                value=after.cpu_s,
                unit="s",
                rival=f"{commits:,} commits, not compacted",
                rival_value=before[name].cpu_s,
                ratio=before[name].cpu_s / after.cpu_s,
                note=f"{after.rss_mb:.0f} MB, before {before[name].rss_mb:.0f}",
            )
        )
    return rows
