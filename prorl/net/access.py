"""The table of access: who may do what, as the servers and their tests read it.

A role comes from the certificate of a connection (`prorl.net.tls`) and from its token
(`prorl.net.bearer`); each must allow what is asked. Whoever is on the service's own host and holds
the owner's token has no role and may do everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from prorl.errors import ForbiddenError

_READ = frozenset({"trainer", "viewer"})
_TRAIN = frozenset({"trainer"})
_NODE = frozenset({"node"})
_SERVICE = frozenset({"service"})
_OWNER = frozenset[str]()
"""No role: the owner alone, on the service's own host."""

HTTP: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "GET /healthz": _READ | _NODE,
        "GET /v1/openapi.json": _READ,
        "GET /metrics": _READ,
        "GET /v1/status": _READ,
        "GET /v1/runs": _READ,
        "POST /v1/runs": _TRAIN,
        "GET /v1/runs/{run_id}": _READ,
        "DELETE /v1/runs/{run_id}": _TRAIN,
        "DELETE /v1/runs/{run_id}/data": _OWNER,
        "POST /v1/runs/{run_id}/groups": _TRAIN,
        "POST /v1/runs/{run_id}/pause": _TRAIN,
        "POST /v1/runs/{run_id}/resume": _TRAIN,
        "GET /v1/runs/{run_id}/groups/{group_id}": _READ,
        "DELETE /v1/runs/{run_id}/groups/{group_id}": _TRAIN,
        "GET /v1/runs/{run_id}/rollouts/{rollout_id}": _READ,
        "DELETE /v1/runs/{run_id}/rollouts/{rollout_id}": _TRAIN,
        "POST /v1/runs/{run_id}/versions": _TRAIN,
        "GET /v1/node": _NODE,
        "POST /v1/nodes/{node}/certificate": _NODE,
        "POST /v1/nodes/{node}/drain": _OWNER,
        "GET /v1/backends": _READ,
        "POST /v1/backends": _OWNER,
        "POST /v1/backends/pause": _TRAIN,
        "POST /v1/backends/resume": _TRAIN,
        "PUT /v1/backends": _OWNER,
        "DELETE /v1/backends": _OWNER,
    }
)

# Reading a live run hands groups out: it numbers them in the log and may make them stale.
FLIGHT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "exchange control": _NODE,
        "exchange edge/lease": _NODE,
        "exchange edge/scored": _SERVICE,
        "info": _TRAIN,
        "get": _TRAIN,
        "action status": _READ,
        "action commit": _TRAIN,
        "action record": _TRAIN,
        "action log": _TRAIN,
        "list_actions": _READ,
    }
)

GRANTED = ("trainer", "viewer", "node", "guest")
"""Roles that a token may be made for; processes of a service have the owner's."""

OPEN = "/healthz"
"""The one path that needs no token."""

_PATTERNS = tuple(
    (
        route.partition(" ")[0],
        re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.partition(" ")[2])),
        roles,
    )
    for route, roles in HTTP.items()
)


def check_http(role: str | None, method: str, path: str) -> None:
    """Raise ForbiddenError unless `role` may. None: somebody on this host. Unknown routes are for
    nobody.
    """
    if role is not None:
        roles, _ = _route(method, path)
        _check(role, f"{method} {path}", roles)


def named_run(method: str, path: str) -> str:
    """The run that a path names; empty for paths that are about none."""
    _, names = _route(method, path)
    return names.get("run_id", "")


def _route(method: str, path: str) -> tuple[frozenset[str], dict[str, str]]:
    """Roles of the route that a path is of (nobody, where there is none), and what it names."""
    for verb, pattern, roles in _PATTERNS:
        if verb == method and (match := pattern.fullmatch(path)):
            return roles, match.groupdict()
    return frozenset(), {}


def check_guest_lease(role: str) -> None:
    """Raise ForbiddenError unless it may play attempts (`prorl.agents.guest_broker`)."""
    if role:
        _check(role, "a guest lease", frozenset({"guest"}))


def check_node(node: str, peer: Mapping[str, object]) -> None:
    """Raise ForbiddenError unless what a dialler says of itself is what its certificate says: a
    worker of this node, of a stage.
    """
    worker, roles = str(peer.get("worker", "")), peer.get("roles", {})
    is_stage = isinstance(roles, Mapping) and "store" not in roles
    if not node:
        raise ForbiddenError(
            f"a stream of {worker!r} with a certificate that names no node",
            "one of its own, which the service gives to a node that comes",
            "start it with `prorl node`",
        )
    if not worker.startswith(f"{node}/") or peer.get("node", node) != node or not is_stage:
        raise ForbiddenError(
            f"a stream of {worker!r} as {roles!r:.80} with the certificate of node {node!r}",
            f"a worker {node}/...",
        )


def check_flight(role: str | None, action: str) -> None:
    """Raise ForbiddenError unless `role` may do `action`, a key of `FLIGHT`."""
    if role is not None:
        _check(role, action, FLIGHT.get(action, frozenset()))


def _check(role: str, action: str, roles: frozenset[str]) -> None:
    if role not in roles:
        raise ForbiddenError(
            f"{action} as {role}",
            f"the role {' or '.join(sorted(roles))}"
            if roles
            else "the owner, on the service's host",
            "use another join file" if roles else "run it there, with the token in ROOT/token",
        )
