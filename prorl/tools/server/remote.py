"""The tool server on a machine of its own (a pod, a cloud's): over TCP by TLS, for who has the key.

    python3 -c "...; from prorl.tools.server.remote import main; main()"
    stdin    a line of JSON: host, port (0: any), certificate (PEM, with its key), secret, uid,
             server (what `main.py` is told)
    stdout   the port, once the tool server serves

A connection's first line is the secret and `call` or `lease`. The answer to a lease is `ok`, and
behind it how the tool server ended. It is the one life of the machine: who has it stops the machine
by hanging up, or by dying, and there is no second one. Calls are connections to the tool server
(`main.py`) while the lease is held, passed on byte by byte; the descriptor that `listen` sends does
not cross.

This process is root of the machine and should be its pid 1: then all ends with it. The tool server
and what the agent runs have another uid, which can neither end it nor read the secret; the tool
server the agent can end, as with `local`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from typing import Any, NoReturn, Tuple

from prorl.tools.server.main import serve

Line = Tuple[asyncio.StreamReader, asyncio.StreamWriter]
CALL, LEASE = b"call", b"lease"
FIRST_S = 10.0
"""For a connection to say what it is."""
UNCLAIMED_S = 120.0
"""A machine whose starter is gone before it took the lease ends."""
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A peer that is silent for 30 s is dead."""


def main() -> NoReturn:
    settings = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="prorl-") as folder:  # root's alone
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/server")
        listener.listen(16)
        ready, status = os.pipe()
        server = os.fork()
        if server == 0:
            _serve(listener, status, settings)
        os.close(status)
        if (status_line := os.read(ready, 4096)) != b"ok\n":
            sys.exit(status_line.decode("utf-8", "replace") or "the tool server died")
        asyncio.run(_Front(settings, folder, server).run())
    os._exit(0)  # of pid 1: the kernel ends the rest


def _serve(listener: socket.socket, status: int, settings: dict[str, Any]) -> NoReturn:
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.makedirs(settings["server"]["workspace"], exist_ok=True)
        os.chown(settings["server"]["workspace"], settings["uid"], settings["uid"])
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
        serve(listener.fileno(), status, settings["server"])
    except OSError as error:
        os.write(status, f"error: {error}".encode())
    finally:
        os._exit(1)


class _Front:
    def __init__(self, settings: dict[str, Any], folder: str, server: int) -> None:
        self._settings, self._folder, self._server = settings, folder, server
        self._lease: asyncio.StreamWriter | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        context, pem = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"{self._folder}/pem"
        with open(pem, "w") as file:
            file.write(self._settings["certificate"])
        context.load_cert_chain(pem)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        place = self._settings["host"], self._settings["port"]
        door = await asyncio.start_server(self._answer, *place, ssl=context)
        print(door.sockets[0].getsockname()[1], flush=True)
        loop.call_later(UNCLAIMED_S, self._give_up)
        self._reap()
        await self._over.wait()
        if self._lease:
            self._lease.close()
            await self._lease.wait_closed()

    def _give_up(self) -> None:
        if not self._lease:
            self._over.set()

    def _reap(self) -> None:
        while not self._over.is_set():
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._server:
                if self._lease:
                    self._lease.write(b"%d\n" % os.waitstatus_to_exitcode(status))
                self._over.set()
            if pid == 0:
                return

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await asyncio.wait_for(reader.readline(), FIRST_S)
            secret, _, what = first.rstrip(b"\n").rpartition(b" ")
            is_peer = hmac.compare_digest(secret, self._settings["secret"].encode())
            if is_peer and what == LEASE and not self._lease:
                self._lease = writer
                keep_alive((reader, writer))
                writer.write(b"ok\n")
                await reader.read(1)
            elif is_peer and what == CALL and self._lease:
                inner = await asyncio.open_unix_connection(f"{self._folder}/server")
                await pass_on((reader, writer), inner)
        except (OSError, asyncio.TimeoutError, ValueError):
            pass  # whoever it was is gone, or never knew what to say
        finally:
            if writer is self._lease:
                self._over.set()
            else:
                writer.close()


def keep_alive(line: Line) -> None:
    handle = line[1].get_extra_info("socket")
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def pass_on(first: Line, second: Line) -> None:
    """Join two connections until one of them ends; both are closed then."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        except OSError:
            pass  # an end like any other
        finally:
            target.close()

    await asyncio.gather(copy(first[0], second[1]), copy(second[0], first[1]))
