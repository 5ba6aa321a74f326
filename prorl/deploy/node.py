"""A node: sandboxd, INIT, RUN and EVAL of one host, working for a gateway on another one.

    async with node(join, config) as running:
        await running.failed()

Only three things cross hosts: control streams, leases, scored rows, all over mutual TLS. Sandboxes
do not move, so INIT, RUN and EVAL of one node pass rows over Unix sockets. A node keeps no truth:
its root is scratch, and what it held when it died is leased again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from urllib.parse import urlsplit

from prorl.client.client import Client
from prorl.client.http import Http
from prorl.config import NAME, ServiceConfig
from prorl.errors import ConfigError, ProrlError
from prorl.net.join import SERVICE_FILE, Join
from prorl.net.tls import MAX_NODE_NAME, Credentials, NodeKey
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import node_specs
from prorl.waits import wait_limit_s

PATIENCE_S = wait_limit_s("node.patience")

log = logging.getLogger("prorl.deploy")


def node(join: Join, config: ServiceConfig) -> Supervisor:
    """The processes of a node, not started: enter it.

    `config` names the node (`node_id`), its scratch root and its pools.

    Asks the service for what nodes share with it. Raises ConfigError, ForbiddenError for a join
    file of another role, UnavailableError when nobody answers.
    """
    name = config.node_id
    if not NAME.fullmatch(name) or len(name) > MAX_NODE_NAME or name == "local":
        raise ConfigError(
            f"node name {name!r}",
            f"letters, digits, . _ -, at most {MAX_NODE_NAME}; not `local`",
            "--name n1",
        )
    client = _client(join, join.credentials)
    shared = client.node_settings()
    values = {
        "token": join.token,
        "advertise": config.advertise or address_towards(join.url),
    }
    _certified(client, name, join.authority).write(config.tls_dir / SERVICE_FILE)
    return Supervisor(config.model_copy(update={**shared, **values}), node_specs)


async def keep_certificate(join: Join, config: ServiceConfig) -> None:
    """Have a node's certificate renewed in time, for as long as it lives."""
    path = config.tls_dir / SERVICE_FILE
    while True:
        own = Credentials.read(path)
        await asyncio.sleep(own.look_s)
        if own.ends_soon:
            try:
                client = _client(join, own)
                new = await asyncio.to_thread(_certified, client, config.node_id, own.authority)
                new.write(path)
                log.info("the certificate of %s is new", config.node_id)
            except ProrlError as error:
                log.warning("%.1f days before it ends: %s", own.remaining_days(), error)


def _client(join: Join, credentials: Credentials) -> Client:
    http = Http(join.url, join.token, retry_s=PATIENCE_S, credentials=credentials)
    return Client(http=http, credentials=credentials)


def _certified(client: Client, name: str, authority: str) -> Credentials:
    """Makes a key and fetches the service's certificate for it. Raises ProrlError."""
    key = NodeKey()
    return key.credentials(client.node_certificate(name, key.request(name)), authority)


def address_towards(url: str) -> str:
    """This host's address on the way to a service: the one that the service can dial."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: the kernel picks a route
        return str(probe.getsockname()[0])
