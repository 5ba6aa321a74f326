"""The parts that every Flight call of prorl shares: options, bearer token, fork guard, first words.

gRPC's keepalive pings need both `keepalive_*` and `ping_timeout_ms` to notice a frozen peer, and a
server that sends nothing for minutes answers them with GOAWAY "too many pings": our servers
therefore write a tiny `IDLE` message when they have nothing to say. Unix sockets get no pings,
since the kernel reports a dead peer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.flight as fl

from prorl.errors import ConfigError, NotFoundError, SchemaError, UserError
from prorl.net.join import JOIN_HINT
from prorl.net.tls import Credentials
from prorl.protocols import Accept
from prorl.schema import check_schema, check_version
from prorl.schema.fields import SCHEMA_VERSION
from prorl.types import Json
from prorl.waits import wait_limit_s

IDLE = b"idle"
"""Metadata-only message of a server that has had nothing to send for `IDLE_S`."""

GOODBYE = b"goodbye"
"""Metadata-only message: this end has said all that it will say."""

IDLE_S = wait_limit_s("flight.idle")

KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

UNIX_PATH_BYTES = 107
"""Longest Unix socket path that the kernel takes."""


Route = tuple[Accept, pa.Schema, pa.Schema]
"""Handler, schema received, schema sent."""

Routes = Mapping[str, Route]
"""The routes by path."""

_used_by = 0
"""The process that has used Flight first."""


class Opening(NamedTuple):
    """The dialler's first message, in the descriptor's command."""

    path: str
    hello: Mapping[str, Json]

    def encode(self) -> bytes:
        return orjson.dumps({"path": self.path, "hello": dict(self.hello)})

    @classmethod
    def decode(cls, command: bytes | None) -> Opening:
        """Raises SchemaError for anything that `encode` did not make."""
        try:
            fields = orjson.loads(command or b"")
            return cls(str(fields["path"]), dict(fields["hello"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            raise SchemaError(
                "the stream's first words are not prorl's", "a prorl client"
            ) from None


def with_version(hello: Mapping[str, Json]) -> dict[str, Json]:
    """The hello with our schema version, unless the caller names one."""
    return {"schema_version": SCHEMA_VERSION, **hello}


def route_of(routes: Routes, opening: Opening) -> tuple[Accept, pa.Schema, pa.Schema]:
    """Handler and schemas of a path. Raises NotFoundError, SchemaError for another version."""
    path, hello = opening
    check_version(hello.get("schema_version"), f"{hello.get('worker', 'the dialler')} of {path}")
    if path not in routes:
        raise NotFoundError(f"no route {path}; served: {', '.join(sorted(routes))}")
    return routes[path]


def check_peer_schema(actual: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Raise SchemaError unless the other end sends what we read, in our version."""
    if actual.equals(expected, check_metadata=True):
        return
    if b"prorl.schema_version" in (expected.metadata or {}):
        check_version(
            (actual.metadata or {}).get(b"prorl.schema_version", b"").decode() or None, where
        )
    check_schema(actual, expected, where)


_ALONE = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
"""A connection of its own, and to nobody else."""


def open_client(location: str, credentials: Credentials | None = None) -> fl.FlightClient:
    """Makes a client with a connection of its own, which connects on its first call.

    `grpc+tls` needs credentials: without them nobody could tell our service from another.
    """
    guard_fork()
    options = _ALONE if location.startswith("grpc+unix") else [*_ALONE, *KEEPALIVE]
    if not location.startswith("grpc+tls://"):
        return fl.FlightClient(location, generic_options=options)
    if credentials is None:
        raise ConfigError(f"{location} without a certificate", "a join file", JOIN_HINT)
    return fl.FlightClient(
        location,
        generic_options=options,
        tls_root_certs=credentials.authority,
        cert_chain=credentials.certificate,
        private_key=credentials.key,
        override_hostname=credentials.peer_name,
    )


def call_options(token: str, timeout_s: float | None = None) -> fl.FlightCallOptions:
    """Bearer token (gRPC wants lower case), deadline, and buffers aligned for their type."""
    headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
    aligned = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
    return fl.FlightCallOptions(timeout=timeout_s, headers=headers, read_options=aligned)


def check_location(location: str) -> None:
    """Raise ConfigError for a location that cannot be served."""
    if location.startswith("grpc+unix://"):
        path = location.removeprefix("grpc+unix://")
        if len(path.encode()) > UNIX_PATH_BYTES:
            raise ConfigError(
                f"socket path {path} is too long",
                f"at most {UNIX_PATH_BYTES} bytes",
                "choose a shorter socket_dir",
            )
    elif not location.startswith(("grpc://", "grpc+tcp://", "grpc+tls://")):
        raise ConfigError(
            f"location {location!r}", "grpc+unix:///path, grpc://host:port or grpc+tls://host:port"
        )


def guard_fork() -> None:
    """Raise in a process that was forked after its parent used Flight: it would hang."""
    global _used_by
    if _used_by not in (0, os.getpid()):
        raise UserError(
            "Arrow Flight in a process that was forked after its parent had used it",
            "a process of its own, since it would hang",
            'DataLoader(..., multiprocessing_context="spawn"), or connect in the worker only',
        )
    _used_by = os.getpid()
