"""`prorl replay`: serve a stored run to trainers, in the order in which it was delivered.

Needs no service and no control log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.analysis.replay_transform import ReplayTransform, open_transformed
from prorl.cli.job import filter_text
from prorl.cli.options import Flag, JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer
from prorl.cli.runs import run_directory
from prorl.deploy.running import signals
from prorl.errors import UserError
from prorl.flight import FlightNetwork
from prorl.pluralize import pluralize
from prorl.storage.files.layout import RunDir
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import ReplayOrder

HOT_BYTES = 1 << 30
MAX_PORT = (1 << 16) - 1


def replay(
    run: StoredName,
    /,
    *,
    select: str = "",
    filter_: Annotated[str, Parameter(name="--filter")] = "",
    score: str = "",
    shuffle: int | None = None,
    record: Flag = False,
    port: int = 0,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Serve a stored run to trainers, with the same values in the same order.

    Cursors of the live run still work. With a selection, a filter, a score or a shuffle it is a run
    of another name.

    Example: prorl replay my-run --port 7701

    Example: prorl replay my-run --score harder-tests --filter dapo --shuffle 7

    Parameters
    ----------
    select
        SQL with a column group_id: these groups in this order, e.g. "select group_id from tasks
        where data_source = 'code'". Default: the order of delivery.
    filter_
        dapo, or SQL (or a file of it) as for a run, decided anew over the rewards that are served.
    score
        Rewards of this scoring (`prorl eval --stored`) in place of the first ones.
    shuffle
        Seed to shuffle the groups by.
    record
        Let trainers append the lineage of their checkpoints to the table `trained` of the run, and
        what they log to `metrics`, under the
        name of the replay. Without it a replay changes nothing on disk.
    port
        Flight port on 127.0.0.1; default: any free one.
    """
    if not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}", f"1 to {MAX_PORT}", "leave it out for any free port")
    token = os.environ.get("PRORL_TOKEN") or secrets.token_urlsafe(32)
    sql = filter_text(filter_) if filter_ else ""
    transform = ReplayTransform(select=select, filter=sql, score=score, seed=shuffle)
    return asyncio.run(_serve(run_directory(run, root), transform, record, port, token, json))


async def _serve(
    directory: str, transform: ReplayTransform, record: bool, port: int, token: str, json: bool
) -> int:
    order, index = open_transformed(directory, transform)
    hot = Path(tempfile.mkdtemp(prefix="prorl-replay-"))
    endpoint = Endpoint(hot, HOT_BYTES)
    try:
        endpoint.add(order, index, RunDir(directory) if record else None)
        async with signals() as stop, FlightNetwork(token=token) as network:
            location = await network.listen(f"grpc://127.0.0.1:{port}", {}, endpoint.reads())
            facts = {"run": order.run_id, "location": location, "token": token}
            answer(facts | {"groups": order.delivered}, _lines(order, location, token), json=json)
            await stop.requested.wait()
    finally:
        endpoint.close()
        shutil.rmtree(hot, ignore_errors=True)
    return 0


def _lines(order: ReplayOrder, location: str, token: str) -> Iterator[str]:
    yield f"replay   {order.run_id}: {pluralize(order.delivered, 'group')} at {location}"
    stream = f"token={token!r}).stream({order.run_id!r})"
    yield f"connect  prorl.connect({location!r}, {stream}"
    yield "stop     Ctrl-C; until then any number of trainers may read it"
