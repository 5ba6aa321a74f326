"""The settings of sandboxd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROXY_PORT = 3128
"""The port where the node's proxy listens in a sandbox: what Squid uses, and no program that tasks
start.
"""
MAX_CLOSED = 4096
"""Hosts that stay closed, those of the configuration included: model servers come and go, and the
newest are kept.
"""

Target = Sequence[Any]
"""A host's name or address, and a port (`prorl.network_policy.Target`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """The network that sandboxes may reach at most, and by which ways (`proxy.py`)."""

    mode: str = "no-network"
    allowed_hosts: Sequence[str] = ()
    """The hosts of mode `allowlist`."""
    mirrors: Sequence[Target] = ()
    """(host, port) that every sandbox with a network may reach, also at a private address; port 0
    is any.
    """
    closed: Sequence[Target] = ()
    """(host, port) that none may reach: model servers, the gateway."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of sandboxes with a network, which lead package managers to mirrors."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path in sandboxes with a network, by the path on this node; read-only."""
    upstream: str = ""
    """URL of the proxy that the node itself must use."""
    upstream_resolves: bool = False
    """It gets names instead of the addresses that were checked here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    max_sandboxes: int = 512
    """Alive at once, warm and reserved ones included; more wait."""
    warm: int = 1
    """Kept ready for each of the last few specs that were asked for."""
    snapshot_bytes: int = 2 << 30
    """Prepared workspaces kept on disk for siblings of a task."""
    cgroups: bool = True
    """Use control groups where they can be used."""
    images: str = ""
    """Folder of this node's image registry; empty = the user's cache folder."""
    mirrors: Mapping[str, str] | None = None
    """The mirrors by host of the container registries that images are pulled from on demand; None =
    nothing is pulled.
    """
    build: Mapping[str, Any] = field(default_factory=dict)
    """Settings of builds from Dockerfiles (`images/dockerfile.py`)."""
    max_memory_bytes: int = 0
    """The most that a sandbox gets of what its spec asks for; 0 = no bound."""
    max_overlay_bytes: int = 0
    max_cpus: float = 0.0
    image: str = ""
    """Image of specs that name none; empty = the host's /usr, read-only."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `NetworkSettings`."""
