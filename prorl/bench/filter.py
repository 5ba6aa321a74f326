"""`prorl bench filter`: what a user's SQL may cost the store that runs it, and its neighbours.

Rows: seconds until a query that never ends, and one that takes all memory that it can get, is
answered (as an error); how far their process and the store's grow meanwhile; and a decision of
another run's quick SQL, alone and beside the endless one. Each run's filter has a thread and a
process of its own, as in the store.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.control import GroupComplete
from prorl.linux.procfs import descendants, stat
from prorl.members import GroupMember
from prorl.storage.filter import TIMEOUT_S, GroupFilter
from prorl.storage.filter_process import GRACE_S, MEMORY_BYTES
from prorl.types import FailureClass, RolloutState

QUICK_SQL = "select group_id, avg(reward) > 0.2 as kept, '' as reason from rollouts group by 1"
ENDLESS = (
    "with recursive t(i) as (select 1 union all select i + 1 from t) select count(*) as group_id,"
    " true as kept, '' as reason from t"
)
HUNGRY = (
    "select group_id, true as kept, list(repeat('x', 100000) || i)::varchar as reason from"
    " rollouts, range(100000) t(i) group by group_id"
)
N, GROUPS = 8, 16
DECISIONS, QUICK_DECISIONS = 200, 50
MIB = 1 << 20


def _group(group_id: int) -> GroupComplete:
    members = tuple(
        GroupMember(
            rollout_id=group_id * N + i,
            sample_index=i,
            attempt=1,
            state=RolloutState.COMPLETED,
            failure_class=FailureClass.NONE,
            reward=float(i % 2),
            num_sampled=8,
        )
        for i in range(N)
    )
    return GroupComplete(group_id=group_id, task_id=f"t{group_id}", members=members)


def _rss(pid: int) -> int:
    found = stat(pid)
    return found.rss_bytes if found else 0


class Watch:
    """The largest size of this process's children, and how far it grew itself."""

    def __init__(self) -> None:
        self._before, self._largest = _rss(os.getpid()), self._children()
        self.children = self.own = 0

    @staticmethod
    def _children() -> int:
        return max(map(_rss, descendants(os.getpid())), default=0)

    def look(self) -> None:
        """Once."""
        self.children = max(self.children, self._children())
        self.own = max(self.own, _rss(os.getpid()) - self._before)


@contextmanager
def _watched() -> Iterator[Watch]:
    watch, ended = Watch(), threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            watch.look()

    thread = threading.Thread(target=look)
    thread.start()
    yield watch
    ended.set()
    thread.join()


def _hostile(what: str, sql: str) -> list[Figure]:
    """One group's decision by SQL that means ill."""
    chosen = GroupFilter(sql)
    with _watched() as watch:
        began = time.monotonic()
        (decision,) = chosen.decide([_group(0)])
        took = time.monotonic() - began
    chosen.close()
    assert not decision.kept, decision
    bar = f"bar: {TIMEOUT_S + GRACE_S:g}, and a moment; {decision.reason[:90]}"
    held = f"bar: {MEMORY_BYTES // MIB} above the {_empty_mb():.0f} of a process that waits"
    return [
        Figure(what=f"{what}_answered_s", value=took, unit="s", note=bar),
        Figure(what=f"{what}_process_mb", value=watch.children / MIB, unit="MiB", note=held),
        Figure(what=f"{what}_store_grew_mb", value=watch.own / MIB, unit="MiB"),
    ]


def _empty_mb() -> float:
    """Of a filter's process before it is asked anything."""
    chosen = GroupFilter(QUICK_SQL)
    (pid,) = descendants(os.getpid())
    size = _rss(pid) / MIB
    chosen.close()
    return size


def _decide(chosen: GroupFilter, count: int) -> list[float]:
    """Milliseconds of each decision over some groups."""
    taken = []
    for i in range(count):
        began = time.monotonic()
        chosen.decide([_group(i * GROUPS + j) for j in range(GROUPS)])
        taken.append(1000 * (time.monotonic() - began))
    return taken


def _figure(what: str, taken: list[float]) -> Figure:
    worst = max(taken)
    return Figure(
        what=what, value=statistics.median(taken), unit="ms", note=f"longest {worst:.0f} ms"
    )


def _beside(work: Callable[[], list[float]]) -> tuple[list[float], Future[object]]:
    """The work, while another run's filter does not end."""
    slow, thread = GroupFilter(ENDLESS), ThreadPoolExecutor(1)
    asked: Future[object] = thread.submit(slow.decide, [_group(0)])
    try:
        return work(), asked
    finally:
        thread.submit(slow.close)
        thread.shutdown(wait=True)


async def run(quick: bool) -> Report:
    """Measure."""
    rows = await asyncio.to_thread(_measure, QUICK_DECISIONS if quick else DECISIONS)
    return Report(bench=Path(__file__).stem, machine=machine(), rows=tuple(rows))


def _measure(decisions: int) -> list[Figure]:
    rows = [*_hostile("endless", ENDLESS), *_hostile("hungry", HUNGRY)]
    chosen = GroupFilter(QUICK_SQL)
    _decide(chosen, 5)
    alone = _decide(chosen, decisions)
    beside, _ = _beside(lambda: _decide(chosen, decisions))
    chosen.close()
    rows.append(_figure("quick_sql_alone_ms", alone))
    rows.append(_figure("quick_sql_beside_an_endless_one_ms", beside))
    return rows
