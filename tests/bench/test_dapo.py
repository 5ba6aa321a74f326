"""The policies behind `prorl bench dapo`, where the answer is known."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path

import pytest

from prorl.bench.dapo_model import (
    Outcome,
    Setup,
    Workload,
    _memory,
    _VirtualService,
    batch_then_filter,
    prime_rl,
    refill_within_step,
    serve,
)

EASY = Setup(slots=8, step=2, steps=2, train_s=5.0)


@pytest.fixture
def work(tmp_path: Path) -> Workload:
    """Every second group teaches nothing; each member takes 10 s."""
    rows = [{"rewards": [1.0, kind], "seconds": [10.0, 10.0]} for kind in (0.0, 1.0)]
    (tmp_path / "work").write_text("\n".join(map(json.dumps, rows)))
    return Workload(n=2, file=tmp_path / "work")


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (batch_then_filter, 2 * (10 + 10 + 5)),
        (lambda w, s: batch_then_filter(w, s, 3), 2 * (20 + 5)),
        (refill_within_step, 2 * (10 + 5)),
        (prime_rl, 10 + 10 + 10 + 10 + 5),
        (serve, 10 + 10 + 5),
    ],
)
def test_a_policy_takes_what_can_be_counted_by_hand(
    policy: object, seconds: float, work: Workload
) -> None:
    outcome = policy(work, EASY)  # type: ignore[operator]
    assert isinstance(outcome, Outcome)
    assert (outcome.seconds, outcome.trained) == (seconds, 8)


def test_ours_wastes_less_and_is_faster_where_rollouts_have_tails() -> None:
    work, setup = Workload(n=4), Setup(slots=32, step=8, steps=3)
    ours, refill = serve(work, setup), refill_within_step(work, setup)
    assert refill.seconds > 1.3 * ours.seconds
    assert batch_then_filter(work, setup).seconds > 2 * ours.seconds
    assert ours.wasted < 0.5 * refill.wasted


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("train_s", [6.0, 60.0, 600.0])
def test_two_hundred_steps_leave_nothing_in_memory(train_s: float) -> None:
    """A trainer ten times faster, as fast and ten times slower than rollouts come."""
    objects, groups = list[int](), list[int]()

    class Watched(_VirtualService):
        def _train(self) -> None:
            super()._train()
            self.load._drawn.clear()
            if self.stepped % 20 == 0:
                gc.collect()
                objects.append(len(gc.get_objects()))
                groups.append(len(self.run.groups))

    setup = Setup(slots=64, step=8, steps=200, train_s=train_s)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        Watched(Path(folder), Workload(seed=5, n=4), setup, {}).work()
    print(f"train_s {train_s:g}: {objects[0]:,} ... {objects[-1]:,} objects, groups {groups}")
    assert max(groups) <= 4 * setup.step, "max_open_groups"
    assert max(objects[5:]) < 1.02 * max(objects[:5])
