"""sandboxd: one per node, owns every sandbox.

`python -m prorl.sandbox.node.daemon JSON`: an object with `socket` (a path under 100 bytes), `root`
(a folder for notes and workspaces, of this daemon alone), `kind`, `parent_pid` (it dies with that
process), `node_id`, and fields of `Settings`.

It says `ready` on stdout when it listens, stops everything and exits on SIGTERM, and dies with its
parent. Its own death, however violent, ends all sandboxes (zygote and launchers follow it); what
that leaves on disk the next daemon in the same root removes.

Requests over its Unix socket (frames of `wire.py`; `id` pairs answers with questions, several may
be open at once):

    {"op": "start" | "reserve", "owner", "purpose", "spec", "closed", "holder", "incarnation"}
    {"op": "keep", "sandboxes", "holder", "incarnation"}
    {"op": "stop", "sandbox_id"}   {"op": "stop_owner", "owner"}
    {"op": "fate", "sandbox_id", "seen"}   {"op": "status"}   {"op": "snapshots"}
    {"op": "network", "sandbox_id", "mode", "hosts"}   {"op": "refusals", "sandbox_id"}
    {"op": "close_targets", "targets"}

A request whose client goes away before the answer is cancelled: a sandbox that nobody heard of does
not stay.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from prorl.errors import ConfigError, ProrlError, RolloutError, SandboxError, boundary
from prorl.linux import calls, heartbeat
from prorl.network_policy import NO_NETWORK, UPSTREAM_VARIABLE, NetworkPolicy
from prorl.sandbox import kinds
from prorl.sandbox.blame import Cause
from prorl.sandbox.node.janitor import SUPPORT
from prorl.sandbox.node.live import Holder
from prorl.sandbox.node.paths import check_socket_path
from prorl.sandbox.node.pool import SandboxPool
from prorl.sandbox.node.probe import choose
from prorl.sandbox.node.settings import Settings
from prorl.sandbox.trees import remove_tree
from prorl.sandbox.wire import Frame, WireError, encode, receive
from prorl.timing import run
from prorl.types import FailureCode, SandboxRef, SandboxSpec


class Daemon:
    """Answers requests of the node's other processes from a `SandboxPool`.

    It closes what they leave open.
    """

    def __init__(self, pool: SandboxPool, snapshots: Path, snapshot_bytes: int) -> None:
        self._pool, self._snapshots, self._snapshot_bytes = pool, snapshots, snapshot_bytes
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def listen(self, path: str) -> None:
        """Serve on a 0600 socket; a stale file of a dead daemon is replaced."""
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path, backlog=128)
        os.chmod(path, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            await self._converse(reader, writer)
        except (WireError, ConnectionError, asyncio.CancelledError):
            pass  # the client's business; the daemon closes the connection
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: set[asyncio.Task[None]] = set()
        try:
            while (frame := await receive(reader)) is not None:
                request = asyncio.create_task(self._answer(frame, writer))
                requests.add(request)
                request.add_done_callback(requests.discard)
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        reply: dict[str, Any]
        try:
            with boundary(SandboxError, FailureCode.SANDBOX_START, "sandboxd"):
                reply = {"ok": True, **await self._perform(frame.header)}
        except RolloutError as error:
            reply = {"ok": False, "code": error.code.value, "error": error.message}
        except ProrlError as error:
            reply = {"ok": False, "code": FailureCode.SANDBOX_START.value, "error": str(error)}
        writer.write(encode({"id": frame.header.get("id"), **reply}))
        await writer.drain()

    async def _perform(self, ask: dict[str, Any]) -> dict[str, Any]:
        pool = self._pool
        if closed := ask.get("closed"):
            pool.close_targets(closed)
        match ask.get("op"):
            case "start":
                spec, holder = _spec_of(ask["spec"]), _holder(ask)
                ref = await pool.start(str(ask["owner"]), str(ask["purpose"]), spec, holder)
                return {"ref": list(ref)}
            case "reserve":
                spec, holder = _spec_of(ask["spec"]), _holder(ask)
                pool.reserve(str(ask["owner"]), str(ask["purpose"]), spec, holder)
            case "keep":
                await pool.keep(_holder(ask), dict(ask["sandboxes"]))
            case "stop":
                await pool.stop(str(ask["sandbox_id"]))
            case "stop_owner":
                await pool.stop_owner(str(ask["owner"]))
            case "fate":
                ref = SandboxRef(sandbox_id=str(ask["sandbox_id"]))
                code, message = await pool.fate(ref, Cause[str(ask["seen"])])
                return {"code": code.value, "message": message}
            case "network":
                network = NetworkPolicy(str(ask["mode"]), tuple(ask["hosts"]))
                await pool.set_network(str(ask["sandbox_id"]), network)
            case "refusals":
                return {"refusals": await pool.refusals(str(ask["sandbox_id"]))}
            case "close_targets":
                pool.close_targets(list(ask["targets"]))
            case "status":
                return {"status": pool.status()}
            case "snapshots":  # of prepared workspaces (`prepared.py`)
                return {"folder": str(self._snapshots), "limit_bytes": self._snapshot_bytes}
            case other:
                raise ValueError(f"unknown op {other!r}")
        return {}


def _spec_of(fields: dict[str, Any]) -> SandboxSpec:
    """A spec from a JSON object. Raises TypeError for a field that is none."""
    names = ("tools", "requirements", "variables", "allowed_hosts")
    lists = {name: tuple(fields[name]) for name in names}
    return SandboxSpec(**{**fields, **lists})


def _holder(ask: dict[str, Any]) -> Holder:
    return Holder(str(ask.get("holder", "")), str(ask.get("incarnation", "")))


async def serve(socket: str, root: Path, kind: str, node_id: str, settings: Settings) -> None:
    """Open the pool, listen, and wait for SIGTERM or SIGINT."""
    check_socket_path(socket)
    heartbeat.start()
    root.mkdir(mode=0o711, parents=True, exist_ok=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kind = await choose(kind)
    if settings.image and not kinds.load(kind).images:
        capable = kinds.capable(lambda kind: kind.images)
        raise ConfigError(f"image {settings.image!r}: sandbox kind {kind} runs none", capable)
    if settings.network.get("mode", NO_NETWORK) != NO_NETWORK and not kinds.load(kind).proxied:
        capable = kinds.capable(lambda kind: kind.proxied)
        raise ConfigError(
            f"network.mode {settings.network['mode']}: sandboxes of kind {kind} have no network of"
            " their own",
            capable,
        )
    pool = SandboxPool(kind, root, node_id, settings)
    await pool.open()
    snapshots = root / SUPPORT / "snapshots"  # closed to sandboxes
    remove_tree(str(snapshots))
    snapshots.mkdir(mode=0o700, parents=True)
    daemon = Daemon(pool, snapshots, settings.snapshot_bytes)
    try:
        await daemon.listen(socket)
        print("ready", flush=True)
        await stop.wait()
    finally:
        await daemon.close()
        await pool.close()
        Path(socket).unlink(missing_ok=True)


def main() -> int:
    """Run until SIGTERM; 2 and one line on stderr for what the user can mend."""
    arguments = json.loads(sys.argv[1])
    if parent_pid := arguments.pop("parent_pid", 0):
        calls.die_with_parent(signal.SIGKILL, parent_pid)
    place = arguments.pop("socket"), Path(arguments.pop("root"))
    kind, node_id = arguments.pop("kind", kinds.AUTO), arguments.pop("node_id", "local")
    if upstream := os.environ.pop(UPSTREAM_VARIABLE, ""):
        arguments["network"] = {**arguments.get("network", {}), "upstream": upstream}
    try:
        run(serve(*place, kind, node_id, Settings(**arguments)))
    except (ConfigError, SandboxError) as error:
        print(f"sandboxd: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
