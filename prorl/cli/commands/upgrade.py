"""`prorl upgrade`: what an older prorl wrote becomes what this one writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from prorl.cli.options import JsonObject, RunsRoot
from prorl.cli.output import answer
from prorl.cli.runs import run_directory
from prorl.service.log_schema import LOG_VERSION
from prorl.service.log_upgrade import upgrade_log
from prorl.storage.layout import RunDir
from prorl.storage.runs import list_runs
from prorl.storage.upgrade import upgrade as bring_up
from prorl.types import Json


def upgrade(*runs: str, root: RunsRoot = "prorl-runs", json: JsonObject = False) -> int:
    """Bring the control log and the runs of a root up to what this prorl writes.

    No service may work on the root meanwhile. Rows stay as they are; the files that were replaced
    go with `prorl gc`. Killed at any moment it is ended by the next one.

    Example: prorl upgrade --root prorl-runs

    Parameters
    ----------
    runs
        Names of runs in the root, or paths of run directories; then the log stays as it is.
        Default: the log and all runs of the root.
    """
    log = Path(root) / "control.db"
    before = upgrade_log(log) if not runs and log.exists() else None
    found = [_upgraded(run_directory(name, root)) for name in runs or list_runs(root)]
    now = LOG_VERSION if before else None
    answer({"log": before, "log_now": now, "runs": found}, _lines(before, found), json=json)
    return 0


def _upgraded(directory: str) -> dict[str, Json]:
    run = RunDir(directory)
    done = bring_up(run)
    return {"run": run.name, "parts": done.parts, "files": list(done.files)}


def _lines(log: int | None, runs: Sequence[dict[str, Json]]) -> Iterator[str]:
    if log is not None:
        changed = f"version {log} is {LOG_VERSION} now" if log < LOG_VERSION else "up to date"
        yield f"control log: {changed}"
    for row in runs:
        parts, files = row["parts"], len(row["files"])
        did = f"{parts:,} parts packed anew, {files:,} other files replaced"
        yield f"{row['run']}: {did if parts or files else 'up to date'}"
