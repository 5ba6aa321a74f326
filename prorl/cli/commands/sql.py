"""`prorl sql`: one SELECT over a stored run, with nothing else within reach."""

from __future__ import annotations

from prorl.cli.options import JsonList, RunsRoot, StoredName
from prorl.cli.output import say_json, table
from prorl.cli.runs import run_directory
from prorl.storage.catalog import query


def sql(
    run: StoredName,
    statement: str,
    /,
    *,
    root: RunsRoot = "prorl-runs",
    json: JsonList = False,
    timeout_s: float | None = None,
) -> int:
    """One SELECT over a stored run.

    Its tables: `sequences, rollouts, turns, messages, groups, tasks, deliveries`.

    Example: prorl sql my-run "select task_id, avg(reward) as r from rollouts group by all order by
    r"

    Parameters
    ----------
    statement
        The SELECT.
    timeout_s
        Stop a query that runs longer.
    """
    found = query(run_directory(run, root), statement, timeout_s)
    if json:
        say_json(found.to_pylist())
    else:
        table(found.column_names, (row.values() for row in found.to_pylist()))
    return 0
