"""What a long history costs its readers.

100,000 rollouts in 20,000 commits, before and after compaction, each reader a process of its own
(CPU seconds of the whole process, imports included); every ready analysis over the metadata of a
million rollouts; one rollout of the million, cold.

The directories are made through the store's own encoder; the whole takes about a quarter of an hour
and 2 GB of disk. `quick`: a fiftieth and a twentieth of it.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from prorl.bench.machine import machine
from prorl.bench.readers import READERS, Spent, reader
from prorl.bench.report import Figure, Report, median
from prorl.bench.stored import make_run
from prorl.storage.analyses import ANALYSES
from prorl.storage.catalog import StoredRun
from prorl.storage.collect import collect
from prorl.storage.compact import compact
from prorl.storage.layout import RunDir
from prorl.storage.opened import open_runs

BAR_S, BAR_MB, BAR_MS = 1.0, 1024.0, 50.0
LOOKUPS = 20


async def run(quick: bool) -> Report:
    """Measure; `quick` takes under a minute."""
    rollouts, commits = (2_000, 400) if quick else (100_000, 20_000)
    many = 50_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="prorl-history-") as folder:
        rows = await _readers(Path(folder) / "long", rollouts, commits)
        wide = make_run(Path(folder) / "wide" / "run", many, 100)
        _tidy(wide)
        rows += [*_analyses(wide, many), _lookup(wide, many)]
    return Report(bench="history", machine=machine(), rows=tuple(rows))


def _tidy(run: RunDir) -> None:
    compact(run)
    collect(run, grace_s=0)


async def _readers(root: Path, rollouts: int, commits: int) -> list[Figure]:
    run = make_run(root / "run", rollouts, commits)
    before = {name: await reader(run.where, code) for name, code in READERS.items()}
    _tidy(run)
    after = {name: await reader(run.where, code) for name, code in READERS.items()}
    return [
        figure
        for name, spent in after.items()
        for figure in _pair(name, spent, before[name], f"{commits:,} commits, not compacted")
    ]


def _pair(name: str, after: Spent, before: Spent, rival: str) -> list[Figure]:
    wall = f"{_met(after.cpu_s, BAR_S, 's')}; wall {after.wall_s:.2f} s"
    cpu = Figure(what=f"{name}_cpu_s", value=after.cpu_s, unit="s", note=wall)
    met = _met(after.rss_mb, BAR_MB, "MB")
    memory = Figure(what=f"{name}_rss_mb", value=after.rss_mb, unit="MB", note=met)
    return [cpu.beside(rival, before.cpu_s), memory.beside(rival, before.rss_mb)]


def _met(value: float, bar: float, unit: str) -> str:
    return f"{'' if value <= bar else 'missed: '}bar {bar:g} {unit}"


def _analyses(run: RunDir, rollouts: int) -> list[Figure]:
    opened, rows = open_runs(run.where), []
    for name, asked in ANALYSES.items():
        began, cpu = time.perf_counter(), time.process_time()
        opened.sql(asked.sql).rows()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        note = f"{_met(wall_s, BAR_S, 's')}; {rollouts:,} rollouts"
        rows.append(
            Figure(what=f"analysis_{name}_s", value=wall_s, unit="s", cpu_s=cpu_s, note=note)
        )
    return rows


def _lookup(run: RunDir, rollouts: int) -> Figure:
    """Open the run, read all of one rollout; nothing of it in the page cache."""
    chance, waits = random.Random(0), []
    for _ in range(LOOKUPS):
        _forget(Path(run.root))
        began = time.perf_counter()
        StoredRun(run.where).rollout(chance.randrange(rollouts))
        waits.append(1e3 * (time.perf_counter() - began))
    met = _met(statistics.median(waits), BAR_MS, "ms")
    return median("one_rollout_cold_p50_ms", waits, "ms", note=f"{met}; of {rollouts:,}")


def _forget(root: Path) -> None:
    """Have the kernel drop what it keeps of these files."""
    for path in root.rglob("*.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
