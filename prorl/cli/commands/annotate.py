"""`prorl annotate`: say something of a stored rollout, for good."""

from __future__ import annotations

import getpass
from pathlib import Path

import orjson

from prorl.analysis.annotations import annotate as append
from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer
from prorl.cli.runs import run_directory
from prorl.errors import UserError
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json


def annotate(
    run: StoredName,
    *rollouts: int,
    label: str = "",
    value: float | None = None,
    comment: str = "",
    turn: int | None = None,
    rows: Path | None = None,
    author: str = "",
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Append labels, numbers or comments on rollouts: the table `annotations` in SQL.

    Nothing that was said is ever changed.

    Example: prorl annotate my-run 17 --label hack --comment "reads the tests"

    Parameters
    ----------
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
    """

    if (rows is None) == (not rollouts):
        raise UserError("rollouts and rows" if rollouts else "nothing to annotate", "one of both")
    said = {"label": label, "value": value, "comment": comment, "turn": turn}
    given = [{"rollout_id": i, **said} for i in rollouts] if rows is None else _read(rows)
    stored = StoredRun(run_directory(run, root))
    count = append(stored, given, author=author or getpass.getuser())
    found = {"run": stored.run_id, "annotations": count}
    answer(found, [f"{stored.run_id}: {count:,} annotations more"], json=json)
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
