"""`prorl demo`: real tasks through the whole service, offline, in under 90 s.

The policy is scripted and right with a seeded probability per task, so groups differ and the DAPO filter has something to decide;
everything else is real: processes, Flight, sandboxes, tests, tokens, Parquet, SQL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

TASKS = Path(__file__).with_name("demo_tasks.jsonl")


def demo(*, root: Path = Path("prorl-runs"), json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Real tasks through the whole service, in under 90 s: sandboxes, tools, tests, tokens, Parquet, SQL. Offline; no GPU, no model.

    Parameters
    ----------
    root
        Folder for the control log and the runs.
    json
        Print the summary as one JSON object.
    """
    import asyncio

    from prorl.cli.job import Plan, run_plan
    from prorl.cli.output import note
    from prorl.cli.progress import Show

    flags = {"tasks": str(TASKS), "policy": "flaky", "n": 4, "run": {"filter": "dapo"}}
    plan = Plan.make(None, flags, [], root=root)
    if not json:
        note(f"prorl demo: {len(plan.tasks)} tasks (code, math) x {plan.job.num_samples} rollouts, policy {plan.job.policy}, filter dapo")
    return asyncio.run(run_plan(plan, show=Show.NOTHING if json else Show.AUTO, json=json))
