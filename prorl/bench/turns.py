"""`prorl bench turns`: what the journal of turns costs a service, off and on in turns.

Three rollouts of one service, alternately with `journal: off` and `node`: `noop` makes one model
call and has no tools, so nothing is kept of it; `price` looks two prices up without a sandbox, so
that the journal is most of what it does; `shop` does that and runs Python in a sandbox. Rows are
medians over the pairs: CPU of all processes together, hand-offs of `price` at a steady rate, and
the time of a turn's tool calls as `turns.tool_s` has it. Bar: within 5 %.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report, median
from prorl.bench.served import client_of, cpu_s, wait_finished
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.flight import trace
from prorl.storage.catalog import StoredRun
from prorl.supervisor.service import Supervisor
from prorl.tasks.generated import generate
from prorl.types import Task

MODES = ("off", "node")
EDGES = ("lease", "ready", "ran", "scored")
RATE = 20.0
"""Rollouts a second while hand-offs are measured: far from what the service can do."""
SLOTS = 64
POLL_S = 0.05
PRICE_ENV = f"{Path(__file__).with_name('turns_env.py')}:Prices"


class Sizes(NamedTuple):
    """How much is measured."""

    pairs: int
    noop: int
    price: int
    shop: int
    paced: int


QUICK, FULL = Sizes(3, 200, 100, 24, 60), Sizes(8, 1000, 400, 60, 200)
Values = dict[tuple[str, str], list[float]]
"""By figure and mode."""


async def run(quick: bool) -> Report:
    """Measure everything; about 45 s when quick, four minutes otherwise."""
    sizes = QUICK if quick else FULL
    values: Values = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="prorl-turns-") as folder:
        async with Supervisor(_config(Path(folder) / "plain")) as service:
            await asyncio.to_thread(_bursts, service, sizes, values)
        async with Supervisor(_config(Path(folder) / "traced", traced=True)) as service:
            await asyncio.to_thread(_handoffs, service, sizes, values)
    return Report(bench="turns", machine=machine(), rows=tuple(_figures(values)))


def _config(root: Path, *, traced: bool = False) -> ServiceConfig:
    pool = {"slots": SLOTS}
    values = {"root": root, "backends": ("scripted:oracle",), "trace": traced, "load_code": True}
    return ServiceConfig.model_validate({**values, "init": pool, "run": pool, "eval": pool})


def _noop(count: int) -> list[Task]:
    return [Task(task_id=f"noop/{i}", env="noop", prompt="do nothing") for i in range(count)]


def _shop(count: int) -> list[Task]:
    return generate("shop", n=count)


def _price(count: int) -> list[Task]:
    return [replace(task, env=PRICE_ENV) for task in _shop(count)]


def _bursts(service: Supervisor, sizes: Sizes, values: Values) -> None:
    client = client_of(service)
    kinds = {"noop": _noop(sizes.noop), "price": _price(sizes.price), "shop": _shop(sizes.shop)}
    for name, tasks in kinds.items():
        for pair in range(-1, sizes.pairs):
            for mode in _order(pair):
                run_id = f"{name}-{mode}-{pair + 1}"
                before = cpu_s()
                _burst(client, run_id, tasks, mode)
                if pair < 0:  # the first one warms caches
                    continue
                cpu_ms = (cpu_s() - before) / len(tasks) * 1e3
                values[f"cpu_ms_per_rollout.{name}", mode].append(cpu_ms)
                if name != "noop":
                    tool_ms = _tool_ms(service.config.root / run_id)
                    values[f"tool_ms_per_turn.{name}", mode].append(tool_ms)


def _order(pair: int) -> tuple[str, ...]:
    """Who is first changes: what drifts spoils neither."""
    return MODES if pair % 2 else MODES[::-1]


def _create(client: Client, name: str, mode: str) -> None:
    client.create_run(run_id=name, journal=mode, max_open_groups=SLOTS)


def _burst(client: Client, name: str, tasks: list[Task], mode: str) -> None:
    _create(client, name, mode)
    client.submit(name, tasks, 1, key=name, last=True)
    wait_finished(client, name, POLL_S)


def _tool_ms(directory: Path) -> float:
    """Median time of a turn's tool calls, what the journal does with their answers included."""
    sql = "select median(tool_s) * 1e3 as ms from turns where tool_calls > 0"
    return float(StoredRun(directory).sql(sql).to_pylist()[0]["ms"])


def _handoffs(service: Supervisor, sizes: Sizes, values: Values) -> None:
    """Rows one by one; the marks of each run by themselves."""
    client, began = client_of(service), time.monotonic()
    for pair in range(sizes.pairs):
        for mode in _order(pair):
            _paced(client, f"{mode}-{pair}", _price(sizes.paced), mode)
    marks = list(trace.read(service.config.root / "trace", since_s=began))
    for pair in range(sizes.pairs):
        for mode in MODES:
            mine = [mark for mark in marks if mark.key.run_id == f"{mode}-{pair}"]
            for edge in EDGES:
                times = trace.handoffs(mine, edge)
                values[f"handoff_p50_ms.{edge}", mode].append(1e3 * statistics.median(times))


def _paced(client: Client, name: str, tasks: list[Task], mode: str) -> None:
    _create(client, name, mode)
    start = time.monotonic()
    for i, task in enumerate(tasks):
        time.sleep(max(0.0, start + i / RATE - time.monotonic()))
        client.submit(name, [task], 1, key=f"{name}-{i}", last=i == len(tasks) - 1)
    wait_finished(client, name, POLL_S)


def _figures(values: Values) -> list[Figure]:
    """One a figure: with the journal, and without it as the rival."""
    figures = []
    for what in dict.fromkeys(name for name, _ in values):
        on, off = values[what, "node"], values[what, "off"]
        paired = statistics.median(one / other for one, other in zip(on, off, strict=True))
        note = f"{100 * (paired - 1):+.1f} % (median of {len(on)} pairs); bar: 5 %"
        row, rival = median(what, on, "ms", note=note), statistics.median(off)
        figures.append(row.beside("journal: off", rival, "--set run.journal=off"))
    return figures
