"""Marks of when each row was offered on an edge and received, and when a server was called.

For `prorl bench pipeline` and for trials; off unless `start` was called. A mark is a line
`ns edge what run rollout attempt` in FOLDER/NAME, by CLOCK_MONOTONIC, which all processes of a host
share. It costs a write per row and end: never on while throughput or CPU are measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from prorl.types import AttemptKey

OFFERED, RECEIVED, REQUESTED = "offered", "taken", "asked"

_file: TextIO | None = None


class Mark(NamedTuple):
    """One row at one end of one edge; a model call's edge is the server that was asked."""

    at_s: float
    edge: str
    event: str
    key: AttemptKey


def start(folder: Path, name: str) -> None:
    global _file
    folder.mkdir(parents=True, exist_ok=True)
    _file = (folder / name).open("a", buffering=1)


def mark(edge: str, event: str, keys: Iterable[AttemptKey]) -> None:
    """Notes that these rows are here now."""
    if _file is not None:
        now_ns = time.monotonic_ns()
        _file.writelines(
            f"{now_ns} {edge} {event} {key.run_id} {key.rollout_id} {key.attempt}\n" for key in keys
        )


def read(folder: Path, since_s: float) -> Iterator[Mark]:
    """Yields all processes' marks that are not older than `since_s` on the monotonic clock."""
    for path in sorted(folder.glob("*")):
        for line in path.read_text().splitlines():
            at_ns, edge, event, run_id, rollout_id, attempt = line.split()
            if int(at_ns) >= since_s * 1e9:
                yield Mark(
                    int(at_ns) / 1e9, edge, event, AttemptKey(run_id, int(rollout_id), int(attempt))
                )


def handoffs(marks: Iterable[Mark], edge: str) -> list[float]:
    """Returns the seconds from offered to taken of every row that has both, in order of offer."""
    ours = sorted(mark for mark in marks if mark.edge == edge)
    received_s = {mark.key: mark.at_s for mark in reversed(ours) if mark.event == RECEIVED}
    return [
        received_s[mark.key] - mark.at_s
        for mark in ours
        if mark.event == OFFERED and mark.key in received_s
    ]
