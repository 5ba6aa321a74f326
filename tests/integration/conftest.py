"""Runs through the real service, in both layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import orjson
import pytest

from prorl.cli.job import JobPlan
from prorl.types import Json

TASKS = Path(__file__).with_name("tasks.jsonl")


@pytest.fixture(params=[0, 1], ids=["one-process", "a-worker"])
def workers(request: pytest.FixtureRequest) -> int:
    """Gateway, stages and store in one process, or the stages in one of their own: their edges to
    gateway and store in memory, or through the socket.
    """
    return int(request.param)


SLOW_IN_A_SINGLE_PROCESS = pytest.mark.parametrize(
    "workers",
    [pytest.param(0, marks=pytest.mark.slow), 1],
    ids=["one-process", "a-worker"],
)
"""Of a test whose subject is another one than the edges: the fast suite plays it over sockets."""


@pytest.fixture
def demo_rows() -> list[dict[str, Json]]:
    """Sixteen tasks of mathematics and of code."""
    return [orjson.loads(line) for line in TASKS.read_text().splitlines()]


@pytest.fixture
def make_plan(tmp_path: Path, sandbox_kind: str) -> Callable[..., JobPlan]:
    """A checked job over the given task rows, on a root of its own."""

    def make(rows: Iterable[dict[str, Json]], *sets: str, **flags: Json) -> JobPlan:
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
        sets = (f"service.sandbox.kind={sandbox_kind}", *sets)
        return JobPlan.make(
            None,
            {"tasks": str(tasks), **flags},
            sets,
            root=tmp_path / "root",
            resume=bool(flags.pop("resume", False)),
        )

    return make
