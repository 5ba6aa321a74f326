"""A service that works for long: whatever it uses is measured after each run, and may not grow.

Runs come and go as in the life of a service. Each is played with a tool in a sandbox, streamed to a
trainer and committed; the KEPT youngest stay, and older ones are deleted. The first quarter of the
time fills pools and caches. From then on the most that is used in the second half may exceed the
most of the time before it by SLACK alone. Log files do grow, by a bounded number of bytes a
rollout: docs/operating.md says how they are rotated.

`PRORL_LONG_S` is the length in seconds, 40 minutes by default. The measurements are printed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from prorl.client.client import Client
from prorl.deploy.running import Stop, client_of, service
from prorl.linux import procfs
from prorl.sandbox.node.cgroups import delegated_base
from prorl.supervisor.root import box_dir
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.integration.services import settings, slots

SECONDS = float(os.environ.get("PRORL_LONG_S", "2400"))
KEPT, NUM_GROUPS, N = 3, 24, 2
SLACK = {
    "memory_mb": 48,  # of all processes; Arrow and malloc give back late
    "descriptors": 12,
    "threads": 40,  # a run has ten until it is closed, and runs are closed late on a busy machine
    "processes": 6,  # warm sandboxes come and go
    "files": 24,
    "log_mb": 4,  # SQLite's write-ahead log is copied back when it has 16 MB
    "cgroups": 6,
    "socket_files": 4,
}
MOST_LOG_BYTES = 2000
"""Of all processes together, a rollout."""


def count_files(folder: Path | None) -> int:
    return sum(len(names) for _, _, names in os.walk(folder)) if folder else 0


def count_folders(folder: Path | None) -> int:
    return sum(len(names) for _, names, _ in os.walk(folder)) if folder else 0


def measure(running: Supervisor) -> dict[str, float]:
    """Returns what the service uses now, by the names of SLACK."""
    root = running.config.root
    pids = [child.pid for child in running.children.values() if child.alive]
    stats = [stat for pid in pids if (stat := procfs.stat(pid))]
    runs = [path for path in root.iterdir() if (path / "manifest.json").exists()]
    in_runs = sum(count_files(path) for path in runs)
    return {
        "memory_mb": sum(stat.rss_bytes for stat in stats) / 2**20,
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "processes": sum(len(procfs.descendants(pid)) for pid in pids),
        "files": count_files(root) - in_runs + in_runs / max(len(runs), 1),
        "log_mb": sum(path.stat().st_size for path in root.glob("control.db*")) / 2**20,
        "cgroups": count_folders(delegated_base()),
        "socket_files": count_files(box_dir(root)),
    }


def play(client: Client, run: str) -> None:
    """Plays a run to its end, as a trainer that commits each batch."""
    tasks = [
        Task(
            task_id=f"sum/{i}",
            env="math",
            prompt=f"What is {i} + 7?",
            data={"answer": str(i + 7), "solution": f"<<{i}+7={i + 7}>>\n#### {i + 7}"},
        )
        for i in range(NUM_GROUPS)
    ]
    client.create_run(run_id=run, delivery="stream")
    client.submit(run, tasks, N, key="all", last=True)
    for batch in client.stream(run):
        client.commit(batch)


def log_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "logs").glob("*.log"))


def exceeding(rows: list[dict[str, float]]) -> dict[str, str]:
    """Returns what grew, by name, with what it was and is."""
    half = len(rows) // 2
    before, after = rows[half // 2 : half], rows[half:]
    grown = {}
    for name, slack in SLACK.items():
        was, now = (max(row[name] for row in part) for part in (before, after))
        if now > was + slack:
            grown[name] = f"{was:.1f}, then {now:.1f}"
    return grown


def test_what_grows_is_seen() -> None:
    even = [dict.fromkeys(SLACK, 5.0)] * 8
    assert exceeding(even) == {}
    leak = [row | {"descriptors": 10.0 * number} for number, row in enumerate(even)]
    assert exceeding(leak) == {"descriptors": "30.0, then 70.0"}


@pytest.mark.soak
@pytest.mark.timeout(int(2 * SECONDS) + 600)
async def test_nothing_grows(tmp_path: Path, sandbox_kind: str) -> None:
    root = tmp_path / "root"
    store = {
        "flush_s": 0.1,
        "compact_every_commits": 16,
        "keep_replaced_s": 2.0,
        "close_after_s": 2.0,
    }
    more = {**slots(6), "workers": 1, "store": store}
    config = settings(root, sandbox_kind, "scripted:oracle?delay_s=0.05", **more)
    rows: list[dict[str, float]] = []
    async with service(config, Stop()) as running:
        assert isinstance(running, Supervisor)
        client, began = client_of(running), time.monotonic()
        while time.monotonic() - began < SECONDS:
            await asyncio.to_thread(play, client, f"r{len(rows)}")
            if len(rows) >= KEPT:
                await asyncio.to_thread(client.delete, f"r{len(rows) - KEPT}")
            rows.append(await asyncio.to_thread(measure, running))
            print(len(rows), {k: round(v, 1) for k, v in rows[-1].items()}, file=sys.stderr)
        logged = log_bytes(root) / (len(rows) * NUM_GROUPS * N)
        restarts = running.restarts
        client.close()
    print(f"{len(rows)} runs, {logged:.0f} bytes of log a rollout", file=sys.stderr)
    assert restarts == 0
    assert exceeding(rows) == {}
    assert logged < MOST_LOG_BYTES
