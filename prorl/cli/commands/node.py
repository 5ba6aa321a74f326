"""`prorl node`: this host works for a service on another one."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.cli.options import ConfigFile, ServiceSettings
from prorl.cli.output import say
from prorl.cli.settings import job_settings, service_settings
from prorl.config import ServiceConfig
from prorl.deploy.leaving import asked, outlast_slurm, seconds, stay
from prorl.deploy.node import node as make_node
from prorl.tls import Join


def node(
    join: Path,
    /,
    *,
    name: str,
    root: Path | None = None,
    advertise: str = "",
    left: str = "",
    config: ConfigFile = None,
    set_: ServiceSettings = None,
) -> int:
    """Work for a service on another host: sandboxes, INIT, RUN and EVAL here, the rest there.

    Example: prorl node node.json --name n7 --set service.run.slots=64

    Parameters
    ----------
    join
        ROOT/join/node.json of the service, copied here.
    name
        Of this node, unique in the service; a second one of the same name replaces the first.
    root
        Scratch folder. Default: one in the system's temporary folder, gone after a stop in order.
    advertise
        Address at which the service reaches this host. Default: that of the way to the service.
    left
        Walltime that is left, as `squeue -h -j $SLURM_JOB_ID -o %L` says it: the node leaves so
        early that what it has in hand can end.
    """
    job = job_settings(config, {}, set_ or [])
    values = {**job.service, "node_id": name, "advertise": advertise}
    with scratch(root, name) as folder:
        settings = service_settings(values, folder, "")
        return asyncio.run(_work(Join.read(join), settings, seconds(left)))


@contextmanager
def scratch(given: Path | None, name: str) -> Iterator[Path]:
    """The folder that was given, or one of the node's own, which goes when the block ends well.

    What a node leaves behind when it breaks (its logs say why) stays until one of the same name has
    ended well.
    """
    folder = given or Path(tempfile.gettempdir()) / f"prorl-node-{name}"
    yield folder
    if given is None:
        shutil.rmtree(folder, ignore_errors=True)


async def _work(join: Join, config: ServiceConfig, left_s: float | None) -> int:
    async with asked(config) as asks:
        running = await asyncio.to_thread(make_node, join, config)
        async with running:
            say(f"node     {config.node_id} works for {join.url}")
            say("stop     Ctrl-C: what it holds is given to others")
            await stay(running, asks, left_s)
        say("left")
        await outlast_slurm(asks)
    return 0
