"""A sandbox on a machine elsewhere: the launcher of a kind whose start asks somebody for a machine.

Not a kind: yours starts the machine with what `machine_config` says, and then becomes `relay`
(`prorl/tools/server/remote.py` is the other end; `tests/cluster/test_remote_kind.py` a whole kind).
sandboxd, and all above it, sees the same socket as of any other kind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from typing import Any, NoReturn

from prorl.linux.forked import ForkedChild
from prorl.sandbox.kinds.common import limits_of
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import BASE_PATH, SANDBOX_UID, WORKSPACE, Launch, server_config
from prorl.tools.server.remote import CALL, LEASE, Line, keep_alive, pass_on


def machine_config(launch: Launch, pem: str, secret: str) -> dict[str, Any]:
    """Returns what the machine's program gets on standard input; `pem`: a certificate and its key.

    They and the secret are made for this start.
    """
    server = server_config(launch, WORKSPACE, BASE_PATH, refuse_uid=-1, alone=True)
    server |= {"limits": limits_of(launch), "seccomp": seccomp.bytecode().hex()}
    machine = {"host": "0.0.0.0", "port": 0, "uid": SANDBOX_UID, "secret": secret}
    return {**machine, "certificate": pem, "server": server}


def relay(listener_fd: int, status_fd: int, place: tuple[str, int], pem: str, key: str) -> NoReturn:
    """Pass sandboxd's clients on to a machine until it ends; it ends with this process.

    `place`: its host and port, `pem` and `key`: what it was told.
    """
    with ForkedChild(status_fd):
        exit_line = asyncio.run(_relay(listener_fd, status_fd, place, pem, key.encode()))
        if not exit_line:
            os.kill(os.getpid(), signal.SIGKILL)  # nobody there tells why it ended
        code = int(exit_line)
        os._exit(code if code >= 0 else 128 - code)
    os._exit(1)


async def _relay(
    listener_fd: int, status_fd: int, place: tuple[str, int], pem: str, key: bytes
) -> bytes:
    context = ssl.create_default_context(cadata=pem[pem.index("-----BEGIN CERTIFICATE") :])
    context.check_hostname = False  # it is pinned, wherever the machine is

    async def connect(what: bytes) -> Line:
        reader, writer = await asyncio.open_connection(*place, ssl=context)
        writer.write(key + b" " + what + b"\n")
        return reader, writer

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await pass_on((reader, writer), await connect(CALL))
        except OSError:
            writer.close()

    lease_line = await connect(LEASE)
    keep_alive(lease_line)
    lease = lease_line[0]
    if await lease.readline() != b"ok\n":
        raise OSError(f"the machine at {place} gives no lease")
    listener = socket.socket(fileno=listener_fd)
    async with await asyncio.start_unix_server(answer, sock=listener):
        os.write(status_fd, b"ok\n")
        os.close(status_fd)
        return await lease.readline()
