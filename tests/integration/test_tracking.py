"""Runs that name trackers (`run.track`) are tracked by processes beside the service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.analysis.track import VERSION, Scalar, scalars
from prorl.cli.app import dispatch
from prorl.config import ServiceConfig
from prorl.deploy.tracking import run_trackers
from prorl.storage.read.catalog import StoredRun
from tests.storage.test_track import Kept, history

IS_INSTALLED = find_spec("wandb") is not None


@pytest.mark.skipif(IS_INSTALLED, reason="wandb is installed: it cannot be missed")
async def test_a_tracker_that_fails_is_reported_once_and_costs_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 8, 1)
    (tmp_path / "logs").mkdir()
    running: Any = SimpleNamespace(config=ServiceConfig(root=tmp_path))
    lines: list[str] = []
    async with run_trackers(running, lines.append) as trackers:
        for _ in range(2):
            trackers.follow("r", ("wandb",))
        while len(lines) < 2:
            await asyncio.sleep(0.05)
    log = tmp_path / "logs" / "track-r.log"
    assert lines == [
        f"tracking r by wandb: {tmp_path / 'tracked'}",
        f"the tracker of r ended with exit status 2; it is started again each 60 s; log: {log}",
    ]
    assert log.read_text().startswith("error: no package for wandb")


@pytest.mark.slow
async def test_a_tracker_that_has_just_been_started_sends_all_at_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be over before its tracker's process has imported anything."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    make_run(tmp_path / "r", 16, 1)
    (tmp_path / "logs").mkdir()
    running: Any = SimpleNamespace(config=ServiceConfig(root=tmp_path))
    async with run_trackers(running, lambda line: None) as trackers:
        trackers.follow("r", (f"{Kept.__module__}:{Kept.__name__}",))
    written = [Scalar(*row) for row in orjson.loads((tmp_path / "tracked/kept.json").read_bytes())]
    assert written == scalars(StoredRun(tmp_path / "r"))


@pytest.mark.skipif(IS_INSTALLED, reason="wandb is installed: it cannot be missed")
def test_a_run_with_a_tracker_without_its_package_is_refused_before_it_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--tasks", "arith:train?n=1", "--set", "run.track=[wandb]"]
    assert dispatch([*command, "--root", str(tmp_path / "runs")]) == 2
    assert "run.track: no package for wandb here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_has_the_same_numbers_in_the_files_of_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="no wandb: make test-trackers")
    pytest.importorskip("tensorboard", reason="no tensorboard: make test-trackers")
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found, unused-ignore]
        EventAccumulator,
    )

    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["run", "--tasks", "arith:train?n=8", "--policy", "flaky", "--name", "r"]
    words += ["--set", "run.track=[tensorboard,wandb]", "--root", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "prorl.cli", *words], check=True)
    expected = {
        (scalar.name, scalar.at): pytest.approx(scalar.value)
        for scalar in scalars(StoredRun(tmp_path / "r"))
        if scalar.axis == VERSION
    }
    assert ("rollouts/reward", 0) in expected
    events = EventAccumulator(str(tmp_path / "tracked" / "r"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {(tag, e.step): e.value for tag in tags for e in events.Scalars(tag)} == expected
    (path,) = (tmp_path / "tracked").glob("wandb/offline-run-*/run-r.wandb")
    assert history(path) == expected
