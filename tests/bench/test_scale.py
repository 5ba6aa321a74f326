"""The model behind `prorl bench scale`: what it must say where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prorl.bench.growth_log import Life, Meter, N
from prorl.bench.scale import NUM_TIMES, times_s
from prorl.bench.scale_model import Costs, saturation, simulate, worked_share
from prorl.config import RunConfig

WAITS = (5.0, 10.0, 15.0)
CHEAP = Costs(gateway_s=1e-6, store_s=1e-6, node_share=0.0)


@pytest.mark.parametrize("nodes", [1, 16])
def test_where_nothing_is_shared_nodes_add_up(nodes: int) -> None:
    assert simulate(nodes, 16, WAITS, CHEAP).efficiency == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("which", ["gateway_s", "store_s"])
def test_a_core_that_is_full_is_the_limit(which: str) -> None:
    costs = replace(CHEAP, **{which: 0.05})  # type: ignore[arg-type]  # a field of floats
    assert simulate(64, 16, WAITS, costs).rate == pytest.approx(20.0, rel=0.1)


def test_heartbeats_alone_fill_a_gateway() -> None:
    costs = Costs(gateway_s=0.001, store_s=0.001, node_share=0.01)
    assert simulate(99, 16, WAITS, costs).gateway_busy == pytest.approx(1.0, abs=0.01)
    assert saturation(16, WAITS, costs) == 64


def test_equal_arguments_give_an_equal_point() -> None:
    assert simulate(8, 16, WAITS, CHEAP) == simulate(8, 16, WAITS, CHEAP)


def test_waits_have_the_mean_that_was_asked_for() -> None:
    waits = times_s(8.0)
    assert len(waits) == NUM_TIMES
    assert np.mean(waits) == pytest.approx(8.0, abs=0.01)
    assert list(waits) == sorted(waits)


def test_a_second_gateway_carries_as_many_again() -> None:
    costs = Costs(gateway_s=0.05, store_s=1e-6, node_share=0.0)
    one, two = (simulate(64, 16, WAITS, replace(costs, gateways=n)).rate for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.1)


def test_what_a_slot_waits_between_rollouts_is_no_work() -> None:
    handed = replace(CHEAP, handoff_s=2.0)
    assert simulate(4, 4, [8.0], handed).efficiency == pytest.approx(0.8, abs=0.01)


def test_only_work_in_the_middle_of_a_run_counts() -> None:
    """Two slots without a gap, rows in the store half a second late; then one that is alone."""
    ends = [2.5, 4.5, 6.5, 8.5, 10.5] * 2 + [16.5]
    waits = [2.0] * 10 + [6.0]
    share = worked_share(np.array(ends), np.array(waits), slots=2)
    assert share == pytest.approx(1.0)
    assert worked_share(np.array(ends), np.array(waits), slots=4) == 0.5


def test_a_gateway_driven_by_hand_ends_what_it_takes_whatever_is_in_hand(tmp_path: Path) -> None:
    life = Life(tmp_path / "control.db", Meter())
    life.core.create_run(RunConfig(run_id="a", delivery="stream", max_open_groups=256))
    life.accept(1024)
    life.work(512)
    assert life.run.rollout_states["completed"] == 1024
    assert life.run.next_delivery == life.run.next_group == 1024 // N
    life.log.close()
