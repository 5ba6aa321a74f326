"""Client of this node's sandboxd: `UnixSandboxHost` implements `prorl.protocols.SandboxHost`.

One connection carries all requests; answers are paired by id. It is opened with the first request
and again after sandboxd was restarted. A request that was written is never written again: when the
connection goes before the answer, it fails.

    host = UnixSandboxHost(socket_path, node_id)
    ref = await host.start("run/17/1", "run", SandboxSpec())
    async with host.connect(ref) as sandbox:
        print((await sandbox.call("bash", {"command": "uname"}, 5.0)).output)
    await host.stop(ref)
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prorl.errors import SandboxError
from prorl.network_policy import NO_NETWORK, NetworkPolicy
from prorl.protocols import Sandbox
from prorl.sandbox.blame import Cause, Fate, fate_of
from prorl.sandbox.client import ConnectedSandbox, connected
from prorl.sandbox.prepared import prepared
from prorl.sandbox.wire import WireError, encode, receive
from prorl.types import FailureCode, NetworkRefusal, SandboxRef, SandboxSpec
from prorl.waits import wait_limit_s

START_S = wait_limit_s("sandbox.start")
REQUEST_S = wait_limit_s("sandbox.request")
PATIENCE_S = wait_limit_s("sandbox.patience")
MAX_CLOSED = 256
"""Model servers that a worker has used lately; they travel with each start that has a network."""
RECONNECT_S = 0.05
"""Between two tries: a Unix socket is refused at once."""


class UnixSandboxHost:
    def __init__(self, socket_path: str, node_id: str = "local", holder: str = "") -> None:
        """`holder`: the process, by a name that its next incarnation has as well; without one
        nobody ends what it leaves behind before its limits do.
        """
        self._path, self.node_id = socket_path, node_id
        self._holder = {"holder": holder, "incarnation": uuid.uuid4().hex}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._closed: list[tuple[str, int]] = []
        """The addresses that no sandbox may reach besides what sandboxd was started with; at most
        MAX_CLOSED.
        """
        self._opening = asyncio.Lock()  # protects the making of the one connection

    async def __aenter__(self) -> UnixSandboxHost:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, owner: str, purpose: str, spec: SandboxSpec) -> SandboxRef:
        """A sandbox for this owner, `run/rollout/attempt`, or the one reserved for it.

        Raises SandboxError.
        """
        answer = await self._ask(
            {
                "op": "start",
                "owner": owner,
                "purpose": purpose,
                **self._with_closed(spec),
                **self._holder,
            },
            START_S,
            PATIENCE_S,
        )
        return SandboxRef(*answer["ref"])

    async def reserve(self, owner: str, purpose: str, spec: SandboxSpec) -> None:
        """Have one warm for a later `start` with the same arguments. Raises SandboxError."""
        ask = {"op": "reserve", "owner": owner, "purpose": purpose}
        await self._ask({**ask, **self._with_closed(spec), **self._holder}, REQUEST_S)

    async def prepare(
        self, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
    ) -> bool:
        """Prepare a fresh sandbox, once a node for equal keys; see `prorl.sandbox.prepared`."""
        place = await self._ask({"op": "snapshots"}, REQUEST_S)
        return await prepared(Path(place["folder"]), place["limit_bytes"], sandbox, key, work)

    async def stop(self, ref: SandboxRef) -> None:
        self._check_here(ref)
        await self._ask({"op": "stop", "sandbox_id": ref.sandbox_id}, REQUEST_S)

    async def stop_owner(self, owner: str) -> None:
        await self._ask({"op": "stop_owner", "owner": owner}, REQUEST_S)

    async def keep(self, sandboxes: Mapping[str, str]) -> None:
        """Go on with these of the sandboxes that earlier incarnations of this process have started,
        and end the others. By owner: the sandbox that it has; what is reserved for it stays as
        well. Raises SandboxError.
        """
        ask = {"op": "keep", "sandboxes": dict(sandboxes)}
        await self._ask({**ask, **self._holder}, REQUEST_S, PATIENCE_S)

    async def set_network(self, ref: SandboxRef, network: NetworkPolicy) -> None:
        """See `prorl.protocols.SandboxHost`."""
        self._check_here(ref)
        ask = {"op": "network", "sandbox_id": ref.sandbox_id}
        await self._ask({**ask, "mode": network.mode, "hosts": network.allowed_hosts}, REQUEST_S)

    async def refusals(self, ref: SandboxRef) -> tuple[NetworkRefusal, ...]:
        self._check_here(ref)
        answer = await self._ask({"op": "refusals", "sandbox_id": ref.sandbox_id}, REQUEST_S)
        return tuple(NetworkRefusal(*refusal) for refusal in answer["refusals"])

    async def close_targets(self, targets: Iterable[tuple[str, int]]) -> None:
        """See `prorl.protocols.SandboxHost`; one that is away hears it with a start."""
        fresh = [target for target in targets if target not in self._closed]
        self._closed += fresh
        del self._closed[:-MAX_CLOSED]
        if fresh:
            with suppress(SandboxError):
                await self._ask({"op": "close_targets", "targets": fresh}, REQUEST_S)

    def _with_closed(self, spec: SandboxSpec) -> dict[str, Any]:
        """A spec as it is sent; one with a network brings what stays closed to it, for a sandboxd
        that was started again.
        """
        closed = {"closed": self._closed} if spec.network_mode != NO_NETWORK else {}
        return {"spec": asdict(spec), **closed}

    async def status(self) -> dict[str, Any]:
        """Counts: kind, live, warm, reserved, ended, cpu_s, sandboxes."""
        status: dict[str, Any] = (await self._ask({"op": "status"}, REQUEST_S))["status"]
        return status

    async def fate(self, ref: SandboxRef, seen: Cause = Cause.HUNG_UP) -> Fate:
        """Returns why a sandbox does not answer; when sandboxd is gone too, that is why."""
        ask = {"op": "fate", "sandbox_id": ref.sandbox_id, "seen": seen.name}
        try:
            answer = await self._ask(ask, REQUEST_S)
        except SandboxError as error:
            return fate_of(Cause.NODE_LOST, error.message)
        return Fate(FailureCode(answer["code"]), answer["message"])

    def connect(self, ref: SandboxRef) -> AbstractAsyncContextManager[ConnectedSandbox]:
        self._check_here(ref)
        return connected(ref, self.fate)

    def _check_here(self, ref: SandboxRef) -> None:
        """Raise SandboxError for a sandbox of another node.

        Where nodes share a file system, a socket of another one opens and nobody would ever end its
        sandbox.
        """
        if ref.node_id and ref.node_id != self.node_id:
            raise SandboxError(
                FailureCode.STAGE_ERROR,
                f"sandbox {ref.sandbox_id} is on node {ref.node_id!r}, this is {self.node_id!r}",
            )

    async def close(self) -> None:
        """Close the connection to sandboxd; sandboxes live on. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading
        self._writer = self._reading = None

    async def _ask(
        self, ask: dict[str, Any], timeout_s: float, patience_s: float = 0.0
    ) -> dict[str, Any]:
        writer = await self._connect_retrying(patience_s)
        self._next_id += 1
        number = self._next_id
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            writer.write(encode({**ask, "id": number}))
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError as cause:
            raise SandboxError(
                FailureCode.SANDBOX_LOST, f"sandboxd did not answer {ask['op']} in {timeout_s:g} s"
            ) from cause
        finally:
            del self._waiting[number]
        if reply.get("ok") is not True:
            raise SandboxError(FailureCode(reply["code"]), str(reply["error"]))
        return reply

    async def _connect_retrying(self, patience_s: float) -> asyncio.StreamWriter:
        """A connection, tried for `patience_s`. Raises SandboxError.

        A dead sandboxd is back in a second, and a start that failed at once would burn a rollout's
        attempts meanwhile.
        """
        give_up_at = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                return await self._connect_once()
            except SandboxError:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
            await asyncio.sleep(RECONNECT_S)

    async def _connect_once(self) -> asyncio.StreamWriter:
        async with self._opening:
            if self._writer is not None and self._reading is not None and not self._reading.done():
                return self._writer
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
            except OSError as cause:
                message = f"no sandboxd at {self._path}: {cause.strerror or cause}"
                raise SandboxError(FailureCode.SANDBOX_LOST, message) from cause
            self._reading = asyncio.create_task(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (frame := await receive(reader)) is not None:
                waiting = self._waiting.get(frame.header.get("id", -1))
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame.header)
        except WireError:
            pass  # the daemon is gone in the middle of an answer; told to whoever waits
        finally:
            writer.close()
            lost = {
                "ok": False,
                "code": FailureCode.SANDBOX_LOST.value,
                "error": "sandboxd closed the connection",
            }
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(lost)
