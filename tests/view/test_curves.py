"""Curves of a run over each axis, and by how much two runs of the same tasks differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from prorl.analysis.difference import Difference, difference
from prorl.analysis.synthetic_runs import make_run, rollout_tables, write_commit
from prorl.schema import METRICS, TABLES, VERSIONS
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir
from prorl.view.opened import Opened
from tests.view.viewer_process import viewing

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def stored(where: Path, **columns: Sequence[Any]) -> RunDir:
    """A run of as many valid rollouts as each column has values."""
    count = len(next(iter(columns.values())))
    run = make_run(where, 0, 0)
    tables = rollout_tables(np.arange(count), 64, np.random.default_rng(0))
    rows = tables["rollouts"]
    for name, values in columns.items():
        field = TABLES["rollouts"].field(name)
        place = rows.column_names.index(name)
        rows = rows.set_column(place, field, pa.array(values, field.type))
    write_commit(run, run.name, 1, tables | {"rollouts": rows})
    return run


def after(minutes: float) -> datetime:
    return BEGAN + timedelta(minutes=minutes)


@pytest.fixture
def curves(tmp_path: Path) -> Opened:
    """Four rollouts in the first hour, four in the second, and a step at the end of each."""
    run = stored(
        tmp_path / "r",
        group_id=[0] * 4 + [1] * 4,
        reward=[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        valid=[True] * 8,
        min_version=[0] * 4 + [1] * 4,
        max_version=[0, 0, 0, 2, 1, 2, 2, 2],
        committed_at=[after(minutes) for minutes in (0, 1, 2, 3, 60, 61, 62, 63)],
    )
    logged = [
        {"step": step, "version": version, "name": "loss", "value": value, "time": after(minutes)}
        for step, version, value, minutes in ((1, 1, 0.5, 30), (2, None, 0.25, 90))
    ]
    rows = [{"run_id": "r", "consumer": "primary", **row} for row in logged]
    AppendedTable(run, "metrics").append(pa.Table.from_pylist(rows, METRICS), "k")
    published: dict[str, Any] = {
        "run_id": "r",
        "version": 2,
        "label": "",
        "path": "",
        "pause": "wait",
    }
    published |= {
        "published_at": after(59),
        "adapter": False,
        "loaded_servers": [],
        "failed_servers": [],
        "load_s": 0.0,
    }
    AppendedTable(run, "versions").append(pa.Table.from_pylist([published], VERSIONS), "2")
    return Opened(str(tmp_path / "r"))


@pytest.mark.parametrize(
    ("axis", "reward", "pass_at", "loss"),
    [
        ("oldest", [(0, 0.25), (1, 0.75)], [(0, 1.0), (1, 1.0)], [(1, 0.5), (2, 0.25)]),
        ("newest", [(0, 0.0), (1, 1.0), (2, 0.75)], [(2, 1.0)], [(1, 0.5), (2, 0.25)]),
        ("step", [(1, 0.25), (2, 0.75)], [(1, 1.0), (2, 1.0)], [(1, 0.5), (2, 0.25)]),
    ],
)
def test_each_axis_places_rollouts_groups_and_steps(
    curves: Opened, axis: str, reward: list[Any], pass_at: list[Any], loss: list[Any]
) -> None:
    drawn = {curve["name"]: curve["rows"] for curve in curves.curves(axis)["curves"]}
    assert [(row["x"], row["y"]) for row in drawn["reward"]] == reward
    at_4 = [(row["x"], row["y"]) for row in drawn["pass"] if row["z"] == "pass@4"]
    assert at_4 == pass_at
    assert [(row["x"], row["y"]) for row in drawn["metric:loss"]] == loss, (
        "a step without a version has the one that was published last"
    )


def test_over_time_a_curve_begins_at_0_and_keeps_its_length(curves: Opened) -> None:
    drawn = {curve["name"]: curve["rows"] for curve in curves.curves("time")["curves"]}
    times = [row["x"] for row in drawn["reward"]]
    assert times[0] == 0
    assert times[-1] == pytest.approx(63 * 60, rel=0.03)
    assert [row["x"] for row in drawn["metric:loss"]] == [30 * 60, 90 * 60]


def compare(tmp_path: Path, a: dict[str, list[float]], b: dict[str, list[float]]) -> Difference:
    opened = []
    for name, rewards in (("a", a), ("b", b)):
        tasks = [task for task, values in rewards.items() for _ in values]
        values = [value for values in rewards.values() for value in values]
        stored(tmp_path / name, task_id=tasks, reward=values, valid=[True] * len(values))
        opened.append(Opened(str(tmp_path / name)))
    return difference(opened[0].answer, opened[1].answer)


def test_flipped_tasks_come_first_each_with_its_interval(tmp_path: Path) -> None:
    a = {"flip": [0.0, 0.0, 1.0, 0.0], "more": [0.5] * 4, "same": [1.0] * 4, "mine": [1.0]}
    b = {"flip": [1.0, 1.0, 0.0, 1.0], "more": [2.0, 2.5, 2.0, 2.5], "same": [1.0] * 4}
    difference = compare(tmp_path, a, b)
    assert [(task.task_id, task.flipped) for task in difference.tasks] == [
        ("flip", True),
        ("more", False),
        ("same", False),
    ], "a task of one run alone is in no difference"
    flip, more, same = difference.tasks
    assert flip.difference == 0.5
    assert flip.low < 0 < flip.high, "of four rollouts each nothing is certain"
    assert 0 < more.low < more.difference == 1.75 < more.high
    assert same.low < same.difference == 0 < same.high, "four of four is not certainty"
    assert difference.mean == pytest.approx(0.75)
    assert difference.low < 0.75 < difference.high


def test_of_single_rewards_that_are_no_shares_everything_is_possible(tmp_path: Path) -> None:
    difference = compare(tmp_path, {"t": [0.3]}, {"t": [0.9]})
    assert (difference.tasks[0].low, difference.tasks[0].high) == (-math.inf, math.inf)


async def test_the_server_tells_both(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, 64, 1)
    with viewing(tmp_path) as viewer:
        status, body = await viewer.ask("api/difference?a=a&b=b")
        assert (status, body["shared"], body["flipped"], body["mean"]) == (200, 8, 0, 0.0)
        status, body = await viewer.ask("api/runs/a/curves/step")
        assert (status, body["axis"]) == (200, "trainer step")
        status, body = await viewer.ask("api/runs/a/curves/moon")
        assert status == 422
        assert "oldest" in body["error"]
