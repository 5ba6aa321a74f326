"""`prorl ls`: the runs of a root."""

from __future__ import annotations

from prorl.cli.options import JsonList, RunsRoot
from prorl.cli.output import note, say, say_json, table
from prorl.errors import ProrlError
from prorl.storage.catalog import StoredRun
from prorl.storage.runs import below, list_runs
from prorl.types import Json

_LINE = (
    "select count(*) as n, avg(reward) filter (valid) as reward, count(*) filter (status <>"
    " 'completed') as other from rollouts"
)


def ls(*, root: RunsRoot = "prorl-runs", json: JsonList = False) -> int:
    """The runs of a root, newest last, with what each stored.

    One that cannot be read is told of beside the others, and the exit code is 1.
    """
    found = [_row(root, name) for name in list_runs(root)]
    rows = [one for one in found if "error" not in one]
    bad = [one for one in found if "error" in one]
    if json:
        say_json([*rows, *bad])
    elif not rows and not bad:
        say(f"no runs in {root}; `prorl demo` makes one")
    else:
        table(
            ("run", "rollouts", "reward", "not completed", "MB"),
            [(*list(row.values())[:4], f"{row['bytes'] / 1e6:.1f}") for row in rows],
        )
        for row in bad:
            note(f"{row['run']}: {row['error']}")
    return 1 if bad else 0


def _row(root: str, name: str) -> dict[str, Json]:
    """What a run stored, or `error`: why it cannot be read."""
    try:
        stored = StoredRun(below(root, name))
        (line,) = stored.sql(_LINE).to_pylist()
    except ProrlError as error:
        return {"run": name, "error": str(error)}
    return {
        "run": name,
        "rollouts": line["n"],
        "reward": line["reward"],
        "not_completed": line["other"],
        "bytes": sum(file.bytes for commit in stored.commits for file in commit.files),
    }
