"""`prorl drain`: a node leaves in order."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.options import ServiceRoot
from prorl.cli.output import say
from prorl.cli.runs import DEFAULT_ROOT
from prorl.client.client import connect
from prorl.deploy.leavers import drain_and_wait
from prorl.deploy.leaving import seconds

LOOK_S = 2.0
"""A person waits for the answer."""


def drain(
    node: str,
    /,
    *,
    deadline: str = "",
    wait: Annotated[bool, Parameter(negative="--no-wait")] = True,
    root: ServiceRoot = DEFAULT_ROOT,
    url: str = "",
) -> int:
    """Have a node take nothing new, end what it has in hand, and leave; no rollout is charged.

    Example: prorl drain n7 --deadline 10:00

    Parameters
    ----------
    node
        Its name, as `prorl status` shows it.
    deadline
        Seconds, MM:SS or HH:MM:SS: what INIT and RUN have not ended by then goes to other nodes.
        Default: everything ends first.
    wait
        Return once the node has left; with --no-wait at once.
    url
        Address or join file of a service elsewhere.
    """
    deadline_s = seconds(deadline)
    with connect(url or root, retry_s=LOOK_S) as client:
        if wait:
            held = drain_and_wait(client, node, deadline_s)
            say(f"left     {node}, which had {held} rollouts in hand")
        else:
            held = client.drain(node, deadline_s=deadline_s)["held"]
            say(f"leaving  {node}: {held} rollouts in hand")
    return 0
