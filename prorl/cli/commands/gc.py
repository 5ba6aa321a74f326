"""`prorl gc`: merge small parts, remove what nobody needs any more, whole runs too when asked."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from prorl.cli.options import LOOK_S, Flag, JsonList, RunsRoot
from prorl.cli.output import answer, note
from prorl.cli.runs import run_directory
from prorl.errors import (
    ConflictError,
    NotFoundError,
    SchemaError,
    StorageError,
    UnavailableError,
    UserError,
)
from prorl.linux import crashes
from prorl.pluralize import pluralize
from prorl.service.log.log import forget_run
from prorl.storage.files.layout import RunDir
from prorl.storage.files.runs import is_url, list_runs
from prorl.storage.keep.compact import GRACE_S, collect, compact
from prorl.storage.keep.retention import drop_run, drop_trash, last_commit_at
from prorl.types import Json

DAY_S = 86400.0


def gc(
    *runs: str,
    older_than_days: float | None = None,
    drop: Flag = False,
    grace_s: float | None = None,
    root: RunsRoot = "prorl-runs",
    json: JsonList = False,
) -> int:
    """Merge the small parts of runs into large ones, and remove what such merges replaced.

    A service does both by itself; this is for runs that came to an end without it. Safe at any
    time: while a run is written, read or streamed. With --drop: whole runs, never one that is open
    or whose trainer has not committed all that it was given.

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
    """
    if drop and not runs and older_than_days is None:
        raise UserError("--drop without a choice of runs", "names of runs, or --older-than-days N")
    if older_than_days is not None and not older_than_days >= 0:  # NaN, too, would drop every run
        raise UserError(f"--older-than-days {older_than_days:g}", "0 or more days")
    if grace_s is not None and grace_s < 0:
        raise UserError(f"--grace-s {grace_s:g}", "0 or more seconds")
    grace = GRACE_S if grace_s is None else grace_s
    if not runs and not is_url(root) and not Path(root).is_dir():
        raise NotFoundError(f"no folder {root}: expected the root of runs (--root)")
    rows: list[dict[str, Json]] = []
    for directory in [run_directory(name, root) for name in runs or list_runs(root)]:
        if older_than_days is not None and _is_younger(directory, older_than_days):
            continue
        try:
            rows.append(_dropped(directory) if drop else _collected(directory, grace))
        except (ConflictError, SchemaError, StorageError) as error:
            if runs:
                raise
            note(str(error))
    if not is_url(root):
        drop_trash(Path(root))
    answer(rows, (_line(row, grace) for row in rows), json=json)
    return 0


def _is_younger(directory: str, days: float) -> bool:
    return last_commit_at(RunDir(directory)) > time.time() - days * DAY_S


def _dropped(directory: str) -> dict[str, Json]:
    if is_url(directory):
        raise UserError(f"--drop {directory}", "a run on a local disk")
    name = RunDir(directory).name
    crashes.forget(Path(directory).with_name("quarantine"), name)
    if not _is_deleted_by_service(Path(directory)):
        drop_run(Path(directory))
        if (log := Path(directory).with_name("control.db")).exists():
            with suppress(ConflictError):  # a service works on the root: its log lacks the run
                forget_run(log, name)
    return {"run": name, "dropped": True, "files": []}


def _is_deleted_by_service(directory: Path) -> bool:
    """Returns whether a service works on the root and removed the run, from its log, too. Raises
    ConflictError for a run that is needed.
    """
    from prorl.client.client import connect  # with Arrow's RPC, which other commands do without

    if not (directory.parent / "service.json").exists():
        return False
    try:
        with connect(directory.parent, retry_s=LOOK_S) as client:
            client.delete(directory.name)
    except (UnavailableError, NotFoundError):  # it was killed; or the run was copied here
        return False
    return True


def _collected(directory: str, grace_s: float) -> dict[str, Json]:
    run = RunDir(directory)
    run.manifest()
    try:
        merged = compact(run, everything=True)
    except StorageError as error:
        if error.errno not in (None, errno.ENOENT):
            raise  # trouble of the system, as a full disk
        raise StorageError(
            f"{error}; expected parts as their commits name them; `prorl verify {run.name}` lists"
            " what is damaged: mend it by a copy of these files. Nothing was changed"
        ) from None
    files = collect(run, grace_s=grace_s)
    return {
        "run": run.name,
        "dropped": False,
        "merged": [merged.num_before, len(merged.commit.files)] if merged else None,
        "files": files,
        "waiting": len(run.replaced_files()),
    }


def _line(row: dict[str, Json], grace_s: float) -> str:
    outcome = "dropped" if row["dropped"] else f"{pluralize(len(row['files']), 'file')} removed"
    if row.get("merged"):
        before, now = row["merged"]
        outcome = f"{pluralize(before, 'file is', 'files are')} {now:,} now, {outcome}"
    if row.get("waiting"):
        outcome += f", {row['waiting']:,} go {grace_s:g} s after they were replaced"
    return f"{row['run']}: {outcome}"
