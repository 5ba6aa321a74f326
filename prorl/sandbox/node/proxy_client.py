"""sandboxd's end of the network: who may reach what, and the proxy that holds them to it.

    network = ProxyClient(settings)
    spec = network.granted(spec)               # below the operator's cap, with its variables
    await network.open(sandbox_id, socket_path, NetworkPolicy(PUBLIC))
    await network.refusals(sandbox_id)         # [[host, port, reason, count]] since the last call
    network.close(sandbox_id)

The proxy (`proxy.py`) is started with the first sandbox that has a network. One that dies is
started again with what was open; its connections are gone, as after any broken line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

from prorl.linux.python_path import python_path
from prorl.network_policy import NO_NETWORK, UPSTREAM_VARIABLE, NetworkPolicy, capped
from prorl.sandbox.client import listen
from prorl.sandbox.launch.packets import PacketChild
from prorl.sandbox.node.settings import MAX_CLOSED, PROXY_PORT, NetworkSettings
from prorl.types import Json, SandboxSpec
from prorl.waits import wait_limit_s

ANSWER_S = wait_limit_s("proxy.refusals")
RESTART_S = 1.0
"""Between a proxy's death and the next one: one that dies at once must not take a core."""

log = logging.getLogger("prorl.sandboxd")


def variables(port: int | str) -> dict[str, str]:
    """Returns the variables that lead programs to the proxy: the names that curl, pip, npm, git,
    apt, uv, cargo, wget and Node read. The sandbox's own loopback, where the model's port is, stays
    direct.
    """
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{port}")
    direct = {"NO_PROXY": "localhost,127.0.0.1,::1"}
    upper = proxies | direct
    return {
        **upper,
        **{key.lower(): value for key, value in upper.items()},
        "NODE_USE_ENV_PROXY": "1",
    }


class ProxyClient:
    """Belongs to sandboxd's loop. Holds a listener for each sandbox that has a network."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._most = NetworkPolicy(settings.mode, tuple(settings.allowed_hosts))
        self._closed = [list(target) for target in settings.closed]
        self._child: PacketChild | None = None
        self._open: dict[str, tuple[socket.socket, NetworkPolicy]] = {}
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[list[Json]]] = {}

    @property
    def pid(self) -> int:
        """Returns the pid of the proxy; 0 while no sandbox needs it."""
        return self._child.pid if self._child is not None else 0

    def granted(self, spec: SandboxSpec) -> SandboxSpec:
        """Returns the network that a sandbox gets of what its spec asks for."""
        mode, hosts = capped(NetworkPolicy(spec.network_mode, spec.allowed_hosts), self._most)
        own = {} if mode == NO_NETWORK else {**variables(PROXY_PORT), **self._settings.env}
        pairs = (f"{name}={value}" for name, value in own.items())
        return replace(
            spec, network_mode=mode, allowed_hosts=hosts, variables=(*pairs, *spec.variables)
        )

    def files_of(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Returns the files of this node that a sandbox sees, as SOURCE:TARGET, by the spec that it
        got.
        """
        if spec.network_mode == NO_NETWORK:
            return ()
        return tuple(f"{source}:{target}" for source, target in self._settings.files.items())

    async def open(self, sandbox_id: str, socket_path: str, network: NetworkPolicy) -> None:
        """Serve the proxy's port in a fresh sandbox. Raises OSError, TimeoutError, WireError."""
        listener = await listen(socket_path, PROXY_PORT)
        if listener.getsockname()[1] != PROXY_PORT:
            listener.close()
            raise OSError(f"port {PROXY_PORT} is taken in a fresh sandbox")
        self._serve(sandbox_id, listener, network)

    async def set(self, sandbox_id: str, socket_path: str, wish: NetworkPolicy) -> None:
        """Give a living sandbox another network, capped; one that had none gets the variables, for
        programs that are executed from now on. Raises as `open`.
        """
        network = capped(wish, self._most)
        if sandbox_id in self._open:
            listener, _ = self._open[sandbox_id]
            self._open[sandbox_id] = listener, network
            self._send({"of": sandbox_id, "network": network})
        elif network.mode != NO_NETWORK:
            listener = await listen(
                socket_path, PROXY_PORT, {**variables("{port}"), **self._settings.env}
            )
            self._serve(sandbox_id, listener, network)

    def _serve(self, sandbox_id: str, listener: socket.socket, network: NetworkPolicy) -> None:
        self._open[sandbox_id] = listener, network
        if self._child is None:
            self._start()
        else:
            self._send_open(sandbox_id)

    def _start(self) -> None:
        settings = self._settings
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", UPSTREAM_VARIABLE: settings.upstream}
        rules = {
            "mirrors": settings.mirrors,
            "closed": self._closed,
            "upstream_resolves": settings.upstream_resolves,
        }
        self._child = PacketChild(
            "prorl.sandbox.node.proxy",
            (json.dumps(rules),),
            env | python_path(),
            self._receive,
            self._on_lost,
        )
        for sandbox_id in self._open:
            self._send_open(sandbox_id)

    def _send_open(self, sandbox_id: str) -> None:
        listener, network = self._open[sandbox_id]
        self._send({"open": sandbox_id, "network": network}, listener)

    def _send(self, message: dict[str, Json], *fds: socket.socket) -> None:
        if self._child is not None:
            self._child.send(json.dumps(message).encode(), [fd.fileno() for fd in fds])

    def _receive(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message["number"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message["refusals"])

    def _on_lost(self) -> None:
        log.warning("the network's proxy has died; it is started again")
        self._child = None
        asyncio.get_running_loop().call_later(RESTART_S, self._restart)

    def _restart(self) -> None:
        if self._child is None and self._open:
            self._start()

    def close_targets(self, targets: Iterable[list[Json]]) -> None:
        """Hosts that no sandbox reaches from now on: model servers that came later."""
        fresh = [target for target in targets if target not in self._closed]
        if fresh:
            self._closed = (self._closed + fresh)[-MAX_CLOSED:]
            self._send({"closed_targets": fresh})

    async def refusals(self, sandbox_id: str) -> list[Json]:
        """Returns the connections that were refused to a sandbox since the last call, as [host,
        port, reason, count].
        """
        if sandbox_id not in self._open or self._child is None:
            return []
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"refusals": sandbox_id, "number": number})
            async with asyncio.timeout(ANSWER_S):
                return await self._waiting[number]
        except TimeoutError:
            return []
        finally:
            del self._waiting[number]

    def close(self, sandbox_id: str) -> None:
        """A sandbox has ended. Idempotent."""
        if (entry := self._open.pop(sandbox_id, None)) is not None:
            entry[0].close()
            self._send({"close": sandbox_id})

    def shut_down(self) -> None:
        for sandbox_id in list(self._open):
            self.close(sandbox_id)
        if self._child is not None:
            self._child.close()
            self._child = None
