"""`prorl ls`: the runs of a root."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import say, say_json, table
from prorl.storage.catalog import StoredRun, below, list_runs

_LINE = (
    "select count(*) as n, avg(reward) filter (valid) as reward, count(*) filter (status <>"
    " 'completed') as other from rollouts"
)


def ls(*, root: str = "prorl-runs", json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """The runs of a root, newest last, with what each stored.

    Parameters
    ----------
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print a JSON list.
    """
    rows = []
    for name in list_runs(root):
        stored = StoredRun(below(root, name))
        (line,) = stored.sql(_LINE).to_pylist()
        size = sum(file.bytes for commit in stored.commits for file in commit.files)
        rows.append(
            {
                "run": name,
                "rollouts": line["n"],
                "reward": line["reward"],
                "not_completed": line["other"],
                "bytes": size,
            }
        )
    if json:
        say_json(rows)
    elif not rows:
        say(f"no runs in {root}; `prorl demo` makes one")
    else:
        table(
            ("run", "rollouts", "reward", "not completed", "MB"),
            [(*list(row.values())[:4], f"{row['bytes'] / 1e6:.1f}") for row in rows],
        )
    return 0
