"""A connection to one sandbox's tool server.

What comes back is hostile: sizes, types and times are checked, nothing is trusted.

One call at a time; more wait in line. A call is written once and never again: when its answer does
not come, the connection is closed, which makes the tool server end the command. What belongs to a
marked tool call (`mark`) goes on when this process dies, and is answered to the worker that comes
after it; so a cancellation is said aloud there. Who is to blame is asked of sandboxd, which knows
more than what was seen here (`blame.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from prorl.errors import SandboxError
from prorl.sandbox.blame import Cause, Fate
from prorl.sandbox.wire import LENGTHS, Frame, WireError, encode, open_stream, receive
from prorl.types import FailureCode, Json, SandboxRef, ToolResult
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.journal.attempt import CallId

GRACE_S = wait_limit_s("sandbox.call_grace")
FILE_OP_S = wait_limit_s("sandbox.file")
PACK_S = wait_limit_s("sandbox.pack")
ARCHIVE = ".prorl-snapshot.tar"
PACK = ': > "$0" && ulimit -f "$1" 2>/dev/null; exec tar -cf "$0" --exclude="./$0" .'
"""The file is there before its folder is looked at, which else has changed as tar read it. A lower
limit of the sandbox's own stays.
"""
UNPACK = 'tar -xpf "$0" && rm -f "$0"'
FORGET = 'rm -f "$0"'
CONNECT_S = wait_limit_s("sandbox.connect")
CHUNK_BYTES = 1 << 20
"""The part of a file in one frame, whose limit is `FRAME_LIMIT`."""


ACTS = frozenset({"call", "exec", "put"})
"""The operations that change a sandbox, and so are remembered there under the tool call's id."""
END = encode({"op": "end"})


class FateOf(Protocol):
    def __call__(self, ref: SandboxRef, seen: Cause) -> Awaitable[Fate]:
        """Returns why a sandbox came to nothing, of which `seen` is what the client noticed."""


@asynccontextmanager
async def connected(
    ref: SandboxRef, fate_of: FateOf, grace_s: float = GRACE_S
) -> AsyncIterator[ConnectedSandbox]:
    """A connection to a sandbox's tool server, closed at the end of the block.

    Raises SandboxError.
    """
    reader, writer = await _open(ref, fate_of)
    sandbox = ConnectedSandbox(ref, reader, writer, fate_of, grace_s)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _open(
    ref: SandboxRef, fate_of: FateOf
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await open_stream(ref.socket_path)
    except (OSError, TimeoutError) as cause:
        fate = await fate_of(ref, Cause.HUNG_UP)
        raise SandboxError(fate.code, f"{fate.message} ({cause})") from cause


class _Unsendable(SandboxError):
    """A call that fits in no frame; nothing was sent."""


class ConnectedSandbox:
    """`prorl.protocols.Sandbox` over a Unix socket.

    A call that is cancelled ends its command inside; the next call connects anew. After any other
    failure the connection stays closed.
    """

    def __init__(
        self,
        ref: SandboxRef,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fate_of: FateOf,
        grace_s: float,
    ) -> None:
        self.ref = ref
        self._reader, self._writer, self._fate_of, self._grace_s = reader, writer, fate_of, grace_s
        self._turn = asyncio.Lock()  # protects the one call that is on the wire
        self._next_id = 0
        self._closed = False
        self._cut = False
        """A call was cancelled; its answer may still come on the old connection."""
        self._call: CallId | None = None
        self._num_steps = 0

    def mark(self, call: CallId | None) -> None:
        """Marks the next request as belonging to this tool call; see
        `prorl.journal.SupportsCallIds`.
        """
        self._call, self._num_steps = call, 0

    async def call(self, tool: str, arguments: Mapping[str, Json], timeout_s: float) -> ToolResult:
        header = {"op": "call", "tool": tool, "arguments": dict(arguments), "timeout_s": timeout_s}
        try:
            return _result(await self._ask(header, b"", timeout_s + self._grace_s))
        except _Unsendable as error:  # what the policy wrote: a result that it can read
            return ToolResult(output=error.message, exit_code=2)

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        return _result(
            await self._ask(
                {"op": "exec", "argv": list(argv), "timeout_s": timeout_s},
                stdin,
                timeout_s + self._grace_s,
            )
        )

    async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file below the workspace. Raises SandboxError."""
        for offset in range(0, max(1, len(content)), CHUNK_BYTES):
            await self._put(path, content[offset : offset + CHUNK_BYTES], offset, mode)

    async def _put(self, path: str, chunk: bytes, offset: int, mode: int) -> None:
        header = {"op": "put", "path": path, "mode": mode, "offset": offset}
        await self._ask(header, chunk, FILE_OP_S)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a regular file below the workspace.

        Raises FileNotFoundError when there is none, SandboxError for a link, a device or more than
        `max_bytes`.
        """
        return b"".join([chunk async for chunk in self._chunks(path, max_bytes)])

    async def _chunks(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        total = 0
        while True:
            header = {"op": "get", "path": path, "offset": total, "max_bytes": CHUNK_BYTES}
            frame = await self._ask(header, b"", FILE_OP_S)
            size = frame.header.get("size")
            total += len(frame.body)
            if not isinstance(size, int) or max(size, total) > max_bytes:
                raise SandboxError(
                    FailureCode.SANDBOX_BROKEN, f"{path} is larger than {max_bytes} bytes"
                )
            yield frame.body
            if total >= size or not frame.body:
                return

    async def listen(self) -> socket.socket:
        """See `prorl.protocols.SupportsListen`."""
        try:
            return await listen(self.ref.socket_path)
        except TimeoutError:
            await self._lost(Cause.SILENT, "asked for a port")
        except WireError as cause:
            await self._lost(Cause.BROKE_PROTOCOL, str(cause))
        except OSError as cause:
            await self._lost(Cause.HUNG_UP, str(cause))

    async def snapshot(self, path: str, max_bytes: int) -> int:
        """Write the workspace as a tar to a file here, for `restore`; its size in bytes.

        0 when it is larger than the limit, the workspace has no room for it, or the image no tar.
        The archive is the sandbox's own work, and nobody looks into it but a sandbox. Raises
        SandboxError.
        """
        size = 0
        if (await self._archive(PACK, str(max_bytes >> 10))).exit_code == 0:
            with open(path, "wb") as file:
                async for chunk in self._chunks(ARCHIVE, max_bytes):
                    size += file.write(chunk)
        await self._archive(FORGET)
        return size

    async def restore(self, path: str) -> None:
        """Put a snapshot's files over the workspace.

        Raises SandboxError; OSError when there is no such file.
        """
        with open(path, "rb") as file:
            offset = 0
            while chunk := file.read(CHUNK_BYTES):
                await self._put(ARCHIVE, chunk, offset, 0o600)
                offset += len(chunk)
        done = await self._archive(UNPACK)
        if done.exit_code != 0:
            raise SandboxError(FailureCode.SANDBOX_BROKEN, f"no snapshot: {done.output[-500:]}")

    async def _archive(self, command: str, *words: str) -> ToolResult:
        return await self.exec(["bash", "-c", command, ARCHIVE, *words], PACK_S)

    async def close(self) -> None:
        self._closed = True
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass

    async def _ask(self, header: dict[str, Any], body: bytes, timeout_s: float) -> Frame:
        async with self._turn:
            if self._cut:
                self._reader, self._writer = await _open(self.ref, self._fate_of)
                self._cut = False
            if self._closed:
                raise SandboxError(
                    FailureCode.SANDBOX_LOST, "the connection to the sandbox is closed"
                )
            self._next_id += 1
            header["id"] = self._next_id
            if self._call is not None and header["op"] in ACTS:
                header["call"] = [*self._call, self._num_steps]
                self._num_steps += 1
            data = self._encode(header, body)
            frame = await self._exchange(data, timeout_s)
            if frame is None:
                await self._lost(Cause.HUNG_UP)
            return await self._check(frame, header)

    async def _exchange(self, data: bytes, timeout_s: float) -> Frame | None:
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(data)
                await self._writer.drain()
                return await receive(self._reader)
        except TimeoutError:
            await self._lost(Cause.SILENT, f"{self._grace_s:g} s after the deadline")
        except WireError as cause:
            await self._lost(Cause.BROKE_PROTOCOL, str(cause))
        except ConnectionError:
            return None
        except asyncio.CancelledError:
            self._cut = not self._closed
            if self._call is not None:
                self._writer.write(END)
            self._writer.transport.abort()
            raise

    def _encode(self, header: dict[str, Any], body: bytes) -> bytes:
        try:
            return encode(header, body)
        except WireError as cause:
            raise _Unsendable(
                FailureCode.TOOL_PROTOCOL, f"a call that cannot be sent: {cause}"
            ) from cause
        except TypeError as cause:
            raise _Unsendable(
                FailureCode.TOOL_PROTOCOL, f"arguments that are not JSON: {cause}"
            ) from cause

    async def _check(self, frame: Frame, header: dict[str, Any]) -> Frame:
        answer = frame.header
        if answer.get("id") != header["id"] or not isinstance(answer.get("ok"), bool):
            await self._lost(Cause.BROKE_PROTOCOL, "it answered another call")
        if answer["ok"]:
            return frame
        if "call" in header and self._call is not None:
            await self._check_fence(answer, self._call)
        message = str(answer.get("error", ""))[:2000]
        if header["op"] == "get" and answer.get("missing") is True:
            raise FileNotFoundError(message)
        if header["op"] in ("call", "exec"):
            # Bad arguments are the policy's: a result that it can read.
            return Frame(
                {"exit_code": 2, "duration_s": 0.0, "truncated": False, "timed_out": False},
                message.encode(),
            )
        raise SandboxError(
            FailureCode.SANDBOX_BROKEN, f"{header['op']} {header.get('path')}: {message}"
        )

    async def _check_fence(self, answer: dict[str, Any], call: CallId) -> None:
        """Raises for a call that has come before, which only a worker that takes over can hear."""
        if answer.get("fenced") is True:
            raise SandboxError(FailureCode.SANDBOX_LOST, "a later worker of the attempt has it")
        if answer.get("unknown") is not True:
            return
        if call.resumes == 0:
            await self._lost(Cause.BROKE_PROTOCOL, "it says that a first call was one before")
        text = f"call {call.number} of turn {call.turn} may have run; its result is not known"
        raise SandboxError(FailureCode.CALL_UNKNOWN, text)

    async def _lost(self, seen: Cause, detail: str = "") -> NoReturn:
        self._closed = True
        self._writer.transport.abort()
        code, message = await self._fate_of(self.ref, seen)
        raise SandboxError(code, f"{message}: {detail}" if detail else message)


async def listen(
    socket_path: str, port: int = 0, env: Mapping[str, str] = MappingProxyType({})
) -> socket.socket:
    """A socket that listens on a sandbox's own loopback, at `port` or, where that is taken, at
    another; 0 = the model's. `env`: variables for what is executed there from now on, in which
    `{port}` stands for it.

    Raises TimeoutError, WireError, OSError.
    """
    loop, header = asyncio.get_running_loop(), {"op": "listen", "id": 0}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(FILE_OP_S):
            await loop.sock_connect(connection, socket_path)
            await loop.sock_sendall(connection, encode({**header, "port": port, "env": dict(env)}))
            return await _passed(connection)


async def _passed(connection: socket.socket) -> socket.socket:
    """The listener that a tool server hands over. Raises WireError for anything else."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
        message, fds, _flags, _address = socket.recv_fds(connection, CHUNK_BYTES, 1)
    finally:
        loop.remove_reader(connection)
    if not fds:
        raise WireError(f"no socket, but {message[LENGTHS.size :][:300]!r}")
    try:
        listener = socket.socket(fileno=fds[0])
    except OSError as cause:
        os.close(fds[0])
        raise WireError(f"no socket: {cause}") from cause
    kind = (listener.family, listener.type)
    if kind != (socket.AF_INET, socket.SOCK_STREAM) or not listener.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        listener.close()
        raise WireError("a socket that does not listen")
    listener.setblocking(False)
    return listener


def _result(frame: Frame) -> ToolResult:
    header = frame.header
    exit_code, duration_s = header.get("exit_code"), header.get("duration_s")
    if not isinstance(exit_code, int) or not isinstance(duration_s, int | float):
        raise SandboxError(
            FailureCode.SANDBOX_BROKEN, "the tool server's answer lacks its exit code or duration"
        )
    return ToolResult(
        output=frame.body.decode("utf-8", "replace"),
        exit_code=max(-(1 << 31), min(exit_code, (1 << 31) - 1)),
        duration_s=max(0.0, float(duration_s)),
        truncated=header.get("truncated") is True,
        timed_out=header.get("timed_out") is True,
    )
