"""The server's memory of calls that carry an id: none of them runs twice.

`"call": [resumes, turn, number, op]` says which tool call of the attempt a request belongs to, in
after how many resumes of it, and which step of that call it is. A worker that takes an attempt over
asks again what it cannot know: what has been answered is given again, what never came runs now, and
of what came and left no answer the server says so. Its answers are kept until the attempt's next
tool call, `LIMIT_BYTES` of them. A request of an earlier worker is refused.
"""

from __future__ import annotations

from prorl.tools.server.light import TYPE_CHECKING, dumps

if TYPE_CHECKING:
    from typing import Any

    Answer = tuple[dict[str, Any], bytes]

LIMIT_BYTES = 1 << 20
_VARIES = ("id", "call", "timeout_s")
"""Not part of what is asked: the next worker may have less time."""


class Memory:
    """Remembers what the present tool call of a server was answered, step by step."""

    def __init__(self) -> None:
        self._resumes = 0
        self._call = (-1, -1)
        self._next = 0
        """Steps of the present call that have come."""
        self._answers: dict[int, tuple[int, Answer]] = {}
        self._bytes = 0

    def recall(self, header: dict[str, Any], body: bytes) -> Answer | None:
        """The answer to a step that has come before, or None for one that runs now.

        Raises ValueError for an id that is none.
        """
        resumes, turn, number, step = (int(part) for part in header["call"])
        if resumes < self._resumes:
            return {"ok": False, "fenced": True, "error": "another worker has the sandbox"}, b""
        self._resumes = resumes
        if (turn, number) > self._call:
            self._call, self._next, self._bytes = (turn, number), 0, 0
            self._answers.clear()
        if (turn, number) == self._call and step >= self._next:
            self._next = step + 1
            return None
        digest, answer = self._answers.get(step, (0, None))
        if (turn, number) < self._call or answer is None or digest != _digest(header, body):
            return {"ok": False, "unknown": True, "error": "it has come before"}, b""
        reply, content = answer
        return dict(reply), content

    def keep(self, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Remember what a step was answered; the oldest go where there is no room."""
        reply, content = answer
        self._answers[int(header["call"][3])] = (_digest(header, body), (dict(reply), content))
        self._bytes += len(content)
        while self._bytes > LIMIT_BYTES:
            oldest = min(self._answers)
            self._bytes -= len(self._answers.pop(oldest)[1][1])


def _digest(header: dict[str, Any], body: bytes) -> int:
    text = dumps({name: value for name, value in header.items() if name not in _VARIES})
    return hash((text, body))
