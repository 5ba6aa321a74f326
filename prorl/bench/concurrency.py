"""`prorl bench concurrency`: a thousand rollouts in hand on one machine, each in a sandbox with a
live shell, all of them waiting for their model.

The service is whole and real; the policy is a script that takes an hour for its first call. Rows:
`begin_s`, from the submission until every rollout waits for its model, and `begin_cpu_ms`, CPU of
all processes in that time, a rollout; `pss_mb`, memory a rollout holds, by proportional set sizes,
so that what is shared counts once; `idle_cores`, CPU seconds a second of all of it while nothing
happens; `processes` and `descriptors`, of all and the most of one process. What is subtracted is
the same service before it had work.

What a machine may refuse is asked first: terminals (16 a sandbox), descriptors, processes, memory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from prorl.bench.meter import tree
from prorl.bench.report import Figure, Report
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import UnavailableError, UserError
from prorl.linux import memory, procfs
from prorl.sandbox import kinds
from prorl.sandbox.kind import short_of_terminals
from prorl.supervisor.service import Supervisor
from prorl.types import Task

FULL, QUICK = 1000, 64
SETTLE_S, IDLE_S = 3.0, 20.0
BEGIN_S = 600.0
SPARE = 8
"""Sandboxes that may be on their way beside those in hand."""
DESCRIPTORS, PROCESSES, MIB = 4, 4, 8
"""A rollout needs at most: of one process, of the machine, of its memory."""


async def run(quick: bool) -> Report:
    count = QUICK if quick else FULL
    if not quick:
        print(
            "bench concurrency: two minutes on two cores; --quick takes half of one",
            file=sys.stderr,
        )
    return Report(bench="concurrency", rows=await measured(count, IDLE_S))


async def measured(count: int, idle_s: float) -> tuple[Figure, ...]:
    """Raises UserError where the machine has no room for so many."""
    check_room(count)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        values = {
            "root": Path(folder) / "root",
            "backends": ("scripted:noop?delay_s=3600",),
            "init": {"slots": 16},
            "run": {"slots": count},
            "eval": {"slots": 4},
            "sandbox": {"kind": kinds.lightest(), "max_sandboxes": count + SPARE},
        }
        async with Supervisor(ServiceConfig.model_validate(values)) as service:
            client = client_of(service)
            await asyncio.sleep(SETTLE_S)
            empty = await asyncio.to_thread(look)
            await asyncio.to_thread(_submit, client, count)
            await asyncio.to_thread(_until_all_wait, client, count)
            begun = await asyncio.to_thread(look)
            await asyncio.sleep(idle_s)
            waiting = await asyncio.to_thread(look)
            await asyncio.to_thread(client.cancel, "concurrency")
    return figures(count, empty, begun, waiting)


def check_room(count: int) -> None:
    """Raises UserError, with what to say to the machine, where it has no room for so many."""
    if few := short_of_terminals(count + SPARE):
        problem, _, fix = few.rpartition(": ")
        raise UserError(problem, f"enough for {count} rollouts in hand", fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (needed := DESCRIPTORS * count + 256):
        raise UserError(
            f"{soft} open files a process (hard limit {hard})",
            f"{needed} for {count} rollouts in hand",
            f"ulimit -n {needed}",
        )
    most, needed = max_processes(), PROCESSES * count
    if most < needed:
        raise UserError(
            f"{most} processes allowed",
            f"{needed} for {count} rollouts in hand",
            "ulimit -u, kernel.pid_max, or pids.max of the control group",
        )
    if (free := memory.available_bytes() >> 20) < (needed := MIB * count + 1024):
        raise UserError(f"{free} MiB of free memory", f"{needed} for {count} rollouts in hand")


def max_processes() -> int:
    """Returns how many more processes this user and this machine may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    all_pids = int(Path("/proc/sys/kernel/pid_max").read_text())
    there = sum(name.isdecimal() for name in os.listdir("/proc"))
    return (all_pids if soft == resource.RLIM_INFINITY else min(soft, all_pids)) - there


class Look(NamedTuple):
    """Holds what the service uses and holds at one moment."""

    at_s: float
    cpu_s: float
    pss_mb: float
    sandboxes_mb: float
    """The memory of that sandboxd and all below it."""
    processes: int
    most_descriptors: int


def look() -> Look:
    pids = tree(os.getpid())
    daemon = next(pid for pid in pids if b"prorl.sandbox.node.daemon" in _command(pid))
    pss = {pid: procfs.pss_bytes(pid) / 1e6 for pid in pids}
    return Look(
        at_s=time.perf_counter(),
        cpu_s=sum(map(procfs.cpu_s, pids)),
        pss_mb=sum(pss.values()),
        sandboxes_mb=sum(pss.get(pid, 0.0) for pid in tree(daemon)),
        processes=len(pids),
        most_descriptors=max(map(_descriptors, pids)),
    )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _submit(client: Client, count: int) -> None:
    limits = {"run_s": 7200.0, "queue_s": 7200.0}
    client.create_run(run_id="concurrency", max_open_groups=count, limits=limits)
    tasks = [
        Task(task_id=f"concurrency/{i}", env="noop", prompt="wait", data={"tools": ["bash"]})
        for i in range(count)
    ]
    client.submit("concurrency", tasks, 1, key="concurrency", last=True)


def _until_all_wait(client: Client, count: int) -> None:
    until = time.monotonic() + BEGIN_S
    while (view := client.run("concurrency"))["counts"]["running"] < count:
        if time.monotonic() > until or view["counts"]["failed"]:
            waits = view["stalled"] or view["idle"] or "no reason is known"
            raise UnavailableError(f"{view['counts']} after {BEGIN_S:g} s: {waits}")
        time.sleep(0.5)


def figures(count: int, empty: Look, begun: Look, waiting: Look) -> tuple[Figure, ...]:
    spent_s, idle_s = begun.cpu_s - empty.cpu_s, waiting.cpu_s - begun.cpu_s
    sandbox_mb = (waiting.sandboxes_mb - empty.sandboxes_mb) / count
    cores = idle_s / (waiting.at_s - begun.at_s)
    total = f"{waiting.pss_mb:,.0f} MB in all, {empty.pss_mb:,.0f} before there was work"
    note, per = f"{sandbox_mb:.2f} of it the sandbox; {total}", f".{count}"
    idle = f"{cores / count * 3.6e6:,.0f} ms of CPU a rollout and hour"
    rows = (
        ("begin_s", begun.at_s - empty.at_s, "s", 0.0, ""),
        ("begin_cpu_ms", spent_s / count * 1e3, "ms", spent_s, ""),
        ("pss_mb", (waiting.pss_mb - empty.pss_mb) / count, "MB", 0.0, note),
        ("idle_cores", cores, "", idle_s, idle),
        ("processes", float(waiting.processes), "", 0.0, ""),
        ("descriptors", float(waiting.most_descriptors), "", 0.0, "the most of one process"),
    )
    return tuple(
        Figure(name=name + per, value=value, unit=unit, cpu_s=cpu_s, note=note)
        for name, value, unit, cpu_s, note in rows
    )
