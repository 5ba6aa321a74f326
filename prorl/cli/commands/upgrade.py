"""`prorl upgrade`: what an older prorl wrote becomes what this one writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.cli.output import say, say_json
from prorl.cli.runs import run_directory

if TYPE_CHECKING:
    from prorl.types import Json


def upgrade(
    *runs: str,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Bring the control log and the runs of a root up to what this prorl writes. No service may
    work on the root meanwhile. Rows stay as they are; the files that were replaced go with
    `prorl gc`. Killed at any moment it is ended by the next one.

    Example: prorl upgrade --root prorl-runs

    Parameters
    ----------
    runs
        Names of runs in the root, or paths of run directories; then the log stays as it is.
        Default: the log and all runs of the root.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print what was done as one JSON object.
    """
    from prorl.service.log_schema import LOG_VERSION
    from prorl.service.log_upgrade import upgrade_log
    from prorl.storage.catalog import list_runs
    from prorl.storage.layout import RunDir
    from prorl.storage.upgrade import upgrade as bring_up

    log = Path(root) / "control.db"
    before = upgrade_log(log) if not runs and log.exists() else None
    found: list[Json] = []
    for name in runs or list_runs(root):
        run = RunDir(run_directory(name, root))
        done = bring_up(run)
        found.append({"run": run.name, "parts": done.parts, "files": list(done.files)})
    if json:
        say_json({"log": before, "log_now": LOG_VERSION if before else None, "runs": found})
        return 0
    if before is not None:
        changed = f"version {before} is {LOG_VERSION} now" if before < LOG_VERSION else "up to date"
        say(f"control log: {changed}")
    for row in found:
        parts, files = row["parts"], len(row["files"])
        did = f"{parts:,} parts packed anew, {files:,} other files replaced"
        say(f"{row['run']}: {did if parts or files else 'up to date'}")
    return 0
