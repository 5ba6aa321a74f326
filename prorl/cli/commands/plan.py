"""`prorl plan`: how large a deployment must be, from the timings of runs that are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import say, say_json, table
from prorl.cli.runs import run_directory
from prorl.errors import UserError
from prorl.storage.opened import open_runs

FULL = 0.8
"""Busy share that a stage is planned for: the rest is for waves."""

_MEANS = """
select count(*) as rollouts,
       avg(init_s) as init, avg(run_s) as run, avg(eval_s) as eval,
       avg(num_sampled) as sampled, avg(num_tokens) as tokens,
       avg(greatest(run_s - llm_s - tool_s, 0)) as waiting_s,
       avg(llm_s) as llm_s
from rollouts where run_s > 0 and valid
"""


@dataclass(frozen=True, slots=True)
class Size:
    """What a rate of rollouts needs."""

    slots: dict[str, int]
    """By stage: rows in hand at a time, at `FULL`."""
    sandboxes: int
    nodes: int
    calls_in_flight: float
    """Model calls at a time, of all servers together."""
    sampled_per_s: float


def size(means: Mapping[str, float], rate: float, slots_per_node: Mapping[str, int]) -> Size:
    """Size a deployment by Little's law: rollouts in hand = rate x seconds.

    `means`: seconds by stage, `llm_s` and `sampled` tokens of a rollout; `rate` in rollouts a
    second.

    >>> means = {"init": 0.5, "run": 40, "eval": 2, "llm_s": 20, "sampled": 1000}
    >>> size(means, 10, {"init": 16, "run": 64, "eval": 16}).nodes
    8
    """
    slots = {stage: math.ceil(rate * means[stage] / FULL) for stage in slots_per_node}
    nodes = max(math.ceil(slots[stage] / many) for stage, many in slots_per_node.items())
    return Size(
        slots=slots,
        sandboxes=math.ceil(rate * sum(means[stage] for stage in slots_per_node) / FULL),
        nodes=max(1, nodes),
        calls_in_flight=rate * means["llm_s"],
        sampled_per_s=rate * means["sampled"],
    )


def plan(
    run: StoredName,
    /,
    *,
    rate: float,
    init: int = 16,
    run_slots: int = 64,
    eval_slots: int = 16,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """How many slots, sandboxes, nodes and tokens a second a rate of rollouts needs.

    They are taken to be like those of a stored run, and model servers as fast as they were in it.

    Example: prorl plan demo --rate 20

    Parameters
    ----------
    rate
        Rollouts a second.
    init
        INIT slots of a node.
    run_slots
        RUN slots of a node.
    eval_slots
        EVAL slots of a node.
    """
    if not 0 < rate < math.inf or min(init, run_slots, eval_slots) < 1:
        given = f"--rate {rate:g} with slots {init}, {run_slots}, {eval_slots}"
        raise UserError(given, "numbers above 0")
    (means,) = open_runs(run_directory(run, root)).sql(_MEANS).rows()
    if not means["rollouts"]:
        raise UserError(f"run {run!r} has no finished rollout", "a run with timings")
    found = size(means, rate, {"init": init, "run": run_slots, "eval": eval_slots})
    if json:
        say_json({"from": means, "rate": rate, **asdict(found)})
        return 0
    many = f"{means['rollouts']:,} rollouts of {run}"
    say(f"{many}, {rate:g} of that kind a second, {FULL:.0%} busy:")
    seconds = [(stage, means[stage], slots) for stage, slots in found.slots.items()]
    table(("stage", "seconds each", "slots"), seconds)
    say(f"nodes     {found.nodes} (of {init} INIT, {run_slots} RUN, {eval_slots} EVAL slots)")
    say(f"sandboxes {found.sandboxes:,} at a time")
    calls = f"{found.calls_in_flight:,.0f} calls at a time"
    say(f"model     {calls}, {found.sampled_per_s:,.0f} tokens a second")
    return 0
