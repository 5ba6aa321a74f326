"""The end of a command is found in whatever pieces it comes, and nothing else is taken for it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prorl.tools.server.typed import MAX_BYTES, Marker

BYTES = st.lists(st.sampled_from([b"\x1e", b"\x1f", b"7", b"x", b"\n"]), max_size=12).map(b"".join)


def printed(marker: Marker, sequence: str, exit_code: str) -> bytes:
    return re.sub(
        rb"\\(\d{3})",
        lambda match: bytes([int(match[1], 8)]),
        marker.text(sequence, exit_code).encode(),
    )


@given(BYTES, BYTES, st.integers(0, 999), st.integers(0, 255))
def test_a_marker_is_detected_between_any_bytes(
    before: bytes, after: bytes, sequence: int, exit_code: int
) -> None:
    marker = Marker()
    mark = printed(marker, str(sequence), str(exit_code))
    match = marker.find(before + mark + after)
    assert match is not None
    assert (match.start, match.end) == (len(before), len(before) + len(mark))
    assert (match.sequence, match.exit_code) == (sequence, exit_code)


@given(BYTES, st.data())
def test_an_incomplete_marker_is_buffered_and_nothing_else(
    before: bytes, data: st.DataObject
) -> None:
    marker = Marker()
    mark = printed(marker, "12", "0")
    assert len(mark) < MAX_BYTES
    part = mark[: data.draw(st.integers(1, len(mark) - 1))]
    assert marker.find(before + part) is None
    assert marker.unfinished(before + part) == len(before)
    assert marker.unfinished(before + b"plain") == len(before) + 5


def test_without_a_number_it_is_still_an_end_and_without_a_code_it_is_none() -> None:
    marker = Marker()
    match = marker.find(printed(marker, "", "3"))
    assert match is not None
    assert (match.sequence, match.exit_code) == (None, 3)
    assert marker.find(printed(marker, "1", "x")) is None
    assert marker.find(printed(Marker(), "1", "0")) is None
    assert marker.find(printed(marker, "1", "x") + printed(marker, "2", "0")) is not None
