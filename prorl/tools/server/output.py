"""Output with a cap: the head and the tail stay, the middle is counted and left out.

Reading never stops.
"""

from __future__ import annotations

from prorl.tools.server.light import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


OUTPUT_BYTES = 64 << 10
"""Kept of what one call gives."""


class Capped:
    """Collects output up to a number of bytes, its head and its tail.

    Memory never exceeds one and a half times `limit` plus one chunk, whatever is fed.

    >>> out = Capped(8)
    >>> out.feed(b"0123456789abcdef"); out.truncated
    True
    >>> out.value()
    b'0123\\n[... 8 bytes left out ...]\\ncdef'
    """

    def __init__(self, limit: int = OUTPUT_BYTES) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self._half

    def feed(self, data: bytes) -> None:
        """Add bytes as they were read; above the limit the middle is dropped."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Not at each chunk: moving the tail costs as much as it is long.
        if len(self._tail) > 2 * self._half:
            del self._tail[: len(self._tail) - self._half]

    def clear(self) -> None:
        self._head.clear()
        self._tail.clear()
        self.total = 0

    def drop(self, text: bytes) -> None:
        """Take this text out of what is kept, wherever it is; it is not counted as left out."""
        for part in (self._head, self._tail):
            if text in part:
                self.total -= part.count(text) * len(text)
                part[:] = part.replace(text, b"")

    def drop_block(self, first: bytes, last: bytes) -> None:
        """Forget what is between these texts, and both."""
        for part in (self._head, self._tail):
            start = part.find(first)
            end = part.find(last, start) if start >= 0 else -1
            if end >= 0:
                self.total -= end + len(last) - start
                del part[start : end + len(last)]

    def drop_lines(self, *words: bytes) -> None:
        """Take out every line that holds one of these words; none is counted as left out."""
        for part in (self._head, self._tail):
            if any(word in part for word in words):
                lines = b"\n".join(
                    line for line in part.split(b"\n") if not any(word in line for word in words)
                )
                self.total -= len(part) - len(lines)
                part[:] = lines

    def value(self) -> bytes:
        tail = bytes(self._tail[-self._half :]) if self._half else b""
        num_omitted = self.total - len(self._head) - len(tail)
        if num_omitted == 0:
            return bytes(self._head) + tail
        return bytes(self._head) + (b"\n[... %d bytes left out ...]\n" % num_omitted) + tail


def result_of(output: Capped, exit_code: int | None, timed_out: bool = False) -> dict[str, Any]:
    return {"output": output, "exit_code": exit_code, "timed_out": timed_out}
