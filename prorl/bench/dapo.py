"""`prorl bench dapo`: how long N informative groups take, by who decides what is sampled.

Virtual time over the gateway's own code (`dapo_model.py` says what is modelled and where rivals'
policies are stated), several seeds; a rival's setting is the best of those tried. Rows:
`seconds.NAME`, until the last step is trained; `wasted.NAME`, rollouts that were begun and then cut
off, cancelled or stale (what the filter drops is not among them); `trainer_idle.NAME`. The loads:
`tails`, log-normal turns, half the groups uninformative; `on_policy`, the same where nothing may be
older than its step's weights; or, in their place, `file`, a workload of yours that
`PRORL_WORKLOAD` names: JSON lines of {"rewards": [...], "seconds": [...]}, one a group.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from prorl.bench.dapo_model import (
    Outcome,
    Setup,
    Workload,
    batch_then_filter,
    prime_rl,
    refill_within_step,
    serve,
)
from prorl.bench.report import Figure, Report, median

BARS = {"batch then filter": 2.0, "refill within the step": 1.3}
"""How many times longer a rival takes, at least."""

WASTE_BAR = 0.5
"""Of what the better of those two throws away."""

Policy = Callable[[Workload, Setup], Outcome]

RIVALS: dict[str, tuple[str, Sequence[Policy]]] = {
    "batch then filter": ("verl recipe/dapo, gen_batch_size 1x", [batch_then_filter]),
    "verl": (
        "verl recipe/dapo, gen_batch_size 2x, 3x",
        [
            lambda work, setup: batch_then_filter(work, setup, 2.0),
            lambda work, setup: batch_then_filter(work, setup, 3.0),
        ],
    ),
    "refill within the step": ("ProRL async_server_dapo.py", [refill_within_step]),
    "prime-rl": (
        "prime-rl scheduler.py, oversampling_factor 1, 2, 3",
        [
            prime_rl,
            lambda work, setup: prime_rl(work, setup, 2.0),
            lambda work, setup: prime_rl(work, setup, 3.0),
        ],
    ),
}


class Load(NamedTuple):
    setup: Setup
    run: dict[str, object]
    """Settings of our run, over those of the others."""
    rivals: tuple[str, ...]


async def run(quick: bool) -> Report:
    setup = Setup(steps=6 if quick else 20)
    if quick:
        setup = replace(setup, slots=128, step=16)
    loads = {
        "tails": Load(setup, {}, tuple(RIVALS)),
        "on_policy": Load(setup, {"max_staleness": 0}, tuple(BARS)),
    }
    file = os.environ.get("PRORL_WORKLOAD", "")
    if file:
        loads = {"file": loads["tails"]}
    rows: list[Figure] = []
    for name, load in loads.items():
        works = [
            Workload(seed=seed, file=Path(file) if file else None)
            for seed in range(1 if quick or file else 3)
        ]
        rows += await asyncio.to_thread(_rows, name, load, works)
    return Report(bench="dapo", rows=tuple(rows))


def _rows(name: str, load: Load, works: Sequence[Workload]) -> list[Figure]:
    began = time.process_time()
    ours = [serve(work, load.setup, load.run) for work in works]
    cpu_s = time.process_time() - began
    rivals = {rival: _best(RIVALS[rival][1], works, load.setup) for rival in load.rivals}
    wasted = min(_wasted(rivals[rival]) for rival in BARS)
    rows = []
    for rival, found in rivals.items():
        row = median(f"seconds.{name}", [one.seconds for one in ours], "s", cpu_s=cpu_s)
        value = statistics.median(one.seconds for one in found)
        note = ""
        if rival in BARS:
            met = "met" if value >= BARS[rival] * row.value else "missed"
            note = f"bar {BARS[rival]:g}x: {met}"
        rows.append(replace(row.beside(rival, value, RIVALS[rival][0]), note=note))
    for rival, found in rivals.items():
        row = median(f"wasted.{name}", [float(one.wasted) for one in ours], "rollouts")
        share = row.value / wasted
        met = "met" if share <= WASTE_BAR else "missed"
        note = f"{share:.2f} of the better rival's with a bar; bar {WASTE_BAR:g}: {met}"
        note = note if rival == next(iter(BARS)) else ""
        rows.append(replace(row.beside(rival, _wasted(found), RIVALS[rival][0]), note=note))
    for rival, found in rivals.items():
        row = median(f"trainer_idle.{name}", [one.idle_share for one in ours], "of the time")
        value = statistics.median(one.idle_share for one in found)
        rows.append(row.beside(rival, value, RIVALS[rival][0]))
    return rows


def _best(policies: Sequence[Policy], works: Sequence[Workload], setup: Setup) -> list[Outcome]:
    """Of the setting that is fastest over all."""
    found = [[policy(work, setup) for work in works] for policy in policies]
    return min(found, key=lambda outcomes: sum(one.seconds for one in outcomes))


def _wasted(outcomes: Sequence[Outcome]) -> float:
    return float(statistics.median(one.wasted for one in outcomes))
