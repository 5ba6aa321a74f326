"""`prorl bench dapo`: how long N informative groups take, by who decides what is sampled.

Virtual time over the gateway's own code (`dapo_model.py` says what is modelled and where rivals'
policies are stated), several seeds; a rival's setting is the best of those tried. Rows:
`seconds.NAME`, until the last step is trained; `wasted.NAME`, rollouts that were begun and then cut
off, cancelled or stale (what the filter drops is not among them); `trainer_idle.NAME`. The loads:
`tails`, log-normal turns, half the groups uninformative; `on_policy`, the same where nothing may be
older than its step's weights; or, in their place, `file`, a workload of yours that
`PRORL_WORKLOAD` names: JSON lines of {"rewards": [...], "seconds": [...]}, one a group.

`step_s.skypilot_N` is a step of SkyPilot's published set-up (`SKYPILOT`) at a staleness of N.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from prorl.bench.dapo_model import (
    Outcome,
    Setup,
    Workload,
    batch_then_filter,
    prime_rl,
    refill_within_step,
    serve,
    single_batch_ahead,
)
from prorl.bench.report import Figure, Report, median

BARS = {"batch then filter": 2.0, "refill within the step": 1.3}
"""The factor by which a rival takes longer, at least."""

WASTE_BAR = 0.5
"""The share of what the better of those two throws away."""

SKYPILOT = Setup(slots=184, step=23, train_s=430.9)
"""3 engines, Qwen3-14B, mini-swe-agent on SWE-smith, 23 x 8 rollouts a step; training and
the update of weights take 393.7 + 37.2 s (async_3eng, step 2, in skypilot-org/skypilot's
llm/slime/benchmark).
"""

ENGINES: Mapping[str, Any] = {
    "n": 8,
    "mean_turns": 19.4,
    "turn_s": 20.0,
    "spread": 0.3,
    "most_s": 900.0,
    "uninformative": 0.0,
}
"""The cost of a rollout while all 184 are at work: 405 s, as three engines do 184 in a third of
what one, always full, took (1,215 s, async_1eng). The lone last of a batch are faster there than in
this model: a batch takes 647 s there, 890 here.
"""

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
    if not file:
        rows += await asyncio.to_thread(_skypilot, 10 if quick else 30)
    return Report(bench="dapo", rows=tuple(rows))


def _skypilot(steps: int) -> list[Figure]:
    setup = replace(SKYPILOT, steps=steps)
    works = [Workload(seed=seed, **ENGINES) for seed in range(3)]
    theirs = [single_batch_ahead(work, setup) for work in works]
    source = "slime train_async.py"
    rows = []
    for stale in (1, 2):
        ours = [serve(work, setup, {"filter": "none", "max_staleness": stale}) for work in works]
        step = median(
            f"step_s.skypilot_{stale}", [outcome.seconds / steps for outcome in ours], "s"
        )
        value = statistics.median(outcome.seconds / steps for outcome in theirs)
        rows.append(step.beside("a batch ahead", value, source))
        rows.append(step.beside("published", 660.8, "skypilot llm/slime/benchmark/metrics.json"))
        idle = median(
            f"trainer_idle.skypilot_{stale}",
            [outcome.idle_share for outcome in ours],
            "of the time",
        )
        value = statistics.median(outcome.idle_share for outcome in theirs)
        rows.append(idle.beside("a batch ahead", value, source))
    return rows


def _rows(name: str, load: Load, works: Sequence[Workload]) -> list[Figure]:
    began = time.process_time()
    ours = [serve(work, load.setup, load.run) for work in works]
    cpu_s = time.process_time() - began
    rivals = {rival: _best(RIVALS[rival][1], works, load.setup) for rival in load.rivals}
    wasted = min(_wasted(rivals[rival]) for rival in BARS)
    seconds = median(f"seconds.{name}", [outcome.seconds for outcome in ours], "s", cpu_s=cpu_s)
    waste = median(f"wasted.{name}", [float(outcome.wasted) for outcome in ours], "rollouts")
    idle = median(f"trainer_idle.{name}", [outcome.idle_share for outcome in ours], "of the time")
    share = waste.value / wasted
    met = "met" if share <= WASTE_BAR else "missed"
    saved = f"{share:.2f} of the better rival's with a bar; bar {WASTE_BAR:g}: {met}"
    by_row: list[list[Figure]] = [[], [], []]
    for rival, theirs in rivals.items():
        source, note = RIVALS[rival][0], ""
        took = statistics.median(outcome.seconds for outcome in theirs)
        if rival in BARS:
            met = "met" if took >= BARS[rival] * seconds.value else "missed"
            note = f"bar {BARS[rival]:g}x: {met}"
        by_row[0].append(replace(seconds.beside(rival, took, source), note=note))
        note, saved = saved, ""
        by_row[1].append(replace(waste.beside(rival, _wasted(theirs), source), note=note))
        waited = statistics.median(outcome.idle_share for outcome in theirs)
        by_row[2].append(idle.beside(rival, waited, source))
    return [row for rows in by_row for row in rows]


def _best(policies: Sequence[Policy], works: Sequence[Workload], setup: Setup) -> list[Outcome]:
    """Returns the outcomes of the setting that is fastest over all."""
    outcomes_by_policy = [[policy(work, setup) for work in works] for policy in policies]
    return min(
        outcomes_by_policy, key=lambda outcomes: sum(outcome.seconds for outcome in outcomes)
    )


def _wasted(outcomes: Sequence[Outcome]) -> float:
    return float(statistics.median(outcome.wasted for outcome in outcomes))
