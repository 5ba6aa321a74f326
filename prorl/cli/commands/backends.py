"""`prorl backends`: the model servers of a running service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prorl.cli.commands.status import SERVER_COLUMNS, server_row
from prorl.cli.options import LOOK_S, JsonList, ServiceRoot, ServiceUrl
from prorl.cli.output import say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.client.client import Client, connect
from prorl.errors import UserError

Action = Literal["ls", "add", "rm", "drain", "set"]


def backends(
    action: Action = "ls",
    /,
    *urls: str,
    root: ServiceRoot = DEFAULT_ROOT,
    url: ServiceUrl = "",
    json: JsonList = False,
) -> int:
    """List or change the pool of model servers: state, load, and hits of their prefix caches.

    `cached` is the share of all prompt tokens that came from a cache; `reused` the share of those
    that an earlier turn of the same rollout had sent. A new server is probed for its health, model
    and logprobs before it gets work; a removed server stays out until it is added again.

    Example: prorl backends

    Example: prorl backends add http://10.0.0.7:8000

    Example: prorl backends set http://10.0.0.7:8000 http://10.0.0.8:8000

    Parameters
    ----------
    action
        `ls` lists the pool; `add`, `rm` and `drain` (which lets calls finish) change these
        servers; `set` replaces the pool by them.
    urls
        Addresses of servers, or scripted policies.
    """
    if (action == "ls") == bool(urls):
        raise UserError(
            f"prorl backends {action} with {len(urls)} addresses",
            "no address for ls, at least one for the others",
        )
    with connect(url or root, retry_s=LOOK_S) as client:
        _act(client, action, urls)
        servers = client.backends()
    if json:
        say_json(servers)
    else:
        table(SERVER_COLUMNS, map(server_row, servers))
    return 0


def _act(client: Client, action: Action, urls: Sequence[str]) -> None:
    if action == "set":
        client.replace_backends(urls)
        return
    for url in urls:
        if action == "add":
            client.add_backend(url)
        else:
            client.remove_backend(url, drain=action == "drain")
