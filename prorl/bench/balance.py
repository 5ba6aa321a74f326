"""`prorl bench balance`: how long rollouts take by who says which server serves them.

Simulated servers (`balance_sim.py`), the real `prorl.service.balancer` and the real paces. A
rollout is turns of heavy-tailed length with tool calls between them, stays on its server, and
another begins when one ends. All see the same rollouts; seeds are repeats. Rivals
(`balance_picks.py`): ProRL's heap over all that was ever assigned (a count that never goes down),
round robin, a hash of the task, our own without the paces, and one that knows what each rollout
will sample and how fast servers are: what even that does not reach cannot be had by choosing
servers.

Not simulated: prefill, and prefix caches, which favour whoever stays.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np

from prorl.bench.balance_picks import ALL_KNOWN, HEAP, OURS, PICKS
from prorl.bench.balance_sim import LOADS, Work, simulate
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report, median

ROLLOUTS = 1500
BAR = 1.3


async def run(quick: bool) -> Report:
    """Simulate; `quick` takes half of the rollouts and one seed."""
    rollouts, seeds = (ROLLOUTS // 2, 1) if quick else (ROLLOUTS, 3)
    rows: list[Figure] = []
    for name, load in LOADS.items():
        began = time.process_time()
        works = [Work.draw(load, seed, rollouts) for seed in range(seeds)]
        p90_s = {
            pick: [float(np.quantile(simulate(make, load, work), 0.9)) for work in works]
            for pick, make in PICKS.items()
        }
        rows += _rows(name, p90_s, time.process_time() - began)
    return Report(bench="balance", machine=machine(), rows=tuple(rows))


def _rows(name: str, p90_s: dict[str, list[float]], cpu_s: float) -> list[Figure]:
    ours = median(f"rollout_p90_s.{name}", p90_s[OURS], "s", cpu_s=cpu_s)
    middles = {pick: statistics.median(values) for pick, values in p90_s.items()}
    best = middles[HEAP] / middles[ALL_KNOWN]
    return [
        replace(
            ours.beside(rival, value, f"prorl.bench.balance, {rival}"),
            note=_note(value / ours.value, best) if rival == HEAP else "",
        )
        for rival, value in middles.items()
        if rival != OURS
    ]


def _note(ratio: float, best: float) -> str:
    """Whether the bar is met; `best`: what one has that knows the work."""
    if ratio >= BAR:
        return f"bar {BAR}x: met"
    return f"bar {BAR}x: missed; one that knows the work has {best:.2f}x"
