"""Tests of the marks that the pipeline benchmark reads: rows on edges."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prorl.bench.pipeline import has_finished
from prorl.client.client import connect
from prorl.errors import UnavailableError
from prorl.flight.trace import OFFERED, RECEIVED, Mark, handoffs, read
from prorl.types import AttemptKey
from tests.service.running_gateway import TOKEN, running_gateway

WRITER = """
from pathlib import Path
from prorl.flight import trace
from prorl.types import AttemptKey
trace.start(Path({folder!r}), "init-0")
trace.mark("ready", trace.OFFERED, [AttemptKey("r", 1, 1)])
trace.mark("ready", trace.RECEIVED, [AttemptKey("r", 1, 1)])
"""


def test_marks_of_another_process_are_read_on_the_same_clock(tmp_path: Path) -> None:
    before = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", WRITER.format(folder=str(tmp_path / "trace"))], check=True
    )
    marks = list(read(tmp_path / "trace", since_s=before))
    assert [(m.edge, m.event, m.key) for m in marks] == [
        ("ready", what, AttemptKey("r", 1, 1)) for what in (OFFERED, RECEIVED)
    ]
    assert before < marks[0].at_s <= marks[1].at_s < time.monotonic()
    assert not list(read(tmp_path / "trace", since_s=time.monotonic()))


def test_a_handoff_is_the_time_between_the_two_ends_of_an_edge() -> None:
    first, second = AttemptKey("r", 1, 1), AttemptKey("r", 2, 1)
    marks = [
        Mark(1.0, "ran", OFFERED, first),
        Mark(1.5, "ran", OFFERED, second),
        Mark(1.25, "ran", RECEIVED, first),
        Mark(9.0, "ready", OFFERED, first),
        Mark(9.5, "ready", RECEIVED, first),
    ]
    assert handoffs(marks, "ran") == pytest.approx([0.25])
    assert handoffs(marks, "ready") == pytest.approx([0.5])


async def test_a_run_that_ended_otherwise_is_not_waited_for(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        client = connect(w.served.http, TOKEN)
        await w.run()
        assert not await asyncio.to_thread(has_finished, client, "r")
        w.core.fail_run(w.core.run("r"), "its directory is another's")
        await w.served.gateway.durable()
        with pytest.raises(UnavailableError, match="run r is failed: its directory"):
            await asyncio.to_thread(has_finished, client, "r")
