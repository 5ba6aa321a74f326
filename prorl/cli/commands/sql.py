"""`prorl sql`: one SELECT over stored runs, with nothing else within reach."""

from __future__ import annotations

from prorl.analysis.opened import open_runs
from prorl.cli.options import JsonList, RunsRoot, StoredName
from prorl.cli.output import say_json, table
from prorl.cli.runs import run_directory
from prorl.errors import UserError


def sql(
    run: StoredName,
    /,
    *more: str,
    root: RunsRoot = "prorl-runs",
    json: JsonList = False,
    timeout_s: float | None = None,
) -> int:
    """Run one SELECT over one or several stored runs; every table has the column run_id.

    Its tables: `sequences, rollouts, turns, messages, groups, tasks, deliveries, scores, trained,
    annotations, versions, metrics, attempts, partial`; made of them: `passk` (pass@k of each
    group), `tool_calls`.

    Example: prorl sql my-run "select task_id, avg(reward) as r from rollouts group by all order by
    r"

    Example: prorl sql one other "select run_id, k, avg(pass_at_k) from passk group by all"

    Parameters
    ----------
    more
        Further runs, then the SELECT.
    timeout_s
        Stop a query that runs longer.
    """
    if not more:
        raise UserError(f"prorl sql {run}", "runs, then one SELECT")
    places = [run_directory(name, root) for name in (run, *more[:-1])]
    rows = open_runs(*places).table(more[-1], timeout_s)
    if json:
        say_json(rows.to_pylist())
    else:
        table(rows.column_names, (row.values() for row in rows.to_pylist()), cut=True)
    return 0
