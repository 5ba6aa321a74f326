"""Tests of the figures of `prorl bench scale`, where the answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prorl.bench.growth import GrowingRun, Meter, N
from prorl.bench.scale import NUM_TIMES, times_s, worked_share
from prorl.config import RunConfig


def test_waits_have_the_requested_mean() -> None:
    waits = times_s(8.0)
    assert len(waits) == NUM_TIMES
    assert np.mean(waits) == pytest.approx(8.0, abs=0.01)
    assert list(waits) == sorted(waits)


def test_only_work_in_the_middle_of_a_run_counts() -> None:
    """Two slots without a gap, rows in the store half a second late; then one that is alone."""
    ends = [2.5, 4.5, 6.5, 8.5, 10.5] * 2 + [16.5]
    waits = [2.0] * 10 + [6.0]
    share = worked_share(np.array(ends), np.array(waits), slots=2)
    assert share == pytest.approx(1.0)
    assert worked_share(np.array(ends), np.array(waits), slots=4) == 0.5


def test_a_gateway_driven_by_hand_ends_what_it_takes_whatever_is_in_hand(tmp_path: Path) -> None:
    life = GrowingRun(tmp_path / "control.db", Meter())
    life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
    life.accept(1024)
    life.work(512)
    assert life.run.counts["completed"] == 1024
    assert life.run.delivery.next_delivery == life.run.accepted.next_group == 1024 // N
    life.log.close()
