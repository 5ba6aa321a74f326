"""`prorl backup`: a copy of a root from which another service goes on."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from prorl.cli.options import JsonList, RunsRoot
from prorl.cli.output import answer
from prorl.errors import NotFoundError, UserError
from prorl.pluralize import pluralize
from prorl.storage.files.runs import is_url
from prorl.storage.keep.backup import LOG, back_up
from prorl.types import Json


def backup(copy: Path, *, root: RunsRoot = "prorl-runs", json: JsonList = False) -> int:
    """Copy a root while its service works; `prorl serve --root COPY` goes on from there.

    Rollouts that are committed after the start are not in the copy: a service that starts on it
    samples them again. See docs/upgrade.md.

    Example: prorl backup /backups/monday

    Parameters
    ----------
    copy
        Folder to make; it must not exist.
    """
    if is_url(root):
        raise UserError(f"--root {root}", "a folder on a disk: buckets have backups of their own")
    if not (Path(root) / LOG).exists():
        raise NotFoundError(f"no service has worked on {root}: expected a folder with {LOG}")
    if copy.exists():
        raise UserError(f"{copy} exists", "a folder that does not exist yet")
    try:
        rows: list[dict[str, Json]] = [
            {"run": run, "commits": commits} for run, commits in back_up(Path(root), copy)
        ]
    except FileExistsError:  # somebody made it meanwhile, and it stays
        raise UserError(f"{copy} exists", "a folder that does not exist yet") from None
    except (OSError, sqlite3.Error) as error:
        shutil.rmtree(copy, ignore_errors=True)
        raise UserError(f"{copy}: {error}", "a disk with room for a copy of the root") from None
    answer(
        rows, (f"{row['run']}: {pluralize(row['commits'], 'commit')}" for row in rows), json=json
    )
    return 0
