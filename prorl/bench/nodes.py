"""`prorl bench nodes`: a gateway with 64 nodes and 10,000 rollouts in hand, and its next life.

A real gateway and store in processes of their own; the nodes are their real protocol objects
(control streams, lease streams, over mutual TLS) in this process, without sandboxes or models: they
take leases and keep them. Rows: `joins`, messages that told somebody of another's address while all
of them came; `accept_ms` and `lease_ms`, of single groups sent one after the other with everything
in hand (p50, p99); CPU and memory of the gateway; `restart_s`, from SIGKILL of the gateway until a
group is accepted by its next life, until a node has its lease, and until every stream is back. That
no rollout lost an attempt is checked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prorl.bench.machine import machine
from prorl.bench.nodes_crowd import STAGES, Board, Node
from prorl.bench.report import Figure, Report
from prorl.client.client import Client, connect
from prorl.config import ServiceConfig
from prorl.errors import ProrlError, UnavailableError
from prorl.flight import FlightNetwork
from prorl.linux.procfs import cpu_s, stat
from prorl.supervisor.service import Supervisor
from prorl.tls import Join
from prorl.types import Task

NUM_NODES, NUM_OPEN = 64, 10_000
QUICK_NODES, QUICK_OPEN = 8, 800
SINGLES = 200
"""Groups that are sent one after the other."""
SPARE = 2
"""Slots of a node beyond its part of what it is given, all of which it keeps."""
IDLE_S = 5.0
PATIENCE_S = 240.0
LOOK_S = 0.1


async def run(quick: bool) -> Report:
    """64 nodes and 10,000 rollouts; when quick 8 and 800."""
    num_nodes, num_open = (QUICK_NODES, QUICK_OPEN) if quick else (NUM_NODES, NUM_OPEN)
    with tempfile.TemporaryDirectory(prefix="prorl-nodes-") as folder:
        config = _config(Path(folder) / "root")
        async with Supervisor(config) as service:
            rows = await _measure(service, num_nodes, num_open)
    return Report(bench="nodes", machine=machine(), rows=tuple(rows))


def _config(root: Path) -> ServiceConfig:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = min(probe.getsockname()[1], 65000)
    values: dict[str, Any] = {stage: {"workers": 0} for stage in STAGES}
    values |= {"root": root, "listen": f"127.0.0.1:{port}", "backends": ("scripted:noop",)}
    return ServiceConfig.model_validate(values)


async def _measure(service: Supervisor, num_nodes: int, num_open: int) -> list[Figure]:
    config = service.config
    assert config.listener is not None
    join = Join.read(config.root / "join" / "node.json")
    client = await asyncio.to_thread(connect, config.root)
    board, slots = Board(), -(-(num_open + SINGLES) // num_nodes) + SPARE
    async with FlightNetwork(join.token, join.credentials) as network:
        gateway = config.listener.gateway
        nodes = [Node(network, gateway, f"n{i}", slots, board) for i in range(num_nodes)]
        try:
            pid = service.children["gateway"].pid or 0
            rows = [_memory(pid, "alone")]
            rows += await _join(client, nodes, board, pid)
            rows += await _fill(client, board, pid, num_open)
            rows += await _singles(client, board)
            rows.append(await _idle(pid))
            rows += await _restart(client, service, board, len(STAGES) * num_nodes)
        finally:
            await asyncio.gather(*(node.close() for node in nodes))
            client.close()
    return rows


async def _join(client: Client, nodes: list[Node], board: Board, pid: int) -> list[Figure]:
    """Have all nodes come, and wait until the gateway has every worker of them."""
    began, used = time.monotonic(), cpu_s(pid)
    for node in nodes:
        node.start()
    await _until(partial(_all_there, client, len(STAGES) * len(nodes)), "every worker")
    used_s = cpu_s(pid) - used
    note = f"{3 * len(nodes)} streams in {time.monotonic() - began:.1f} s"
    joins = Figure(what="joins", value=float(board.told), unit="messages", note=note)
    return [joins, Figure(what="joins_cpu", value=used_s, unit="CPU s of gateway")]


def _memory(pid: int, when: str) -> Figure:
    found = stat(pid)
    value = found.rss_bytes / 1e6 if found else 0.0
    return Figure(what=f"gateway_memory.{when}", value=value, unit="MB")


async def _fill(client: Client, board: Board, pid: int, num_open: int) -> list[Figure]:
    """Submit the open rollouts in groups of eight, and wait until nodes have all of them."""
    used, began = cpu_s(pid), time.monotonic()
    await asyncio.to_thread(client.create_run, run_id="open", max_open_groups=2 * num_open)
    tasks = [Task(task_id=f"t{i}", env="noop", prompt="wait") for i in range(num_open)]
    await asyncio.to_thread(client.submit, "open", tasks, 1, key="open")
    accepted_s = time.monotonic() - began
    await _until(lambda: len(board.leased_at) == num_open, f"{num_open} leased")
    spent = 1000 * (cpu_s(pid) - used) / num_open
    note = f"{num_open} accepted in {accepted_s:.1f} s, leased {time.monotonic() - began:.1f} s in"
    return [
        Figure(what="accept_and_lease", value=spent, unit="ms CPU/rollout", note=note),
        _memory(pid, "full"),
    ]


async def _singles(client: Client, board: Board) -> list[Figure]:
    """Groups of one, one after the other: until accepted, until a node has the lease."""
    accept_ms, lease_ms = [], []
    for number in range(SINGLES):
        name = f"single-{number}"
        task = Task(task_id=name, env="noop", prompt="wait")
        began = time.monotonic()
        await asyncio.to_thread(client.submit, "open", [task], 1, key=name)
        accept_ms.append(1000 * (time.monotonic() - began))
        await _until(lambda name=name: name in board.leased_at, name, look_s=0.0005)  # type: ignore[misc]
        lease_ms.append(1000 * (board.leased_at[name] - began))
    rows = []
    for what, values in (("accept_ms", accept_ms), ("lease_ms", lease_ms)):
        for percent in (50, 99):
            value = float(np.percentile(values, percent))
            rows.append(Figure(what=f"{what}.p{percent}", value=value, unit="ms"))
    return rows


async def _idle(pid: int) -> Figure:
    used = cpu_s(pid)
    await asyncio.sleep(IDLE_S)
    value = 1000 * (cpu_s(pid) - used) / IDLE_S
    return Figure(what="gateway_idle", value=value, unit="ms CPU/s", note="with everything in hand")


async def _restart(
    client: Client, service: Supervisor, board: Board, num_workers: int
) -> list[Figure]:
    """SIGKILL; a group for the next life, and everything that was in hand still in hand."""
    before = await asyncio.to_thread(client.run, "open")
    os.kill(service.children["gateway"].pid, signal.SIGKILL)
    began = time.monotonic()
    task = Task(task_id="after", env="noop", prompt="wait")
    # Not the wait of a client between two tries is measured, but the gateway.
    with connect(service.config.root, retry_s=LOOK_S) as impatient:
        await asyncio.to_thread(_submit_until, impatient, task)
    answers_s = time.monotonic() - began
    await _until(lambda: "after" in board.leased_at, "a lease of the next life")
    leased_s = board.leased_at["after"] - began
    await _until(partial(_all_there, client, num_workers), "every worker again")
    back_s, used_s = time.monotonic() - began, cpu_s(service.children["gateway"].pid)
    await _check_leased(client, before["counts"]["leased"] + 1)
    return [
        Figure(what="restart_s.answers", value=answers_s, unit="s"),
        Figure(what="restart_s.first_lease", value=leased_s, unit="s"),
        Figure(what="restart_s.every_stream", value=back_s, unit="s"),
        Figure(what="restart_cpu", value=used_s, unit="CPU s of gateway", note="until then"),
    ]


async def _check_leased(client: Client, wanted: int) -> None:
    counts = (await asyncio.to_thread(client.run, "open"))["counts"]
    if counts["leased"] != wanted:
        raise UnavailableError(f"{counts} after the restart, expected {wanted} leased")


def _submit_until(client: Client, task: Task) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            client.submit("open", [task], 1, key=task.task_id)
        except ProrlError:
            if time.monotonic() > end:
                raise
            time.sleep(LOOK_S)
        else:
            return


def _all_there(client: Client, num_workers: int) -> bool:
    try:
        workers = client.status()["workers"]
    except ProrlError:
        return False
    return sum(worker["role"] in STAGES for worker in workers) == num_workers


async def _until(holds: Callable[[], bool], what: str, look_s: float = LOOK_S) -> None:
    """`holds` may ask the service: it runs on a thread unless it is looked at often."""
    end = time.monotonic() + PATIENCE_S
    while not (holds() if look_s < LOOK_S else await asyncio.to_thread(holds)):
        if time.monotonic() > end:
            raise UnavailableError(f"not there within {PATIENCE_S:g} s: {what}")
        await asyncio.sleep(look_s)
