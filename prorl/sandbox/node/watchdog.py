"""Ends sandboxes that use more than their spec allows where the kernel does not hold them to it:
memory of all processes together without a control group, the workspace on disk and the terminals of
a kind that does not bound them.

A sampler, not a wall: between two looks a sandbox can exceed its limit by what it gets in that
time, and the end takes the whole sandbox, not one process. It looks once per `PERIOD_S`, less often
when looking would cost more than `SHARE` of a core, but at least each `MAX_PERIOD_S`: a fork storm
must not blind it.

Memory is what its processes have resident, shared pages in equal parts (PSS), counted exactly only
once their plain sum (RSS) is over the limit. tmpfs is bounded by its size instead; memory files and
System V segments that nobody maps escape. Disk is the blocks of what can be seen in the workspace,
an entry at least `ENTRY_BYTES`, so that inodes are bounded, too; a file that is deleted while open,
or lies in a folder closed to us, or deeper than a path can say, escapes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prorl.linux import procfs
from prorl.sandbox.kind import MAX_PTYS

if TYPE_CHECKING:
    from prorl.sandbox.node.live import LiveSandbox

PERIOD_S, MAX_PERIOD_S = 1.0, 4.0
"""Between two looks, at least and at most."""
SHARE = 0.01
"""The share of a core that looking may cost."""
SLICE = 64
"""Processes looked at before the loop may go on with something else."""
ENTRY_BYTES = 2048
PTYS = Path("/proc/sys/kernel/pty/nr")
RESCAN_S = 30.0
"""The workspaces are walked through when the disk lost a quarter of the smallest limit, or after
this time.
"""


class LimitWatchdog:
    """Looks after `sandboxes`, which its owner keeps.

    It calls `over(live, what)` once for each that is to be ended.
    """

    def __init__(
        self,
        sandboxes: Mapping[str, LiveSandbox],
        over: Callable[[LiveSandbox, str], None],
        *,
        memory: bool,
        folder: Path | None,
        ptys: bool = False,
    ) -> None:
        self._sandboxes, self._over = sandboxes, over
        self._memory = memory
        self._folder = folder
        """On whose disk the workspaces are, when these are to be watched."""
        self._ptys = ptys
        self._free_bytes, self._walked_at = 0, -RESCAN_S
        self.cpu_s = 0.0

    @property
    def watches(self) -> tuple[str, ...]:
        """Returns what the watchdog looks at; empty when there is no need of it."""
        return (
            ("memory",) * self._memory
            + ("workspace",) * (self._folder is not None)
            + ("ptys",) * self._ptys
        )

    async def run(self) -> None:
        """Look again and again, until cancelled; returns at once if there is nothing to watch."""
        while self.watches:
            before = self.cpu_s
            await self.look()
            await asyncio.sleep(min(max(PERIOD_S, (self.cpu_s - before) / SHARE), MAX_PERIOD_S))

    async def look(self) -> None:
        if self._memory and self._sandboxes:
            await self._look_at_memory()
        if self._folder is not None and self._sandboxes:
            await self._look_at_disk(self._folder)
        if self._ptys and self._sandboxes:
            self._look_at_ptys()

    def _look_at_ptys(self) -> None:
        begin = time.thread_time()
        if int(PTYS.read_text()) > MAX_PTYS:  # of the whole machine: else nobody can have too many
            for live in self._watched():
                if sum(map(procfs.num_ptys, procfs.descendants(live.pid))) > MAX_PTYS:
                    self._over(live, f"it held more than {MAX_PTYS} terminals")
        self.cpu_s += time.thread_time() - begin

    def _watched(self) -> list[LiveSandbox]:
        return [
            live
            for live in self._sandboxes.values()
            if live.pid and live.ending is None and not live.exited.done()
        ]

    async def _look_at_memory(self) -> None:
        table = await self._processes()
        begin = time.thread_time()
        children: dict[int, list[int]] = {}
        for pid, stat in table.items():
            children.setdefault(stat.parent, []).append(pid)
        for live in self._watched():
            pids = _below(live.pid, children)
            limit = live.spec.memory_bytes
            if (
                sum(table[pid].rss_bytes for pid in pids if pid in table) > limit
                and sum(map(procfs.pss_bytes, pids)) > limit
            ):
                self._over(live, f"its processes used more than its memory of {limit} bytes")
        self.cpu_s += time.thread_time() - begin

    async def _processes(self) -> dict[int, procfs.Stat]:
        table = {}
        pids = procfs.pids()
        for first in range(0, len(pids), SLICE):
            begin = time.thread_time()
            for pid in pids[first : first + SLICE]:
                status = procfs.stat(pid)
                if status is not None:
                    table[pid] = status
            self.cpu_s += time.thread_time() - begin
            await asyncio.sleep(0)
        return table

    async def _look_at_disk(self, folder: Path) -> None:
        sandboxes = self._watched()
        now, about = time.monotonic(), os.statvfs(folder)
        free_bytes = about.f_bfree * about.f_frsize
        step_bytes = min((live.spec.workspace_bytes for live in sandboxes), default=0) // 4
        if self._free_bytes - free_bytes < step_bytes and now - self._walked_at < RESCAN_S:
            self._free_bytes = max(self._free_bytes, free_bytes)
            return
        self._free_bytes, self._walked_at = free_bytes, now
        for live in sandboxes:
            limit = live.spec.workspace_bytes
            used_bytes, cpu_s = await asyncio.to_thread(_timed_disk_bytes, live.note.folder, limit)
            self.cpu_s += cpu_s
            if used_bytes > limit and live.ending is None:
                self._over(live, f"its workspace is larger than {limit} bytes")


def _below(root: int, children: Mapping[int, Iterable[int]]) -> list[int]:
    pids = [root]
    for pid in pids:
        pids += children.get(pid, ())
    return pids


def _timed_disk_bytes(folder: str, limit: int) -> tuple[int, float]:
    begin = time.thread_time()
    return disk_bytes(folder, limit), time.thread_time() - begin


def disk_bytes(folder: str, limit: int) -> int:
    """Blocks below a folder that an agent fills, no link followed; stops counting above `limit`.

    Blocking.
    """
    total, pending = 0, [folder]
    while pending and total <= limit:
        try:
            entries = os.scandir(pending.pop())
        except OSError:
            continue  # removed meanwhile, or closed to us
        with entries:
            for entry in entries:
                total += max(ENTRY_BYTES, _block_bytes(entry))
                if total > limit:
                    break
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return total


def _block_bytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0
