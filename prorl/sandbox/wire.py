"""The host's half of the framed protocol, for asyncio.

It is spoken to tool servers (hostile) and to sandboxd.

    u32 header length | u32 body length | header (JSON object, UTF-8) | body

The inside's half is `prorl/tools/server/frames.py`; a test holds the two together. A frame over
`FRAME_LIMIT` is refused before a byte of it is kept.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, NamedTuple

import orjson

LENGTHS = struct.Struct(">II")
FRAME_LIMIT = 4 << 20
READ_BYTES = 1 << 16
MAX_SOCKET_PATH = 99
"""Bytes; the kernel takes 107, and relative names of others need room."""


class Frame(NamedTuple):
    header: dict[str, Any]
    body: bytes


class WireError(Exception):
    """The other end broke the protocol; the connection is of no more use."""


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame as bytes.

    Raises WireError when it would be over the limit, TypeError for what is not JSON.
    """
    try:
        text = orjson.dumps(header)
    except TypeError as cause:
        if "Recursion" in str(cause):  # json and the server would give up at another depth
            raise WireError("it is nested too deeply") from None
        try:
            # half a surrogate pair, as models write them: JSON can escape it, and the server says
            # what is wrong with it
            text = json.dumps(header).encode()
        except RecursionError:
            raise WireError("it is nested too deeply") from None
    if LENGTHS.size + len(text) + len(body) > FRAME_LIMIT:
        raise WireError(f"a frame of {len(text) + len(body)} bytes; the limit is {FRAME_LIMIT}")
    return LENGTHS.pack(len(text), len(body)) + text + body


class Stream(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """A stream that is read into memory that is there already.

    asyncio's own asks the kernel for 256 KiB and gives them back for each answer.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._space = memoryview(bytearray(READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._space[:nbytes]))


async def open_stream(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, protocol = await loop.create_unix_connection(lambda: Stream(reader), path)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, or None at the end of the stream. Raises WireError."""
    try:
        header_bytes, body_bytes = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
        if LENGTHS.size + header_bytes + body_bytes > FRAME_LIMIT:
            raise WireError(
                f"a frame of {header_bytes + body_bytes} bytes; the limit is {FRAME_LIMIT}"
            )
        text = await reader.readexactly(header_bytes)
        body = await reader.readexactly(body_bytes)
    except asyncio.IncompleteReadError as cut:
        if cut.partial:
            raise WireError("the stream ended inside a frame") from cut
        return None
    except ConnectionError:
        return None
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise WireError(f"the header is not JSON: {cause}") from cause
    if not isinstance(header, dict):
        raise WireError("the header is not an object")
    return Frame(header, body)
