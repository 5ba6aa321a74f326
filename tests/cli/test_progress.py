"""Progress is what the gateway answers, in words."""

from __future__ import annotations

import pytest

from prorl.cli.progress import ProgressDisplay, decided, figures, passed, waits_for
from prorl.types import Json, Stage


def _run(tokens: int = 0, state: str = "open", **counts: int) -> dict[str, Json]:
    loads = {"init": (0, 0), "run": (8, 5), "eval": (1, 0)}
    stages = {
        stage: {"busy": busy, "queued": queued, "tokens": tokens * (stage == "run")}
        for stage, (busy, queued) in loads.items()
    }
    return {"counts": counts, "stages": stages, "mean_reward": 0.5, "state": state}


def test_bars_count_rollouts_that_passed_each_stage() -> None:
    now = _run(queued=2, leased=1, running=12, completed=4, failed=1)
    assert [passed(now, stage) for stage in Stage] == [17, 5, 5]


def test_the_line_says_reward_rate_and_failures() -> None:
    assert figures(_run(failed=2), 1000.0) == "reward 0.500 · 1,000 sampled tokens/s · failed 2"


def test_off_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter((0.0, 0.0, 5.0, 10.0, 15.0, 16.0, 17.0))
    display = ProgressDisplay(clock=lambda: next(times))
    for tokens in (0, 500, 3000, 3000):
        display.update(_run(tokens, completed=3), 20, ("step 1",))
    for _ in range(2):  # a consumer has not read it all
        display.update(_run(3000, state="finished", completed=3), 20)
    display.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("   10 s  done 3/20 · in flight init 0 run 8 eval 1 · step 1 · reward")
    assert "300 sampled tokens/s" in first
    assert last.startswith("   16 s")


def test_rollouts_of_before_a_resume_do_not_count_as_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter((0.0, 1.0, 11.0, 21.0))
    display = ProgressDisplay(clock=lambda: next(times))
    for completed in (900, 920, 950):
        display.update(_run(completed=completed), 1000)
    first, second = capsys.readouterr().err.splitlines()
    assert " · 1.8 rollouts/s, about 44 s left" in first
    assert " · 2.4 rollouts/s, about 21 s left" in second


def test_kept_and_dropped_groups_and_the_waiting_reason_are_displayed() -> None:
    run = _run() | {
        "groups": {"kept": 2, "committed": 1, "dropped": 9},
        "dropped": {"all_equal": 7, "incomplete": 2},
    }
    assert decided(run) == "groups kept 3, dropped 9 (7 all_equal, 2 incomplete)"
    assert decided(_run()) == ""
    run["stages"]["run"]["slots"] = 8
    assert waits_for(run) == "waits for RUN: 8 slots, all busy"
    assert waits_for(run | {"stalled": "no backend is able"}) == "waits: no backend is able"
