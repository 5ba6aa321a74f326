"""`prorl track`: what a run measures, to TensorBoard or W&B, and its rollouts as OTLP traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.analysis.traces import Exporter, ReadPosition, traces
from prorl.analysis.track import POLL_S, follow, open_tracker
from prorl.cli.options import Flag, RunsRoot, StoredName
from prorl.cli.output import say
from prorl.cli.runs import run_directory
from prorl.client import connect
from prorl.errors import ProrlError, UserError
from prorl.storage.read.catalog import StoredRun

OTLP = "otlp"


def track(
    run: StoredName,
    /,
    *,
    to: Annotated[list[str], Parameter(consume_multiple=True)],
    folder: Path = Path("prorl-tracked"),
    endpoint: str = "",
    once: Flag = False,
    root: RunsRoot = "prorl-runs",
) -> int:
    """Send what a run measures to the trackers that you have, until it ends.

    The scalars are those of the viewer's page Curves. It reads what is stored, in a process of its
    own: the service spends nothing on it, and it may be started later, or again.

    Example: prorl track my-run --to tensorboard wandb

    Example: prorl track my-run --to otlp --endpoint http://collector:4318/v1/traces

    Parameters
    ----------
    to
        tensorboard, wandb (each with the package of that name), your own as module:Class, or otlp:
        each rollout as an OpenTelemetry trace.
    folder
        Where TensorBoard's event files and W&B's folder go.
    endpoint
        With otlp: a collector. Default: what OTEL_EXPORTER_OTLP_ENDPOINT says.
    once
        Send what is stored now, and end.
    """
    where = run_directory(run, root)
    names = list(dict.fromkeys(to))
    if not names:
        raise UserError("no tracker", "--to tensorboard, wandb, module:Class or otlp")
    if endpoint and OTLP not in names:
        raise UserError("--endpoint without --to otlp", "both")
    stored = StoredRun(where)

    def ended() -> bool:
        return once or not _is_open(root, stored.run_id)

    if OTLP in names:
        if len(names) > 1:
            raise UserError("otlp beside other trackers", "a process of its own for each")
        return _trace(where, endpoint, ended)
    trackers = [open_tracker(name, stored, folder) for name in names]
    try:
        sent = follow(where, trackers, ended)
    finally:
        for tracker in trackers:
            tracker.close()
    say(f"{sent:,} scalars of {stored.run_id} sent to {', '.join(names)}")
    return 0


def _trace(where: str, endpoint: str, ended: Callable[[], bool]) -> int:
    exporter, last, count = Exporter(endpoint), ReadPosition(), 0
    try:
        while True:
            is_last = ended()
            for trace in traces(StoredRun(where), last):
                exporter.write(trace)
                last, count = trace.place, count + 1
            if is_last:
                break
            time.sleep(POLL_S)
    finally:
        exporter.close()
    say(f"{count:,} rollouts sent as traces")
    return 0


def _is_open(root: str, run: str) -> bool:
    """Whether a service works on the run and it has not ended."""
    try:
        with connect(root, retry_s=0.1) as client:
            return bool(client.run(run)["state"] == "open")
    except ProrlError:
        return False
