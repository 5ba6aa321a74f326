"""Decides which stored runs may go, and removes them: at once for every reader, whatever dies
meanwhile.

A run is kept while somebody counts on it: it is open in the root's control log, it streams to a
trainer that has not committed everything it was handed, or groups of it wait for that trainer. A
run that the log does not know (copied from elsewhere) is nobody's but the user's.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from prorl.errors import ConflictError
from prorl.pluralize import pluralize
from prorl.storage.files.layout import COMMITS, MANIFEST, RunDir

TRASH = ".dropped-"
"""A run that was dropped is called so while its files go; no run can have that name."""

_OWED = """
    SELECT runs.state, json_extract(runs.config, '$.delivery'),
        (SELECT count(*) FROM groups g WHERE g.run_id = runs.run_id AND g.state = 'kept'),
        (SELECT coalesce(max(delivery_seq) + 1, 0) FROM groups g
            WHERE g.run_id = runs.run_id AND g.delivery_seq >= 0),
        (SELECT coalesce(max(seq), 0) FROM cursors c
            WHERE c.run_id = runs.run_id AND c.consumer = 'primary')
    FROM runs WHERE run_id = ?
"""


def why_kept(control_db: Path, run_id: str) -> str:
    """Returns who still counts on a run; empty when nobody does, or when there is no such log."""
    if not control_db.exists():
        return ""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(control_db))}?mode=ro", uri=True)) as log:
            row = log.execute(_OWED, (run_id,)).fetchone()
    except sqlite3.Error as error:  # a read-only disk, too: SQLite needs a file beside the log
        return f"{control_db} cannot be read ({error})"
    if row is None:
        return ""
    state, delivery, waiting, delivered, cursor = row
    if state == "open":
        return "it is open"
    if delivery == "stream" and waiting:
        return pluralize(waiting, "group waits", "groups wait") + " for its trainer"
    if delivery == "stream" and cursor < delivered:
        return f"its trainer has committed {cursor:,} of {pluralize(delivered, 'group')}"
    return ""


def drop_run(directory: Path) -> None:
    """Raises ConflictError when somebody counts on the run. It is renamed first, so that no reader
    ever sees half of it; `drop_trash` finishes what a kill left.
    """
    reason = why_kept(directory.parent / "control.db", directory.name)
    if reason:
        raise ConflictError(
            f"run {directory.name!r} is kept: {reason}",
            "a finished run that was read to its end",
            "`prorl show` it, or remove the directory yourself",
        )
    trash = directory.with_name(f"{TRASH}{directory.name}")
    shutil.rmtree(trash, ignore_errors=True)  # of a run of that name whose dropping was killed
    directory.rename(trash)
    shutil.rmtree(trash)


def drop_trash(root: Path) -> None:
    for path in root.glob(f"{TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)


def last_commit_at(run: RunDir) -> float:
    """Or the run's making; seconds since the epoch."""
    names = [f"{COMMITS}/{name}" for name in run.commit_names()[-1:]] or [MANIFEST]
    return run.modified_at(names[0])
