"""`prorl eval`: how good a policy is: pass@k with an interval, read back from what was stored.

Nothing is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.cli.job import JobPlan
from prorl.cli.options import ConfigFile, Flag, JsonObject, Quiet, Settings
from prorl.cli.output import say, say_json, table
from prorl.cli.passk import evaluation
from prorl.cli.progress import Show
from prorl.cli.run_job import run_plan

if TYPE_CHECKING:
    from prorl.cli.passk import Passed


def evaluate(
    *,
    tasks: list[str] | None = None,
    policy: str | None = None,
    n: Annotated[int | None, Parameter(name=["-n", "--n"])] = None,
    temperature: float | None = None,
    greedy: Flag = False,
    limit: int | None = None,
    root: Path | None = None,
    name: str | None = None,
    seed: int | None = None,
    threshold: float = 1.0,
    config: ConfigFile = None,
    set_: Settings = None,
    json: JsonObject = False,
    quiet: Quiet = False,
) -> int:
    """How good a policy is: pass@k with Wilson's 95 % interval over tasks; nothing is trained.

    Example: prorl eval --tasks 'arith:heldout?n=512' --tasks 'shop:heldout?n=512' --policy toy
    --greedy

    Parameters
    ----------
    tasks
        A generated set such as arith:heldout?n=512 (several may be given), or one JSON Lines file.
    policy
        toy, a checkpoint's directory, http://HOST:PORT of a model server, or a scripted policy.
    n
        Rollouts of each task; pass@k is given for k up to n. Default 1.
    temperature
        Of the sampled answers. Default 1.
    greedy
        Answer each task once more at temperature 0.
    limit
        Only the first tasks.
    root
        Folder for the control log and the runs. Default: prorl-runs.
    name
        Name of the run. Default: made from tasks and policy.
    seed
        Of the run; the same seed repeats it.
    threshold
        A rollout is right from this reward on.
    """
    flags = {
        "tasks": ",".join(tasks) if tasks else None,
        "policy": policy,
        "n": 1 if n is None else n,
        "limit": limit,
        "name": name,
        "greedy": greedy or None,
        "run": {} if seed is None else {"seed": seed},
    }
    warmth = [] if temperature is None else [f"run.sampling.temperature={temperature}"]
    plan = JobPlan.make(config, flags, [*(set_ or []), *warmth], root=root)

    def present(directory: Path, *, json: bool, elapsed_s: float | None) -> int:
        return show_evaluation(directory, threshold, json=json)

    show = Show.NOTHING if quiet or json else Show.AUTO
    return asyncio.run(run_plan(plan, show=show, json=json, present=present))


def show_evaluation(directory: Path, threshold: float, *, json: bool) -> int:
    """Print pass@k; 1 when nothing counts."""
    found = evaluation(directory, threshold)
    if json:
        rows = [one.to_json() for one in found]
        place = {"run": directory.name, "directory": str(directory)}
        say_json({**place, "threshold": threshold, "rows": rows})
    else:
        ks = sorted({k for one in found for k in one.at})
        shares = (f"pass@{k} [95 % Wilson]" for k in ks)
        table(("set", "mode", "tasks", "n", "masked", *shares), _rows(found, ks))
        say(f"read back by SQL from {directory}")
    return 0 if any(one.tasks for one in found) else 1


def _rows(found: Sequence[Passed], ks: Sequence[int]) -> Iterator[Sequence[object]]:
    for one in found:
        shares = [str(one.at[k]) if k in one.at else "" for k in ks]
        yield (one.data_source, one.mode, one.tasks, one.n, one.masked, *shares)
