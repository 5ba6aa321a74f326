"""The network that a sandbox may reach: modes, host names, and addresses that stay closed in every
mode.

A task asks for a `NetworkPolicy` for each phase, the operator's configuration caps it (`capped`),
and the node's proxy (`prorl/sandbox/node/proxy.py`) holds each connection against it. Names are
compared here and addresses there, after a name was resolved. Nothing here does I/O.

    "network": "public"
    "network": {"network_mode": "allowlist", "allowed_hosts": ["example.org", "*.example.org"],
                "verifier": {"network_mode": "no-network"}}
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from prorl.errors import TaskError
from prorl.pluralize import pluralize
from prorl.types import Json, SandboxSpec, Stage, Task

NO_NETWORK, ALLOWLIST, PUBLIC = "no-network", "allowlist", "public"
MODES = (NO_NETWORK, ALLOWLIST, PUBLIC)
PHASES = {Stage.RUN: "agent", Stage.EVAL: "verifier"}
MAX_HOSTS = 200
"""Entries of one list: with names of 253 letters they still fit in one message to the proxy."""
LISTED_TASKS = 3
"""Tasks that a line names which ask for more than they get."""
MAX_NAME = 253
"""Letters of a host name in DNS."""

UPSTREAM_VARIABLE = "PRORL_UPSTREAM_PROXY"
"""A variable of sandboxd's environment: the proxy that the node must use, whose URL may hold a
password.
"""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_NUMERIC = re.compile(r"(?:\d+|0x[0-9a-f]*)(?:\.(?:\d+|0x[0-9a-f]*))*", re.ASCII)
"""The forms in which `inet_aton` reads an address: 2130706433, 0177.0.0.1, 0x7f.1."""


class NetworkPolicy(NamedTuple):
    """The network that a phase of a task may reach; `allowed_hosts` are names as `read_hosts` gives
    them.
    """

    mode: str = NO_NETWORK
    allowed_hosts: tuple[str, ...] = ()

    def permits(self, host: str) -> bool:
        """Returns whether a host may be reached by this name; its address is another question."""
        if self.mode == ALLOWLIST:
            return any(_covers(pattern, host) for pattern in self.allowed_hosts)
        return self.mode == PUBLIC


def read_hosts(entries: Iterable[str]) -> tuple[str, ...]:
    """Names and `*.NAME` in lower case and ASCII. Raises ValueError, which says what is wrong.

    >>> read_hosts(["PyPI.org.", "*.Example.org"])
    ('pypi.org', '*.example.org')
    """
    hosts = tuple(dict.fromkeys(_host(entry) for entry in entries))
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"{len(hosts)} allowed hosts; expected at most {MAX_HOSTS}")
    return hosts


def _host(entry: Json) -> str:
    name = normal_name(entry) if isinstance(entry, str) else ""
    if _is_address(name.partition("/")[0]):
        raise ValueError(f"{entry!r} is an address; expected a host's name, or *.NAME")
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"{entry!r} is no host name; expected NAME or *.NAME, without port")
    return name


def normal_name(host: str) -> str:
    """A host's name as it is compared: lower case, ASCII, without the dot of its end."""
    host = host.strip().lower().removesuffix(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return bool(_NUMERIC.fullmatch(host))
    return True


def _covers(pattern: str, name: str) -> bool:
    """Returns whether a pattern stands for a name, or for all that another pattern stands for."""
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and name != pattern[1:]
    return name == pattern


def capped(wish: NetworkPolicy, most: NetworkPolicy) -> NetworkPolicy:
    """The network that a phase gets of what its task asks for, below the operator's `most`.

    >>> most = NetworkPolicy(ALLOWLIST, ("*.org",))
    >>> capped(NetworkPolicy(ALLOWLIST, ("pypi.org", "b.net")), most)
    NetworkPolicy(mode='allowlist', allowed_hosts=('pypi.org',))
    """
    if NO_NETWORK in (wish.mode, most.mode):
        return NetworkPolicy()
    if wish.mode == PUBLIC or most.mode == PUBLIC:
        return most if wish.mode == PUBLIC else wish
    pairs = ((a, b) for a in wish.allowed_hosts for b in most.allowed_hosts)
    hosts = (a if _covers(b, a) else b for a, b in pairs if _covers(a, b) or _covers(b, a))
    return NetworkPolicy(ALLOWLIST, tuple(dict.fromkeys(hosts)))


def exceeds(wish: NetworkPolicy, most: NetworkPolicy) -> bool:
    """Returns whether a task asks for more than the operator grants."""
    mode, hosts = capped(wish, most)
    return (mode, set(hosts)) != (wish.mode, set(wish.allowed_hosts))


class Target(NamedTuple):
    """The destination of a connection; port 0 in a rule stands for every port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_target(text: str) -> Target:
    """A host of the operator's, `HOST` or `HOST:PORT`: a name or an address, an IPv6 one in
    brackets where a port follows. Raises ValueError.

    >>> tuple(read_target("mirror.internal:8080")), tuple(read_target("[fd00::1]:80"))
    (('mirror.internal', 8080), ('fd00::1', 80))
    """
    with suppress(ValueError):
        return Target(str(ipaddress.ip_address(text.strip())), 0)
    try:
        parts = urlsplit(f"//{text}")
        host, port = normal_name(parts.hostname or ""), parts.port or 0
    except ValueError:
        host, port = "", 0
    is_whole = text == parts.netloc and "@" not in text if host else False
    if not is_whole or not (_is_address(host) or _NAME.fullmatch(host)) or host.startswith("*"):
        raise ValueError(f"{text!r} is no host; expected HOST or HOST:PORT")
    return Target(host, port)


def target_of(url: str) -> Target | None:
    """The host and port that a URL names; None for one that names none, as `scripted:oracle`."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    return Target(normal_name(parts.hostname), port) if parts.hostname else None


def proxy_problem(url: str) -> str:
    """Returns what is wrong with the URL of a proxy; empty where nothing is."""
    target = target_of(url)
    if target is not None and url.startswith("http://") and urlsplit(url).path in ("", "/"):
        return ""
    return "http://[USER:PASSWORD@]HOST:PORT"


# ---- of tasks


def read_network(value: Json, where: str) -> NetworkPolicy:
    """A network as a task states it: a mode, or a mode with hosts. Raises TaskError."""
    fields = {"network_mode": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise TaskError(f"{where} is {value!r}"[:300], f"one of {', '.join(MODES)}, or an object")
    mode, hosts = fields.get("network_mode", NO_NETWORK), fields.get("allowed_hosts")
    if mode not in MODES:
        raise TaskError(f"{where}: network_mode is {mode!r}"[:300], f"one of {', '.join(MODES)}")
    if hosts is not None and mode != ALLOWLIST:
        raise TaskError(
            f"{where}: allowed_hosts with network_mode {mode}", f"network_mode {ALLOWLIST}"
        )
    if not isinstance(hosts or [], list | tuple):
        raise TaskError(f"{where}: allowed_hosts is {hosts!r}"[:300], "a list of host names")
    try:
        return NetworkPolicy(mode, read_hosts(hosts or ()))
    except ValueError as error:
        problem, _, expected = str(error).partition("; expected ")
        raise TaskError(f"{where}: allowed_hosts: {problem}"[:300], expected) from None


def network_of(task: Task, stage: Stage) -> NetworkPolicy:
    """Returns the network that a task asks for in the phase that a stage plays. Raises
    TaskError.
    """
    value, phase = task.data.get("network", NO_NETWORK), PHASES[stage]
    if isinstance(value, Mapping):
        own = {"network_mode", "allowed_hosts", *PHASES.values()}
        if unknown := sorted(set(value) - own):
            problem = f"task {task.task_id!r}: data.network has {', '.join(unknown)}"
            raise TaskError(problem[:300], ", ".join(sorted(own)))
        value = value.get(phase, {key: value[key] for key in value if key not in PHASES.values()})
    return read_network(value, f"task {task.task_id!r}: data.network")


def ungranted_network(tasks: Iterable[Task], most: NetworkPolicy) -> list[str]:
    """A line where tasks ask for more of the network than the operator grants. Tasks whose network
    cannot be read ask for none: their env's check refuses them.
    """
    wishes: dict[str, list[NetworkPolicy]] = {}
    num_tasks = 0
    for num_tasks, task in enumerate(tasks, 1):  # noqa: B007 counted
        if "network" in task.data:
            with suppress(TaskError):
                stated = map(network_of, repeat(task), PHASES)
                wishes[task.task_id] = [wish for wish in stated if exceeds(wish, most)]
    names = [name for name, excess in wishes.items() if excess]
    if not names:
        return []
    modes = ", ".join(sorted({wish.mode for excess in wishes.values() for wish in excess}))
    listed = f"{', '.join(names[:LISTED_TASKS])}{', ...' if len(names) > LISTED_TASKS else ''}"
    ask, get = ("asks", "gets") if len(names) == 1 else ("ask", "get")
    return [
        f"{len(names)} of {pluralize(num_tasks, 'task')} {ask} for more network ({modes}) than"
        f" service.sandbox.network grants ({most.mode}), and {get} no more ({listed})"
    ]


class SandboxedEnv(Protocol):
    """The part of `prorl.protocols.Env` that is read here; that module imports this one."""

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """Returns the sandbox that a stage needs; None for no sandbox."""


def sandbox_spec(env: SandboxedEnv, task: Task, stage: Stage) -> SandboxSpec | None:
    """The sandbox that an env asks for, with the network that the task asks for. Raises TaskError.

    Whoever starts sandboxes for a task takes their specs from here, whatever env it has.
    """
    spec = env.sandbox(task, stage)
    return None if spec is None else with_network(spec, task, stage)


def with_network(spec: SandboxSpec, task: Task, stage: Stage) -> SandboxSpec:
    """Returns the sandbox with the network that the task asks for. Raises TaskError."""
    if "network" not in task.data:
        return spec
    mode, hosts = network_of(task, stage)
    return replace(spec, network_mode=mode, allowed_hosts=hosts)


# ---- addresses

_CLOSED = tuple(
    (ipaddress.ip_network(text), reason)
    for text, reason in (
        ("168.63.129.16/32", "metadata"),  # Azure's, although it is a public address
        ("192.0.0.0/24", "private"),  # of protocols
        ("192.88.99.0/24", "tunnel"),  # relays of 6to4
        ("2002::/16", "tunnel"),  # 6to4: the rest names an IPv4 address
        ("2001::/32", "tunnel"),  # Teredo
        ("64:ff9b:1::/48", "private"),  # translation to IPv4 within a network
        ("::/96", "private"),  # IPv4-compatible
        ("fec0::/10", "private"),  # site-local
        ("3fff::/20", "private"),  # documentation
        ("5f00::/16", "private"),  # segment routing
    )
)
"""The networks that `is_global` of some version of Python takes for public."""
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 as networks of IPv6 alone show it: the last 32 bits are the address that is meant."""


def closed_reason(address: Address) -> str:
    """Returns why an address is not a public one; empty where it is.

    >>> closed_reason(ipaddress.ip_address("::ffff:169.254.169.254"))
    'link-local'
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id:
            return "link-local"
        inner = address.ipv4_mapped
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return closed_reason(inner)
    kinds = {
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        "multicast": address.is_multicast,
        "unspecified": address.is_unspecified,
    }
    named = (*(kind for kind, applies in kinds.items() if applies), *_named_ranges(address))
    is_private = not address.is_global or address.is_reserved
    return next(iter(named), "private" if is_private else "")


def _named_ranges(address: Address) -> Iterable[str]:
    return (reason for network, reason in _CLOSED if address in network)
