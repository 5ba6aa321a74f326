r"""What bash prints when a command has ended, in the middle of its output:

`\x1e NONCE sequence \x1f exit code \x1f NONCE \x1e`.

The nonce is new for each shell, so an agent does not print a marker by accident. Short and without
a newline: one write, which no background job can split.
"""

from __future__ import annotations

import os

BEGIN, SEPARATOR = b"\x1e", b"\x1f"
MAX_BYTES = 80


class Found:
    """A marker in a buffer: where it is and what it says."""

    def __init__(self, start: int, end: int, sequence: int | None, exit_code: int) -> None:
        self.start, self.end, self.sequence, self.exit_code = start, end, sequence, exit_code
        """`sequence` None: the command has unset the shell's variables, so the marker can only be
        its own.
        """


class Marker:
    """Makes and finds the markers of one shell: its nonce is in each."""

    def __init__(self) -> None:
        self.nonce = os.urandom(8).hex().encode()
        self._head = BEGIN + self.nonce
        self._tail = SEPARATOR + self.nonce + BEGIN

    def text(self, sequence: str, exit_code: str) -> str:
        """A marker as printf and prompts write it, with shell expressions for its two numbers."""
        nonce = self.nonce.decode()
        return rf"\036{nonce}{sequence}\037{exit_code}\037{nonce}\036"

    def find(self, data: bytes) -> Found | None:
        """The first whole marker in these bytes, or None."""
        tail = data.find(self._tail)
        while tail >= 0:
            start = data.rfind(self._head, 0, tail)
            sequence, _, exit_code = data[start + len(self._head) : tail].partition(SEPARATOR)
            if start >= 0 and exit_code.isdigit() and (sequence.isdigit() or not sequence):
                return Found(
                    start,
                    tail + len(self._tail),
                    int(sequence) if sequence else None,
                    int(exit_code),
                )
            tail = data.find(self._tail, tail + 1)
        return None

    def unfinished(self, data: bytes) -> int:
        """Where a marker may have begun that is not whole yet; the length of `data` if nowhere."""
        start = data.rfind(BEGIN, -MAX_BYTES)
        if start < 0 or len(data) - start >= MAX_BYTES:
            return len(data)
        rest = data[start:]
        return start if self._head.startswith(rest) or rest.startswith(self._head) else len(data)
