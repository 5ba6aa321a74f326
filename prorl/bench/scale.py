"""`prorl bench scale`: nodes of this machine, placed by Dask, over TLS, on rollouts that only wait.

Rows: `worked.N`, the share of the time of N nodes' slots in which a rollout waited for its model,
in the middle of a run, where every slot could be busy; `rollouts_per_s.N`, what that is in rollouts
of the mean length; `efficiency.N`, its ratio to N times one node's; `gateway_ms.N`, CPU of the
gateway a rollout; `machine.N`, how busy this machine's cores were with all that ran on it;
`node_share`, what an idle node costs the gateway; `full_gateway`, `full_store`, what a rollout
costs them at full rate. The waiting times are quantiles of a log-normal distribution. Rows
`day.NAME` are a day of a million rollouts on 64 nodes, 10,000 in hand: the gateway's own mind and
log live through as many as there is time for, what it does besides costs what was measured here.

One machine's cores are shared by all nodes: what is measured is what the service costs, so the
rollouts must wait for longer than all of that takes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prorl.bench.growth import GrowingRun, Meter, N
from prorl.bench.pipeline import has_finished
from prorl.bench.report import Figure, Report
from prorl.client.client import Client, connect
from prorl.config import RunConfig, ServiceConfig
from prorl.config.layout import SERVICE
from prorl.errors import UnavailableError
from prorl.linux.procfs import cpu_s
from prorl.process import settle_heap
from prorl.supervisor.service import Supervisor
from prorl.types import Task

SLOTS = 16
"""RUN slots of a node."""
ROUNDS = 6
"""Rollouts of each slot."""
NUM_TIMES = 8
IDLE_S = 4.0
SHORT_S = 0.1
"""Wait of rollouts that fill the cores: what a rollout costs a service that is never empty."""
COMMON = {"init": {"slots": SLOTS}, "run": {"slots": SLOTS}, "eval": {"slots": SLOTS}}
FIRST, LAST = 0.2, 0.7
"""The part of a run's rollouts that is measured: from the one's end to the other's there is work
for every slot.
"""
PATIENCE_S = 600.0
HOST = "127.0.0.1"

Times = NDArray[np.float64]


def times_s(mean_s: float) -> tuple[float, ...]:
    """Returns how long a rollout waits: quantiles of a log-normal distribution with this mean."""
    drawn = np.random.default_rng(0).lognormal(0.0, 0.6, 4096)
    values = np.quantile(drawn, (np.arange(NUM_TIMES) + 0.5) / NUM_TIMES)
    return tuple(round(float(value), 3) for value in values * mean_s / values.mean())


async def run(quick: bool) -> Report:
    """Measure 1, 2 nodes when quick, else 1, 2, 4 and 8; then the day with these costs."""
    waits = times_s(2.0 if quick else 8.0)
    points = await _measure((1, 2) if quick else (1, 2, 4, 8), waits)
    rows = [row for point in points for row in _rows(point, points[0])]
    shares = [point.idle_share for point in points]
    slope, rest = np.polyfit([point.nodes for point in points], shares, 1)
    node_share, base_share, last = max(0.0, float(slope)), max(0.0, float(rest)), points[-1]
    rows += [
        Figure(name="node_share", value=1000 * node_share, unit="ms CPU/s of gateway"),
        Figure(name="full_gateway", value=1000 * last.full_gateway_s, unit="ms CPU/rollout"),
        Figure(name="full_store", value=1000 * last.full_store_s, unit="ms CPU/rollout"),
    ]
    nodes_share = base_share + DAY_NODES * node_share
    rows += day(last.full_gateway_s, nodes_share, DAY_IN_HAND * (2 if quick else 20))
    return Report(bench="scale", rows=tuple(rows))


async def _measure(counts: tuple[int, ...], waits: tuple[float, ...]) -> list[Measured]:
    from prorl.deploy import cluster as clusters
    from prorl.deploy.leavers import NodeDrainer
    from prorl.deploy.placer import placer

    leavers = NodeDrainer(drain_s=5.0, sigterm_drain_s=1.0)
    with tempfile.TemporaryDirectory(prefix="prorl-scale-") as folder:
        root = Path(folder) / "root"
        async with Supervisor(_config(root, waits)) as service:
            client = await asyncio.to_thread(connect, root)
            with placer(root, COMMON) as node_placer:
                async with clusters.local(node_placer, leavers) as cluster:
                    pids = [service.children[name].pid or 0 for name in (SERVICE, "store")]
                    points = []
                    for nodes in counts:
                        cluster.scale(nodes)
                        await asyncio.to_thread(_wait_for_nodes, client, nodes)
                        point = await asyncio.to_thread(_point, client, root, nodes, pids, waits)
                        points.append(point)
                    leavers.ending = True
                await leavers.wait_ended()
            client.close()
    return points


def _point(
    client: Client, root: Path, nodes: int, pids: list[int], waits: tuple[float, ...]
) -> Measured:
    """Returns what so many nodes, which are there, do and cost."""
    _work(client, f"warm-up-{nodes}", nodes * SLOTS, (SHORT_S,))
    num = nodes * SLOTS * ROUNDS
    idle = _used(pids, lambda: time.sleep(IDLE_S))
    name, took_s = f"work-{nodes}", list[float]()
    began, before = time.monotonic(), _machine_s()
    busy = _used(pids, lambda: _work(client, name, num, waits))
    machine_share = (_machine_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    burst = _used(pids, lambda: took_s.append(_work(client, f"burst-{nodes}", num, (SHORT_S,))))
    ended, waited = _stored(root / name)
    return Measured(
        nodes=nodes,
        worked=worked_share(ended, waited, nodes * SLOTS),
        mean_wait_s=float(np.mean(waited)),
        machine_share=machine_share,
        gateway_s=busy[0] / num,
        idle_share=idle[0] / IDLE_S,
        full_gateway_s=max(1e-4, (burst[0] - took_s[0] * idle[0] / IDLE_S) / num),
        full_store_s=max(1e-4, (burst[1] - took_s[0] * idle[1] / IDLE_S) / num),
    )


def worked_share(ended: Times, worked: Times, slots: int) -> float:
    """Share of the time of so many slots in which work was done.

    From when `FIRST` of all rollouts had ended until `LAST` had. `ended`: when they did; `worked`:
    how long each was work, both in seconds.
    """
    began, until = np.quantile(ended, (FIRST, LAST), method="nearest")
    inside = np.minimum(ended, until) - np.maximum(ended - worked, began)
    return float(np.maximum(inside, 0.0).sum() / (until - began) / slots)


def _stored(run: Path) -> tuple[Times, Times]:
    """Returns when each rollout of a run was committed, in seconds, and how long its server had it
    wait.
    """
    from prorl.analysis.opened import open_runs

    query = """SELECT epoch_us(committed_at) / 1e6 AS ended, backend
        FROM rollouts JOIN turns USING (run_id, rollout_id, attempt)"""
    table = open_runs(str(run)).table(query)
    waited = [float(name.partition("delay_s=")[2]) for name in table.column("backend").to_pylist()]
    return np.array(table.column("ended").to_pylist()), np.array(waited)


def _machine_s() -> float:
    """CPU seconds that this machine's cores have worked for anybody."""
    words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, *rest = map(int, words)
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _used(pids: list[int], work: Callable[[], object]) -> list[float]:
    """CPU seconds of each of these processes while something is done."""
    before = [cpu_s(pid) for pid in pids]
    work()
    return [cpu_s(pid) - then for pid, then in zip(pids, before, strict=True)]


def _config(root: Path, waits: tuple[float, ...]) -> ServiceConfig:
    with socket.create_server((HOST, 0)) as probe:
        port = min(probe.getsockname()[1], 65000)
    values: dict[str, Any] = {**COMMON, "workers": "nodes", "store": {"own_process": True}}
    values |= {"root": root, "listen": f"{HOST}:{port}"}
    values["backends"] = tuple(map(_server, (*waits, SHORT_S)))
    return ServiceConfig.model_validate(values)


def _server(wait_s: float) -> str:
    return f"scripted:noop?delay_s={wait_s}"


def _wait_for_nodes(client: Client, nodes: int) -> None:
    _until(
        lambda: sum(w["role"] == "eval" for w in client.status()["workers"]) == nodes,
        f"{nodes} nodes",
    )


def _work(client: Client, name: str, num: int, waits: tuple[float, ...]) -> float:
    """Returns the seconds from the first lease of so many rollouts to the run's end."""
    servers = list(map(_server, waits))
    client.create_run(run_id=name, max_open_groups=max(256, 2 * num), backends=servers)
    tasks = (Task(task_id=f"{name}/{i}", env="noop", prompt="wait") for i in range(num))
    client.submit(name, tasks, 1, key=name, last=True)
    _until(lambda: has_finished(client, name), f"run {name}", look_s=1.0)
    view = client.run(name)
    return float(view["finished_at"] - view["started_at"])


def _until(holds: Any, condition: str, look_s: float = 0.2) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise UnavailableError(f"not there within {PATIENCE_S:g} s: {condition}")
        time.sleep(look_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    nodes: int
    worked: float
    """Share of its slots' time that was work."""
    mean_wait_s: float
    """The mean seconds of a rollout."""
    machine_share: float
    """The share of this machine's cores that anybody used."""
    gateway_s: float
    """CPU seconds a rollout, heartbeats included."""
    idle_share: float
    """The share of a core that the gateway takes with these nodes when nobody has anything to
    do.
    """
    full_gateway_s: float
    """CPU seconds a rollout at full rate, heartbeats left out."""
    full_store_s: float


DAY_S, DAY_ROLLOUTS, DAY_NODES, DAY_IN_HAND = 86_400, 1_000_000, 64, 10_000


def day(gateway_s: float, nodes_share: float, lived: int) -> list[Figure]:
    """Returns what a day takes of the gateway, when `lived` of its rollouts went through mind and
    log.

    A rollout costs it `gateway_s` of CPU, its nodes that share of a core.
    """
    settle_heap()
    with tempfile.TemporaryDirectory(prefix="prorl-day-", dir=Path.cwd()) as folder:  # no tmpfs
        path, meter = Path(folder) / "control.db", Meter()
        grown = GrowingRun(path, meter)
        groups = 2 * DAY_IN_HAND // N
        bounded = RunConfig(
            run_id="a", delivery="stream", max_open_groups=groups, max_uncommitted_groups=groups
        )
        grown.core.create_run(bounded)
        grown.accept(lived)
        grown.work(DAY_IN_HAND)
        grown.commit_rest()
        grown.log.close()
        log_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    mind_s = sum(meter.cpu_s.values()) / lived
    rate = DAY_ROLLOUTS / DAY_S
    busy = rate * gateway_s + nodes_share
    full = (0.95 - nodes_share) / gateway_s
    note = f"{rate:.1f} a second; heartbeats of {DAY_NODES} nodes are {nodes_share:.1%} of it"
    longest = max(meter.longest_ms.items(), key=lambda entry: entry[1])
    return [
        Figure(name="day.gateway", value=busy, unit="of a core", note=note),
        Figure(name="day.mind_and_log", value=1e3 * mind_s, unit="ms CPU/rollout"),
        Figure(name="day.longest_step", value=longest[1], unit="ms", note=longest[0]),
        Figure(name="day.log", value=log_bytes / lived * DAY_ROLLOUTS / 1e9, unit="GB/day"),
        Figure(
            name="day.saturates_at",
            value=full * DAY_S / 1e6,
            unit="M rollouts/day",
            note=f"{full:.0f} a second; then several gateways, each with runs of its own",
        ),
    ]


def _rows(point: Measured, single: Measured) -> list[Figure]:
    nodes, gateway_ms = point.nodes, 1000 * point.gateway_s
    rate = point.worked * nodes * SLOTS / single.mean_wait_s
    efficiency, more = point.worked / single.worked, f"{point.gateway_s / single.gateway_s:.2f}"
    others = "of all cores, with others' work"
    return [
        Figure(name=f"worked.{nodes}", value=point.worked, unit="of the slots' time"),
        Figure(name=f"rollouts_per_s.{nodes}", value=rate, unit="1/s"),
        Figure(name=f"efficiency.{nodes}", value=efficiency, unit="of ideal"),
        Figure(
            name=f"gateway_ms.{nodes}",
            value=gateway_ms,
            unit="ms CPU/rollout",
            note=f"{more} of one node's",
        ),
        Figure(name=f"machine.{nodes}", value=point.machine_share, unit=others),
    ]
