"""Frames on the tool server's socket: two lengths, a JSON header, then raw bytes.

    u32 header length | u32 body length | header (JSON object, UTF-8) | body

Both ends refuse a frame over `FRAME_LIMIT` bytes. The host's half of this format is
`prorl/sandbox/wire.py`.
"""

from __future__ import annotations

import struct

from prorl.tools.server.light import TYPE_CHECKING, dumps, loads, socket

if TYPE_CHECKING:
    from typing import Any

LENGTHS = struct.Struct(">II")
FD = struct.Struct("i")
FRAME_LIMIT = 4 << 20


class ToolFrame:
    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header, self.body = header, body


class BadFrame(Exception):
    """The other end does not speak this protocol."""


class FrameBuffer:
    """Bytes in, frames out. Holds at most one frame's worth of bytes more than was asked for."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    @property
    def pending(self) -> bool:
        """Returns whether bytes were received that no frame was made of."""
        return bool(self._data)

    def next(self) -> ToolFrame | None:
        """The next complete frame, or None. Raises BadFrame."""
        if len(self._data) < LENGTHS.size:
            return None
        header_bytes, body_bytes = LENGTHS.unpack_from(self._data)
        total = LENGTHS.size + header_bytes + body_bytes
        if total > FRAME_LIMIT:
            raise BadFrame(f"frame of {total} bytes; the limit is {FRAME_LIMIT}")
        if len(self._data) < total:
            return None
        middle = LENGTHS.size + header_bytes
        try:
            header = loads(self._data[LENGTHS.size : middle].decode())
        except (ValueError, RecursionError) as cause:
            raise BadFrame(f"header is not JSON: {cause}") from cause
        if not isinstance(header, dict):
            raise BadFrame("header is not an object")
        body = bytes(self._data[middle:total])
        del self._data[:total]
        return ToolFrame(header, body)


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


def send(
    connection: socket.socket,
    header: dict[str, Any],
    body: bytes = b"",
    passed: socket.socket | None = None,
) -> None:
    """Send one frame on a blocking socket, with a socket beside its first byte."""
    data = encode(header, body)
    if passed is not None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, FD.pack(passed.fileno()))
        data = data[connection.sendmsg([data], [rights]) :]
    connection.sendall(data)
