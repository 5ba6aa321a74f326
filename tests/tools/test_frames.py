"""Both halves of the framed protocol agree, and both refuse what is not it."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.sandbox import wire
from prorl.tools.server import frames

HEADERS = st.dictionaries(
    st.text(max_size=9), st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=9), st.booleans())
)


def _host_reads(data: bytes) -> wire.Frame | None:
    async def read() -> wire.Frame | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.receive(reader)

    return asyncio.run(read())


@given(HEADERS, st.binary(max_size=300))
def test_the_host_reads_what_the_server_writes(header: dict[str, object], body: bytes) -> None:
    assert _host_reads(frames.encode(header, body)) == (header, body)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=99)), max_size=5), st.integers(1, 50))
def test_the_server_reads_what_the_host_writes_in_any_pieces(
    messages: list[tuple[dict[str, object], bytes]], step: int
) -> None:
    data = b"".join(wire.encode(header, body) for header, body in messages)
    buffer = frames.FrameBuffer()
    found = []
    for start in range(0, len(data), step):
        buffer.feed(data[start : start + step])
        while (frame := buffer.next()) is not None:
            found.append((frame.header, frame.body))
    assert found == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", 2**31, 0),
        struct.pack(">II", 10, 4 << 20) + b"{}",
        struct.pack(">II", 2, 0) + b"[]",
        struct.pack(">II", 3, 0) + b"\xff\xfe{",
        struct.pack(">II", 5, 0) + b"{",
        b"\0\0",
    ],
)
def test_the_host_refuses_what_a_hostile_server_may_send(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        _host_reads(data)


def test_the_server_refuses_a_frame_over_the_limit() -> None:
    buffer = frames.FrameBuffer()
    buffer.feed(struct.pack(">II", 100, frames.FRAME_LIMIT))
    with pytest.raises(frames.BadFrame):
        buffer.next()
    assert frames.FRAME_LIMIT == wire.FRAME_LIMIT
