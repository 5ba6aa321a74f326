"""`prorl gc`: remove what nobody needs any more, whole runs too when asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.cli.output import note, say, say_json
from prorl.cli.runs import run_directory
from prorl.errors import ConflictError, UserError

if TYPE_CHECKING:
    from prorl.types import Json

DAY_S = 86400.0


def gc(
    *runs: str,
    older_than_days: float | None = None,
    drop: Annotated[bool, Parameter(negative="")] = False,
    grace_s: float | None = None,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Remove parts that a compaction replaced and what dead compactions left. With --drop: whole
    runs, never one that is open or whose trainer has not committed all that it was given.

    Example: prorl gc

    Example: prorl gc --drop --older-than-days 30

    Parameters
    ----------
    runs
        Names of runs in the root, or paths of run directories. Default: all runs of the root.
    older_than_days
        Only runs whose last commit is that old.
    drop
        Remove these runs altogether; needs names or --older-than-days.
    grace_s
        How long ago a part must have been replaced. Default: 60; 0 only when nobody reads.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print what was removed as one JSON object.
    """
    from prorl.storage.catalog import is_url, list_runs
    from prorl.storage.collect import GRACE_S, collect, replaced
    from prorl.storage.layout import RunDir
    from prorl.storage.retention import drop_run, drop_trash, last_commit_at

    if drop and not runs and older_than_days is None:
        raise UserError("--drop without a choice of runs", "names of runs, or --older-than-days N")
    if grace_s is not None and grace_s < 0:
        raise UserError(f"--grace-s {grace_s:g}", "0 or more seconds")
    found: list[Json] = []
    chosen = [run_directory(name, root) for name in runs or list_runs(root)]
    grace = GRACE_S if grace_s is None else grace_s
    before = None if older_than_days is None else time.time() - older_than_days * DAY_S
    for directory in chosen:
        run = RunDir(directory)
        if before is not None and last_commit_at(run) > before:
            continue
        try:
            if drop:
                if is_url(directory):
                    raise UserError(f"--drop {directory}", "a run on a local disk")
                drop_run(Path(directory))
                found.append({"run": run.name, "dropped": True, "files": []})
            else:
                files = collect(run, grace_s=grace)
                waiting = len(replaced(run))
                found.append(
                    {"run": run.name, "dropped": False, "files": files, "waiting": waiting}
                )
        except ConflictError as error:
            if runs:
                raise
            note(str(error))
    if not is_url(root):
        drop_trash(Path(root))
    if json:
        say_json(found)
        return 0
    for row in found:
        what = "dropped" if row["dropped"] else f"{len(row['files']):,} files removed"
        if row.get("waiting"):
            what += f", {row['waiting']:,} go {grace:g} s after they were replaced"
        say(f"{row['run']}: {what}")
    return 0
