"""Gateway and store alone, with rollouts that only wait, in chains of other processes.

    .venv/bin/python configs/carry.py IN_HAND ROUNDS CHAINS

A whole service without sandboxes: the policy is a script that answers late, the env is `noop`, a
group has four rollouts. It prints rollouts a second, CPU and memory of the process `service`, bytes
stored a rollout, and parts committed, for `docs/operating.md`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import UnavailableError
from prorl.linux import procfs
from prorl.supervisor.service import Supervisor
from prorl.types import Task

GROUP = 4
RATE = 250.0
"""Replies a second that the script gives while all are in hand: more than two cores carry."""
PATIENCE_S = 1800.0


async def measure(in_hand: int, rounds: int, chains: int) -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-carry-", dir=Path.cwd()) as folder:
        root = Path(folder) / "root"
        values = {
            "root": root,
            "workers": chains,
            "backends": (f"scripted:noop?delay_s={in_hand / RATE}",),
            "init": {"slots": 64},
            "run": {"slots": -(-in_hand // chains)},
            "eval": {"slots": 64},
        }
        async with Supervisor(ServiceConfig.model_validate(values)) as supervisor:
            pid = supervisor.children["service"].pid
            assert pid is not None
            begin, before_s = time.perf_counter(), procfs.cpu_s(pid)
            client = client_of(supervisor)
            most = await asyncio.to_thread(run_all, client, in_hand, in_hand * rounds)
            seconds = time.perf_counter() - begin
            figures = {
                "rollouts_per_s": in_hand * rounds / seconds,
                "most_in_hand": most,
                "service_cpu_ms_per_rollout": (procfs.cpu_s(pid) - before_s)
                / in_hand
                / rounds
                * 1e3,
                "service_mb": procfs.pss_bytes(pid) / 1e6,
                "stored_bytes_per_rollout": stored_bytes(root / "carry") / in_hand / rounds,
                "commits_per_s": len(list((root / "carry/commits").iterdir())) / seconds,
                "load": os.getloadavg()[0],
            }
            print(json.dumps(figures))


def run_all(client: Client, in_hand: int, total: int) -> int:
    """Submit everything, wait until it is stored, and return how many were in hand at most."""
    limits = {"run_s": 7200.0, "queue_s": 7200.0}
    client.create_run(run_id="carry", max_open_groups=in_hand // GROUP + 16, limits=limits)
    tasks = [Task(task_id=f"carry/{i}", env="noop", prompt="wait") for i in range(total // GROUP)]
    client.submit("carry", tasks, GROUP, key="carry", last=True)
    until, most = time.monotonic() + PATIENCE_S, 0
    while (view := client.run("carry"))["counts"]["completed"] < total:
        most = max(most, view["counts"]["running"])
        if time.monotonic() > until or view["counts"]["failed"]:
            raise UnavailableError(f"{view['counts']}: {view['stuck'] or 'no reason is known'}")
        time.sleep(0.5)
    return most


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    asyncio.run(measure(*map(int, sys.argv[1:])))
