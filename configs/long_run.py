"""One long run, by its tenths: what a rollout costs and holds must not grow with those before it.

    .venv/bin/python configs/long_run.py ROLLOUTS IN_FLIGHT

A whole service with sandboxes of the default kind; the policy is a script that solves each task
with one tool call. A line for each tenth, as JSON: rollouts a second, CPU milliseconds of all
processes a rollout, and at its end the memory of all processes (proportional set size, MB) and the
bytes stored a rollout so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from prorl.bench.meter import CpuMeter, cpu_meter, pss_mb
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import UnavailableError
from prorl.supervisor.service import Supervisor
from prorl.tasks import load_tasks

GROUP, TENTHS = 4, 10
PATIENCE_S = 3600.0


async def measure(rollouts: int, in_flight: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="prorl-long-", dir=Path.cwd()) as folder,
        cpu_meter() as cpu,
    ):
        root = Path(folder) / "root"
        values = {"root": root, "backends": ("scripted:oracle",), "run": {"slots": in_flight}}
        async with Supervisor(ServiceConfig.model_validate(values)) as supervisor:
            cpu.watch(os.getpid())
            await asyncio.to_thread(follow, client_of(supervisor), rollouts, cpu, root / "long")


def follow(client: Client, rollouts: int, cpu: CpuMeter, run: Path) -> None:
    """Submit everything, and print a line whenever a tenth has completed."""
    client.create_run(run_id="long", max_open_groups=64, limits={"queue_s": 2 * PATIENCE_S})
    tasks = load_tasks(f"arith:train?n={rollouts // GROUP}")
    client.submit("long", tasks, GROUP, key="long", last=True)
    until = time.monotonic() + PATIENCE_S
    done, at, cpu_s = 0, time.monotonic(), cpu.cpu_s()
    for tenth in range(1, TENTHS + 1):
        while (completed := completed_of(client)) < rollouts * tenth // TENTHS:
            if time.monotonic() > until:
                raise UnavailableError(f"{completed} of {rollouts} rollouts after {PATIENCE_S:g} s")
            time.sleep(0.2)
        now, now_cpu_s, count = time.monotonic(), cpu.cpu_s(), completed - done
        stored = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        line = {
            "completed": completed,
            "rollouts_per_s": round(count / (now - at), 1),
            "cpu_ms_per_rollout": round((now_cpu_s - cpu_s) / count * 1e3, 2),
            "pss_mb": round(pss_mb(os.getpid())),
            "stored_bytes_per_rollout": round(stored / completed),
            "load": os.getloadavg()[0],
        }
        print(json.dumps(line), flush=True)
        done, at, cpu_s = completed, now, now_cpu_s


def completed_of(client: Client) -> int:
    counts = client.run("long")["counts"]
    if counts["failed"]:
        raise UnavailableError(f"{counts['failed']} rollouts failed: prorl status says why")
    return int(counts["completed"])


if __name__ == "__main__":
    asyncio.run(measure(*map(int, sys.argv[1:])))
