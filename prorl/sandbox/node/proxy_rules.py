"""Decides which address the node's proxy may dial for a sandbox: policy, closed hosts, names
resolved once.

`ProxyRules` owns the resolver and what the operator says of mirrors and closed hosts. A name is
resolved only after the policy has let it pass, so that no name that a sandbox makes up leaves the
node.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from prorl.network_policy import (
    MAX_NAME,
    NO_NETWORK,
    Address,
    NetworkPolicy,
    Target,
    closed_reason,
)
from prorl.sandbox.node.settings import MAX_CLOSED
from prorl.waits import wait_limit_s

RESOLVE_S = wait_limit_s("proxy.resolve")
RESOLVERS = 32
MAX_ADDRESSES = 4
"""The number of addresses of one name that are tried."""
MAIL_PORT = 25
"""Closed: mail in the operator's name."""
CLOSED_TTL_S = 60.0
"""Names of hosts that stay closed are resolved again after this time."""


class ForbiddenHost(NamedTuple):
    """A sandbox may not reach this host, for the reason that is stated."""

    host: str
    port: int
    reason: str


class ForbiddenHostError(Exception):
    """A connection that the policy does not allow."""

    def __init__(self, refusal: ForbiddenHost, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class ProxyReplyError(Exception):
    """A request that ends with an HTTP status of ours, and is no refusal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


Resolve = Callable[[str, int], Awaitable[list[Address]]]
_NONE: Sequence[Address] = ()


class ProxyRules:
    """The rules for the addresses that a connection of a sandbox may dial. Belongs to one event
    loop.

    `mirrors` and `closed` are targets; port 0 stands for every port. A mirror is the operator's own
    word and may be a private address; a closed target is closed to all.
    """

    def __init__(
        self,
        mirrors: Iterable[Target] = (),
        closed: Iterable[Target] = (),
        resolve: Resolve | None = None,
    ) -> None:
        self._mirrors, self._closed = frozenset(mirrors), dict.fromkeys(closed, _NONE)
        self._closed_until, self._refreshing = 0.0, asyncio.Lock()  # one refresh at a time
        self._pool = ThreadPoolExecutor(RESOLVERS, "resolve")
        self.resolve = resolve or self._resolve

    def close_targets(self, targets: Iterable[Target]) -> None:
        """Close further ones; at most MAX_CLOSED are kept, the newest."""
        for target in targets:
            self._closed.pop(target, None)
            self._closed[target] = _NONE
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed_until = 0.0

    def check(self, network: NetworkPolicy, target: Target) -> None:
        """Raise ForbiddenHostError for a target that the policy closes whatever its address is."""
        host, port = target
        if network.mode == NO_NETWORK:
            raise _refused(target, NO_NETWORK, "has no network in this phase of its task")
        if not self.is_mirror(target) and not network.permits(host):
            raise _refused(target, "not allowed", f"may not reach {host}: no allowed host")
        if port == MAIL_PORT:
            raise _refused(target, "port", f"may not reach port {port} of any host")
        if self._closed.keys() & {target, Target(host, 0)}:
            raise _refused(target, "service", f"may not reach {host}: it belongs to the service")

    def is_mirror(self, target: Target) -> bool:
        return target in self._mirrors or Target(target.host, 0) in self._mirrors

    async def open_addresses(self, target: Target) -> list[Address]:
        """The addresses of a target that may be dialled. Raises ForbiddenHostError where it has
        none, and ProxyReplyError where its name has no address.
        """
        addresses = await self.resolve(*target)
        if not addresses:
            raise ProxyReplyError(502, f"{target.host} has no address")
        reasons = {address: await self._reason(address, target) for address in addresses}
        if all(reasons.values()):
            reason = reasons[addresses[0]]
            raise _refused(target, reason, f"may not reach {target.host}: {reason} address")
        return [address for address in addresses if not reasons[address]][:MAX_ADDRESSES]

    async def _reason(self, address: Address, target: Target) -> str:
        """Returns why an address may not be dialled for a target; empty where it may."""
        await self._refresh_closed()
        is_mirror = self.is_mirror(target)
        ports = {port for (_, port), addresses in self._closed.items() if address in addresses}
        if ports & {0, target.port} or (ports and not is_mirror):
            return "service"
        if is_mirror:
            return ""
        return closed_reason(address) or ("node" if _is_own(address) else "")

    async def _refresh_closed(self) -> None:
        """Resolve the names of closed targets; one that cannot be keeps the addresses it had."""
        async with self._refreshing:
            now = asyncio.get_running_loop().time()
            if now < self._closed_until:
                return
            self._closed_until = now + CLOSED_TTL_S
            targets = list(self._closed)
            answers = await asyncio.gather(*map(self._cached_addresses, targets))
            for target, addresses in zip(targets, answers, strict=True):
                if target in self._closed:
                    self._closed[target] = addresses

    async def _cached_addresses(self, target: Target) -> Sequence[Address]:
        try:
            return await self.resolve(*target)
        except ProxyReplyError:
            return self._closed.get(target, ())

    async def _resolve(self, host: str, port: int) -> list[Address]:
        with suppress(ValueError):
            return [ipaddress.ip_address(host)]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_S):
                rows = await loop.run_in_executor(
                    self._pool, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )
        except TimeoutError:
            raise ProxyReplyError(504, f"{host} was not resolved within {RESOLVE_S:g} s") from None
        except (OSError, UnicodeError) as error:
            raise ProxyReplyError(502, f"{host} cannot be resolved: {error}"[:200]) from None
        return list(dict.fromkeys(ipaddress.ip_address(row[4][0]) for row in rows))


def _refused(target: Target, reason: str, text: str) -> ForbiddenHostError:
    refusal = ForbiddenHost(target.host[:MAX_NAME], target.port, reason)
    return ForbiddenHostError(refusal, f"this sandbox {text}")


def _is_own(address: Address) -> bool:
    """Returns whether an address is one of this machine's: what is sent there comes from there."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # sends nothing
            return ipaddress.ip_address(probe.getsockname()[0]) == address
        except OSError:  # no way leads there
            return False
