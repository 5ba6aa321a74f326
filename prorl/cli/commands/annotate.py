"""`prorl annotate`: say something of a stored rollout, for good."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated

import orjson
from cyclopts import Parameter

from prorl.cli.output import say, say_json
from prorl.cli.runs import run_directory
from prorl.errors import UserError
from prorl.types import Json


def annotate(
    run: str,
    *rollouts: int,
    label: str = "",
    value: float | None = None,
    comment: str = "",
    turn: int | None = None,
    rows: Path | None = None,
    author: str = "",
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Append labels, numbers or comments on rollouts: the table `annotations` in SQL. Nothing that
    was said is ever changed.

    Example: prorl annotate my-run 17 --label hack --comment "reads the tests"

    Parameters
    ----------
    run
        Name of a run in the root, or path of a run directory.
    rollouts
        Ids of the rollouts that are meant.
    label
        One word.
    value
        A number.
    comment
        In words.
    turn
        The turn that is meant. Default: the whole rollout.
    rows
        JSON lines instead: rollout_id, label, and if wanted value, comment, turn, attempt.
    author
        Who says so. Default: the user's name.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print how many as one JSON object.
    """
    from prorl.storage.annotations import annotate as append
    from prorl.storage.catalog import StoredRun

    if (rows is None) == (not rollouts):
        raise UserError("rollouts and rows" if rollouts else "nothing to annotate", "one of both")
    said = {"label": label, "value": value, "comment": comment, "turn": turn}
    given = [{"rollout_id": i, **said} for i in rollouts] if rows is None else _read(rows)
    stored = StoredRun(run_directory(run, root))
    count = append(stored, given, author=author or getpass.getuser())
    if json:
        say_json({"run": stored.run_id, "annotations": count})
    else:
        say(f"{stored.run_id}: {count:,} annotations more")
    return 0


def _read(path: Path) -> list[dict[str, Json]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "a file of JSON lines") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(dict(orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError, ValueError):
            raise UserError(f"{path}:{number} is no JSON object", "one object a line") from None
    return found
