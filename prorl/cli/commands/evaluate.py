"""`prorl eval`: how good a policy is: pass@k with an interval, read back from what was stored.

Nothing is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.cli.job import JobPlan, run_plan
from prorl.cli.output import say, say_json, table
from prorl.cli.passk import evaluation
from prorl.cli.progress import Show

if TYPE_CHECKING:
    from prorl.cli.passk import Passed
    from prorl.types import Json

Flag = Annotated[bool, Parameter(negative="")]


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
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    json: Flag = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """How good a policy is on tasks: pass@k (unbiased estimator) with Wilson's 95 % interval over
    tasks. Nothing is trained.

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
    config
        YAML file; see `prorl schema --config`.
    set_
        Any setting, as KEY=VALUE.
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
    sets = [
        *(set_ or []),
        *([] if temperature is None else [f"run.sampling.temperature={temperature}"]),
    ]
    return _run(config, flags, sets, root, threshold, json=json, quiet=quiet)


def _run(
    config: Path | None,
    flags: Mapping[str, Json],
    sets: Sequence[str],
    root: Path | None,
    threshold: float,
    *,
    json: bool,
    quiet: bool,
) -> int:
    plan = JobPlan.make(config, flags, sets, root=root)

    def present(directory: Path, *, json: bool, elapsed_s: float | None) -> int:
        return show_evaluation(directory, threshold, json=json)

    return asyncio.run(
        run_plan(
            plan, show=Show.NOTHING if quiet or json else Show.AUTO, json=json, present=present
        )
    )


def show_evaluation(directory: Path, threshold: float, *, json: bool) -> int:
    """Print pass@k; 1 when nothing counts."""
    found = evaluation(directory, threshold)
    if json:
        say_json(
            {
                "run": directory.name,
                "directory": str(directory),
                "threshold": threshold,
                "rows": [one.to_json() for one in found],
            }
        )
    else:
        ks = sorted({k for one in found for k in one.at})
        table(
            ("set", "mode", "tasks", "n", "masked", *(f"pass@{k} [95 % Wilson]" for k in ks)),
            _rows(found, ks),
        )
        say(f"read back by SQL from {directory}")
    return 0 if any(one.tasks for one in found) else 1


def _rows(found: Sequence[Passed], ks: Sequence[int]) -> Iterator[Sequence[object]]:
    for one in found:
        shares = [str(one.at[k]) if k in one.at else "" for k in ks]
        yield (one.data_source, one.mode, one.tasks, one.n, one.masked, *shares)
