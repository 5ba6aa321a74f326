"""Output with a cap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl.tools.server.output import Capped


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 64))
def test_head_and_tail_stay_and_the_rest_is_counted(chunks: list[bytes], limit: int) -> None:
    out = Capped(limit)
    for chunk in chunks:
        out.feed(chunk)
    everything, half = b"".join(chunks), limit // 2
    assert out.total == len(everything)
    if len(everything) <= 2 * half:
        assert out.value() == everything
        assert not out.truncated
    else:
        num_omitted = len(everything) - 2 * half
        tail = everything[-half:] if half else b""
        assert (
            out.value()
            == everything[:half] + b"\n[... %d bytes left out ...]\n" % num_omitted + tail
        )
        assert out.truncated


def test_memory_stays_at_the_cap() -> None:
    out = Capped(1000)
    for _ in range(10_000):
        out.feed(b"x" * 777)
    assert len(out.value()) < 1100
    assert len(out._head) + len(out._tail) <= 1500
