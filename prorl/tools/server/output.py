"""Output with a cap: the head and the tail stay, the middle is counted and left out. Reading never stops."""

from __future__ import annotations

from collections import deque


class Capped:
    """Collects bytes. Memory never exceeds `limit` plus one chunk, whatever is fed.

    >>> out = Capped(8)
    >>> out.feed(b"0123456789abcdef"); out.truncated
    True
    >>> out.value()
    b'0123\\n[... 8 bytes left out ...]\\ncdef'
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total = 0

    @property
    def truncated(self) -> bool:
        """Whether something was left out."""
        return self.total > 2 * self._half

    def feed(self, data: bytes) -> None:
        """Add a chunk."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._half:
            return
        self._tail.append(data[-self._half :])
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= self._half:
            self._tail_bytes -= len(self._tail.popleft())

    def value(self) -> bytes:
        """What is kept, with a mark where bytes are missing."""
        tail = b"".join(self._tail)[-self._half :] if self._half else b""
        left_out = self.total - len(self._head) - len(tail)
        if left_out == 0:
            return bytes(self._head) + tail
        return bytes(self._head) + (b"\n[... %d bytes left out ...]\n" % left_out) + tail
