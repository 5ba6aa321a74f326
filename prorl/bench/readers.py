"""What people and trainers do first with a stored run, each as a process of its own.

Each is measured from its start to its end: imports, opening, answer.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import NamedTuple

READERS = {
    "open": "from prorl.storage.catalog import StoredRun\nStoredRun(WHERE)",
    "count_sql": "from prorl.storage.catalog import query\n"
    "query(WHERE, 'select count(*) from rollouts')",
    "show": "from prorl.cli.app import dispatch\nassert dispatch(['show', WHERE]) == 0",
    "show_rollout": "from prorl.storage.catalog import query\n"
    "query(WHERE, 'select * from rollouts where rollout_id = 7')\n"
    "query(WHERE, 'select * from messages where rollout_id = 7')",
    "ls": "from pathlib import Path\nfrom prorl.cli.app import dispatch\n"
    "assert dispatch(['ls', '--root', str(Path(WHERE).parent)]) == 0",
    "replay_first_batch": "import asyncio\n"
    "from prorl.storage.replay import open_replay\n"
    "from prorl.storage.delivery import Wanted\n"
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
