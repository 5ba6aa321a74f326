"""`prorl sql`: one SELECT over a stored run, with nothing else within reach."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import say_json, table
from prorl.cli.runs import run_directory
from prorl.storage.catalog import query


def sql(
    run: str,
    statement: str,
    /,
    *,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
    timeout_s: float | None = None,
) -> int:
    """One SELECT over `sequences, rollouts, turns, messages, groups, tasks, deliveries` of a stored
    run.

    Example: prorl sql my-run "select task_id, avg(reward) as r from rollouts group by all order by
    r"

    Parameters
    ----------
    run
        Name of a run in the root, or path of a run directory.
    statement
        The SELECT.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print a JSON list of rows.
    timeout_s
        Stop a query that runs longer.
    """
    found = query(run_directory(run, root), statement, timeout_s)
    if json:
        say_json(found.to_pylist())
    else:
        table(found.column_names, (row.values() for row in found.to_pylist()))
    return 0
