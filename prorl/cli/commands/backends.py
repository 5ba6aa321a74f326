"""`prorl backends`: the model servers of a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from prorl.cli.output import clean, say_json, table
from prorl.client.client import connect
from prorl.errors import UserError

Action = Literal["ls", "add", "rm", "drain", "set"]

SHARES = ("cached_share", "reused_share")
LOOK_S = 2.0
"""A person waits for the answer."""


def backends(
    action: Action = "ls",
    *urls: str,
    root: Path = Path("prorl-runs"),
    url: str = "",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """The pool of model servers: state, work, and the share of prompt tokens that their prefix
    caches had (`cached`: of all, `reused`: of those that their rollout had said before). A server
    is asked for its health, model and logprobs before it counts; what is taken out stays out until
    it is added again.

    Example: prorl backends

    Example: prorl backends add http://10.0.0.7:8000

    Example: prorl backends set http://10.0.0.7:8000 http://10.0.0.8:8000

    Parameters
    ----------
    action
        `ls`; `add`, `rm`, `drain` (finishes what it has) these; `set`: these and no other.
    urls
        Addresses of servers, or scripted policies.
    root
        Folder that the service works on.
    url
        Address of a service elsewhere (its token in PRORL_TOKEN).
    json
        Print JSON.
    """
    if (action == "ls") == bool(urls):
        raise UserError(
            f"prorl backends {action} with {len(urls)} addresses",
            "no address for ls, at least one for the others",
        )
    with connect(url or root, retry_s=LOOK_S) as client:
        if action == "set":
            client.replace_backends(urls)
        for one in urls:
            if action == "add":
                client.add_backend(one)
            elif action in ("rm", "drain"):
                client.remove_backend(one, drain=action == "drain")
        found = client.backends()
    if json:
        say_json(found)
        return 0
    rows = [
        (
            one["name"],
            one["state"] if one["in_pool"] else f"{one['state']}, of a run",
            one["in_flight"],
            *("-" if one[key] is None else f"{one[key]:.0%}" for key in SHARES),
            clean(one["reason"] or one["alarm"]),
        )
        for one in found
    ]
    table(("backend", "state", "rollouts", "cached", "reused", "why"), rows)
    return 0
