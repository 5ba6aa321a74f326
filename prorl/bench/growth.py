"""What one more rollout costs the gateway after many others: nothing may grow with history.

Others are a thousand, ten thousand, a hundred thousand; in the full form a million. The gateway's
mind and its log, driven by hand: every step is what the gateway does on its one loop, so the
longest step is how long that loop was blocked (the transaction runs on a thread of its own and is
counted apart). CPU milliseconds per item and of the longest step; `ratio` is the cost at the
smallest size divided by the cost at this one: below 0.67 it has grown by more than half.

Logs of all sizes are open at once and take turns, so that whatever else the machine does is in
every figure alike.
A restart of the store is what it reads back
of an open run, per rollout of it; `repeats` of the others are the rounds.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.bench.growth_log import Life, Meter, repeat
from prorl.bench.report import Figure, Report
from prorl.bench.stored import make_run
from prorl.config import RunConfig
from prorl.control import HandedOut, KeptGroup
from prorl.process import settle_heap
from prorl.storage.files.layout import RunDir
from prorl.storage.read.groups import GroupIndex
from prorl.storage.serve.delivery import LiveOrder
from prorl.storage.serve.history import History
from prorl.storage.serve.liverun import read_back
from prorl.storage.serve.replay import FactBook

SIZES = (1_000, 10_000, 100_000)
FULL = (*SIZES, 1_000_000)
SMALL = 10_000
"""A log of at most so many is made anew in every round: it would not stay that small."""

ROUNDS, QUICK_ROUNDS = 8, 4
MORE = 1_000
"""Rollouts that come to each log in a round."""

CANCELLED, IN_HAND = 4_000, 2_000
SEED = 1_000
"""Rollouts that live; SQL repeats their rows."""

COMMITS = 64
"""Commits, or packs of them, that a store reads back."""

STORE_ROUNDS = 3

MEMORY = 8_000
"""Rollouts whose memory is counted."""


class Size:
    """Logs with so many rollouts: all of them done, and all of them waiting in the pool."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size, self.meter = size, Meter()
        self._folder = folder
        self._lives: dict[str, Life] = {}

    def live(self, what: str) -> Life:
        if what not in self._lives:
            path = self._folder / f"{what}-{self.size}" / "control.db"
            life = Life(path, Meter())
            life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
            life.accept(SEED)
            if what == "done":
                life.work()
                life.commit_rest()
            life.log.close()
            repeat(path, self.size // SEED)
            life = Life(path, Meter())
            life.core.journal.mark_run(life.run)  # with its counts
            life.write(0)
            life.log.close()
            self._lives[what] = Life(path, self.meter)
        return self._lives[what]

    def round(self) -> None:
        done = self.live("done")
        done.restart("restart, all of it done")
        done.snapshot("store's snapshot, all of it done")
        done.accept(MORE)
        done.work()
        pooled = self.live("pooled")
        pooled.restart("restart, all of it pooled")
        pooled.snapshot("store's snapshot, all of it pooled")
        if self.size <= SMALL:
            self.close()

    def close(self) -> None:
        for what, life in self._lives.items():
            life.log.close()
            shutil.rmtree(self._folder / f"{what}-{self.size}")
        self._lives.clear()

    def end(self) -> None:
        """What can be done once only."""
        self.live("pooled").cancel("cancel, all of it pooled", min(CANCELLED, self.size))
        done = self.live("done")
        done.accept(IN_HAND)
        done.take(IN_HAND)
        done.cancel("cancel, in hand", IN_HAND)
        self.close()


def _memory() -> Iterator[Figure]:
    """Bytes of Python's that stay for one more rollout, by where it is in its life."""
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        life = Life(Path(folder) / "control.db", Meter())
        life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=MEMORY))
        held = []
        tracemalloc.start()
        for _ in range(2):  # after the first batch, tables have their size
            life.accept(MEMORY)
            life.work()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        finished = [held[1] - held[0]]
        with _held() as pooled:
            life.accept(MEMORY)
        with _held() as leased:
            life.core.pump(MEMORY)
            life.write(MEMORY)
        life.log.close()
    for what, left, note in (
        ("pooled", pooled, ""),
        ("open", leased, ""),
        ("finished", finished, "bar: 0"),
    ):
        what = f"memory of one more {what} rollout"
        yield Figure(what=what, value=left[0] / MEMORY, unit="B", note=note)


@contextmanager
def _held() -> Iterator[list[int]]:
    """Bytes that what is done in the block leaves behind."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    yield found
    gc.collect()
    found.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()


def _figures(sizes: list[Size]) -> Iterator[Figure]:
    first: dict[str, float] = {}
    for size in sizes:
        meter = size.meter
        # Transactions have a thread of their own, and a restart comes before anybody is served.
        serving = [w for w in meter.items if w != "transaction" and not w.startswith("restart")]
        slowest = max(serving, key=meter.longest_ms.__getitem__)
        yield Figure(
            what=f"longest step at {size.size:,}",
            value=meter.longest_ms[slowest],
            unit="ms",
            note=f"{slowest}; bar: at most 50",
        )
        for what in meter.items:
            cost = meter.cost_ms(what)
            yield Figure(
                what=f"{what} at {size.size:,}",
                value=cost,
                unit="ms",
                cpu_s=meter.cpu_s[what],
                ratio=first.setdefault(what, cost) / cost if cost else None,
                note=f"longest step {meter.longest_ms[what]:.1f} ms",
            )


async def run(quick: bool) -> Report:
    """Measure; `quick` stops at ten thousand."""
    settle_heap()  # as the gateway's process does
    rows = list(_memory())
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        sizes = [Size(Path(folder), size) for size in (SIZES[:2] if quick else FULL)]
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for size in sizes:
                size.round()
        for size in sizes:
            size.end()
        rows += _figures(sizes)
    rows += _stores(SIZES[:2] if quick else FULL)
    return Report(bench="growth", rows=tuple(rows))


def _stores(sizes: Iterable[int]) -> Iterator[Figure]:
    """What a store that has died reads of an open run before it serves, off its loop."""

    async def no_handout(groups: list[KeptGroup]) -> HandedOut:
        return HandedOut()

    async def no_cursor(consumer: str, seq: int) -> None:
        pass

    costs: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="prorl-growth-") as folder:
        for size in costs:
            make_run(Path(folder) / str(size), size, min(COMMITS, size // SEED), tokens=16)
        for _ in range(STORE_ROUNDS):
            for size, cost in costs.items():
                run = RunDir(str(Path(folder) / str(size)))
                order = LiveOrder("a", size=abs, handout=no_handout, save_cursor=no_cursor)
                began = time.process_time()
                read_back(GroupIndex(run), FactBook(), order, History())
                cost.append(1000 * (time.process_time() - began) / size)
    first = min(next(iter(costs.values())))
    for size, cost in costs.items():
        yield Figure(
            what=f"restart of the store at {size:,}",
            value=min(cost),
            unit="ms",
            repeats=tuple(cost),
            ratio=first / min(cost),
            note="per rollout of the open run, least of all rounds; not on the loop",
        )
