"""Tests that the core's decisions follow from its events: the same ones lead to the same state
again, wherever objects lie in memory and whatever else draws random numbers.
"""

from __future__ import annotations

import random
from pathlib import Path

from prorl.service.log.log import ControlLog
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore

COUNT = 40


def _lives(folder: Path, seed: int) -> tuple[list[int], list[tuple[float, int]]]:
    """Forty leases in the hands of a worker, in an order of the caller's; ten of them fail, it
    dies: who waits for a lease, in order, and who rests until when.
    """
    log = ControlLog(folder / f"{seed}" / "control.db")
    hand = SteppedCore(log)
    core = hand.core
    core.create_run(run_config(limits={"max_attempts": 10}))
    hand.submit(*(group(str(i)) for i in range(COUNT)))
    (worker,) = hand.come("init")
    core.pump(COUNT)
    run = core.run("r")
    for rollout_id in _order():
        core.rollouts.add_holder(run.rollouts[rollout_id], worker, "init")
    random.seed(seed)
    for rollout_id in range(0, COUNT, 4):
        core.rollouts.failed(run.rollouts[rollout_id], 1, "sandbox_start", "")
    core.workers.handle_disconnect(worker)
    log.close()
    delayed = [(until, rollout_id) for until, rollout_id, _ in sorted(run.queues.delayed)]
    return [record.rollout_id for record in run.queues.ready], delayed


def _order() -> list[int]:
    return sorted(range(COUNT), key=lambda rollout_id: rollout_id * 7 % COUNT)


def test_the_same_events_lead_to_the_same_state(tmp_path: Path) -> None:
    ready, delayed = _lives(tmp_path, 1)
    assert ready == [i for i in reversed(_order()) if i % 4], "the last one taken goes first"
    assert (ready, delayed) == _lives(tmp_path, 2)
    assert len({until for until, _ in delayed}) == COUNT // 4, "they do not come back together"
