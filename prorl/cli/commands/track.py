"""`prorl track`: what a run measures, to TensorBoard or W&B, and its rollouts as OTLP traces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.analysis.tracking import is_open
from prorl.analysis.tracking import track as send
from prorl.cli.options import Flag, RunsRoot, StoredName
from prorl.cli.output import say
from prorl.cli.runs import run_directory
from prorl.config.trackers import OTLP
from prorl.errors import UserError
from prorl.storage.read.catalog import StoredRun


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
    """Send the metrics of a run to trackers (TensorBoard, W&B, OpenTelemetry) until it ends.

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
        Folder for TensorBoard's event files and W&B's folder.
    endpoint
        With otlp: a collector. Default: what OTEL_EXPORTER_OTLP_ENDPOINT says.
    once
        Send what is stored now, and end.
    """
    where = run_directory(run, root)
    if not to:
        raise UserError("no tracker", "--to tensorboard, wandb, module:Class or otlp")
    if endpoint and OTLP not in to:
        raise UserError("--endpoint without --to otlp", "both")
    run_id = StoredRun(where).run_id

    def ended() -> bool:
        return once or not is_open(root, run_id)

    say(send(where, to, folder, endpoint, ended, time.sleep))
    return 0
