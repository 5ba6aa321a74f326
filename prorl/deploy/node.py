"""A node: sandboxd, INIT, RUN and EVAL of one host, working for a gateway on another one.

    async with node(join, config) as running:
        await running.failed()

Only three things cross hosts: control streams, leases, scored rows, all over mutual TLS. Sandboxes
do not move, so INIT, RUN and EVAL of one node pass rows over Unix sockets. A node keeps no truth:
its root is scratch, and what it held when it died is leased again.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from prorl.client.client import Client
from prorl.client.http import Http
from prorl.config import NAME, ServiceConfig
from prorl.errors import ConfigError
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import node_specs
from prorl.tls import SERVICE_FILE, Join

PATIENCE_S = 20.0
"""How long a node that starts looks for its service."""


def node(join: Join, config: ServiceConfig) -> Supervisor:
    """The processes of a node, not started: enter it.

    `config` names the node (`node_id`), its scratch root and its pools.

    Asks the service for what nodes share with it. Raises ConfigError, ForbiddenError for a join
    file of another role, UnavailableError when nobody answers.
    """
    if not NAME.fullmatch(config.node_id) or config.node_id == "local":
        raise ConfigError(
            f"node name {config.node_id!r}", "letters, digits, . _ -; not `local`", "--name n1"
        )
    http = Http(join.url, join.token, retry_s=PATIENCE_S, credentials=join.credentials)
    shared = Client(http=http, token=join.token, credentials=join.credentials).node_settings()
    values = {
        "token": join.token,
        "advertise": config.advertise or address_towards(join.url),
    }
    join.credentials.write(config.tls_dir / SERVICE_FILE)
    return Supervisor(config.model_copy(update={**shared, **values}), node_specs)


def address_towards(url: str) -> str:
    """This host's address on the way to a service: the one that the service can dial."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: the kernel picks a route
        return str(probe.getsockname()[0])
