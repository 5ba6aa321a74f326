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
    frames_read = []
    for start in range(0, len(data), step):
        buffer.feed(data[start : start + step])
        while (frame := buffer.next()) is not None:
            frames_read.append((frame.header, frame.body))
    assert frames_read == messages


def test_both_refuse_a_frame_over_the_limit() -> None:
    buffer, head = frames.FrameBuffer(), struct.pack(">II", 100, frames.FRAME_LIMIT)
    buffer.feed(head)
    with pytest.raises(frames.BadFrame):
        buffer.next()
    with pytest.raises(wire.WireError, match="a frame of"):
        _host_reads(head)
    assert frames.FRAME_LIMIT == wire.FRAME_LIMIT
