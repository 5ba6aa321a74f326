"""`prorl node`: this host works for a service on another one; or a node leaves."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.cli.options import LOOK_S, ConfigFile, Flag, ServiceSettings, ServiceUrl
from prorl.cli.output import say
from prorl.cli.runs import DEFAULT_ROOT
from prorl.cli.settings import job_settings, service_settings
from prorl.client.client import connect
from prorl.config import ServiceConfig
from prorl.deploy.leavers import drain_and_wait
from prorl.deploy.leaving import leave_requests, outlast_slurm, seconds, stay
from prorl.deploy.node import keep_certificate
from prorl.deploy.node import node as make_node
from prorl.errors import UserError
from prorl.net.join import Join
from prorl.pluralize import pluralize


def node(
    join: Path | None = None,
    /,
    *,
    name: str = "",
    root: Path | None = None,
    advertise: str = "",
    walltime: str = "",
    drain: str = "",
    deadline: str = "",
    no_wait: Flag = False,
    url: ServiceUrl = "",
    config: ConfigFile = None,
    set_: ServiceSettings = None,
) -> int:
    """Work for a service on another host: sandboxes, INIT, RUN and EVAL here, the rest there.

    With --drain (run it beside the service): that node takes no new work, finishes its rollouts
    and leaves. No rollout is charged with an attempt.

    Example: prorl node node.json --name n7 --set service.run.slots=64

    Example: prorl node --drain n7 --deadline 10:00

    Parameters
    ----------
    join
        ROOT/join/node.json of the service, copied here.
    name
        Name of this node, unique in the service; a second node of the same name replaces the
        first.
    root
        Scratch folder. Default: one in the system's temporary folder, removed after a clean stop.
        With --drain: folder that the service works on. Default: prorl-runs.
    advertise
        Address at which the service reaches this host. Default: the local address used
        to reach the service.
    walltime
        Remaining walltime, as `squeue -h -j $SLURM_JOB_ID -o %L` prints it: the node leaves
        early enough to finish its rollouts.
    drain
        Name of the node that should leave, as `prorl status` shows it.
    deadline
        With --drain: seconds, MM:SS or HH:MM:SS; rollouts that INIT and RUN have not finished by
        then go to other nodes. Default: no limit.
    no_wait
        With --drain: return at once instead of waiting until the node has left.
    """
    if drain:
        if join or name:
            raise UserError("--drain with a join file or --name", "the node's name after --drain")
        others = {"advertise": advertise, "walltime": walltime, "config": config, "set": set_}
        if alien := {name for name, value in others.items() if value}:
            raise UserError(
                f"--{min(alien)} with --drain", "--root or --url, --deadline, --no-wait"
            )
        with connect(url or root or DEFAULT_ROOT, retry_s=LOOK_S) as client:
            if no_wait:
                num_rollouts = client.drain(drain, deadline_s=seconds(deadline))["in_flight"]
                say(f"leaving  {drain}: {pluralize(num_rollouts, 'rollout')} in hand")
            else:
                num_rollouts = drain_and_wait(client, drain, seconds(deadline))
                say(f"left     {drain}, which had {pluralize(num_rollouts, 'rollout')} in hand")
        return 0
    for option, value in {"deadline": deadline, "no-wait": no_wait, "url": url}.items():
        if value:
            raise UserError(f"--{option} without --drain", "--drain NODE")
    if join is None or not name:
        raise UserError("no join file" if join is None else "no --name", "JOIN --name NAME")
    job = job_settings("node", config, {}, set_ or [])
    values = {**job.service, "node_id": name, "advertise": advertise}
    with scratch(root, name) as folder:
        settings = service_settings(values, folder, "")
        return asyncio.run(_work(Join.read(join), settings, seconds(walltime)))


@contextmanager
def scratch(path: Path | None, name: str) -> Iterator[Path]:
    """Yields `path`, or a folder of the node's own that is removed when the block ends well.

    What a node leaves behind when it breaks (its logs say why) stays until one of the same name has
    ended well.
    """
    folder = path or Path(tempfile.gettempdir()) / f"prorl-node-{name}"
    yield folder
    if path is None:
        shutil.rmtree(folder, ignore_errors=True)


async def _work(join: Join, config: ServiceConfig, remaining_s: float | None) -> int:
    async with leave_requests(config) as requests:
        running = await asyncio.to_thread(make_node, join, config)
        async with running:
            say(f"node     {config.node_id} works for {join.url}")
            say("stop     Ctrl-C: what it holds is given to others")
            await stay(running, requests, remaining_s, keep_certificate(join, running.config))
        say("left")
        await outlast_slurm(requests)
    return 0
