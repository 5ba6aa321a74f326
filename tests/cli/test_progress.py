"""Progress is a pure function of what the gateway answers."""

from __future__ import annotations

import pytest

from prorl.cli.progress import (
    Progress,
    Snapshot,
    StageLoad,
    bottleneck,
    figures,
    plain,
    snapshot,
)
from prorl.types import Stage


def _snapshot(
    at_s: float = 0.0, *, finished: bool = False, tokens: int = 0, **states: int
) -> Snapshot:
    pools = {
        Stage.INIT: StageLoad(slots=4),
        Stage.RUN: StageLoad(slots=8, busy=8, queued=5, tokens=tokens),
        Stage.EVAL: StageLoad(slots=4, busy=1),
    }
    return Snapshot(
        at_s=at_s, total=20, states=states, mean_reward=0.5, pools=pools, finished=finished
    )


def test_the_bottleneck_is_the_busiest_stage_then_the_longest_queue() -> None:
    assert (
        bottleneck(
            {
                Stage.INIT: StageLoad(slots=4, busy=4, queued=9),
                Stage.RUN: StageLoad(slots=4, busy=4, queued=3),
            }
        )
        is Stage.INIT
    )
    assert (
        bottleneck(
            {
                Stage.INIT: StageLoad(slots=4, busy=1, queued=9),
                Stage.RUN: StageLoad(slots=4, busy=3),
            }
        )
        is Stage.RUN
    )
    assert bottleneck({Stage.INIT: StageLoad(slots=4, busy=1)}) is None
    assert bottleneck({}) is None


def test_bars_count_what_has_left_each_stage() -> None:
    now = _snapshot(queued=2, leased=1, running=12, completed=4, failed=1)
    assert (now.passed(Stage.INIT), now.passed(Stage.RUN), now.passed(Stage.EVAL)) == (17, 5, 5)
    assert now.ended == 5


def test_the_line_says_rate_reward_failures_and_bottleneck() -> None:
    line = figures(
        _snapshot(12.0, tokens=3000, completed=3, failed=2), _snapshot(10.0, tokens=1000)
    )
    assert (
        line
        == "reward 0.500 · 1,000 tokens/s · failed 2 · RUN is the bottleneck (100% busy, 5 queued)"
    )
    assert plain(_snapshot(12.0, completed=3), _snapshot(2.0), 2.0).startswith(
        "   10 s  done 3/20 · in flight init 0 run 8 eval 1 · "
    )


def test_off_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = Progress()
    for at_s in (0.0, 5.0, 10.0, 15.0):
        shown.update(_snapshot(at_s))
    shown.update(_snapshot(16.0, finished=True))
    shown.close()
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["10", "16"]


def test_a_snapshot_is_read_from_the_gateways_answer() -> None:
    gauges = {"slots": 8, "busy": 4, "queued": 2, "tokens": 15, "done": 1, "workers": 2}
    run = {
        "state": "open",
        "counts": {"queued": 3, "completed": 1},
        "reward_mean": None,
        "stages": {"run": gauges},
    }
    now = snapshot(run, 3, 0.0)
    assert now.pools == {Stage.RUN: StageLoad(slots=8, busy=4, queued=2, tokens=15)}
    assert (now.total, now.finished, now.ended) == (4, False, 1)
    assert snapshot({**run, "state": "cancelled"}, 3, 0.0).finished
