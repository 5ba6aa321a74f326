"""A run that does not move says why, within half a minute."""

from __future__ import annotations

import pytest

from prorl.control import ControlRow, Progress, Started
from prorl.service.core.watchdog import ProgressWatchdog
from prorl.service.log.log import ControlLog
from prorl.types import FailureCode
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore


class Clockwork(SteppedCore):
    def __init__(self, log: ControlLog) -> None:
        super().__init__(log)
        self.watchdog = ProgressWatchdog(self.core.state, lambda: self.now)
        self.core.create_run(run_config(delivery="stream", max_uncommitted_groups=1))

    def stalled(self, disk: str = "", seconds: float = 27.0) -> str:
        self.watchdog.look(disk)
        self.now += seconds
        self.watchdog.look(disk)
        return self.run.stalled


@pytest.fixture
def world(log: ControlLog) -> Clockwork:
    return Clockwork(log)


def test_each_thing_that_may_be_missing_is_named(world: Clockwork) -> None:
    world.submit(*map(group, "abc"))
    assert world.stalled(disk="the disk of /x is full") == "the disk of /x is full"
    assert world.stalled() == "no store worker is there"
    world.come("store", "run", "init")
    assert world.stalled() == "no eval worker is there"
    world.come("eval")
    assert world.stalled() == "3 rollouts are queued and no INIT slot is free"
    world.core.set_backend("scripted:oracle", "draining")
    assert world.stalled().startswith("3 rollouts are queued and no model server works for it")
    world.core.set_backend("scripted:oracle", "ready")
    world.core.pump(8)
    assert world.stalled().startswith("1 rollout waits in INIT: no sandbox is ready (an image")
    run = world.core.state.workers["run"]
    (record,) = [r for r in world.run.rollouts.values() if r.life.state == "leased"]
    row = ControlRow.of(Started(), stage="run", **record.key._asdict())
    world.core.control(run, row)
    assert world.stalled().startswith("1 rollout runs and none has ended a turn")


def test_what_moves_is_not_stuck(world: Clockwork) -> None:
    world.come("store", "run", "init", "eval")
    world.submit(group())
    world.core.pump(8)
    (record,) = world.run.rollouts.values()
    run = world.core.state.workers["run"]
    row = ControlRow.of(Started(), stage="run", **record.key._asdict())
    world.core.control(run, row)
    for turn in range(5):
        progress = ControlRow.of(Progress(turn=turn, tokens=9), stage="run", **record.key._asdict())
        world.core.control(run, progress)
        assert world.stalled(seconds=20.0) == ""
    assert world.stalled() != ""
    assert world.watchdog.look("") == [], "said once"
    world.core.control(run, progress)
    assert [run.stalled for run in world.watchdog.look("")] == [""]


def test_attempts_that_all_fail_alike_are_reported_until_an_attempt_succeeds(
    world: Clockwork,
) -> None:
    world.come("store", "run", "init", "eval")
    world.submit(group(n=8))
    world.core.pump(8)
    reports = []
    for number, record in enumerate(world.run.rollouts.values()):
        world.core.rollouts.failed(record, 1, "sandbox_start", f"image x{number}: no such thing")
        reports.append(bool(world.watchdog.look("")))
    assert reports == [False] * 4 + [True] + [False] * 3, "while it moves, and once"
    expected = "attempt after attempt fails with sandbox_start, the first: image x0: no such thing"
    assert world.run.stalled == expected
    world.run.progress.failed_attempts[FailureCode.RETURNED, ""] += 1  # as after a restart
    assert world.run.attempt_counts == {"returned": 1}, "no node is named where none is known"
    world.now += 60.0
    world.core.pump(8)
    (*others, last) = world.run.rollouts.values()
    for record in others:
        world.core.rollouts.failed(record, 2, "stage_error", "exit 3")
        world.watchdog.look("")
    assert world.run.stalled == "attempt after attempt fails with stage_error, the first: exit 3"
    world.commit([last])
    world.watchdog.look("")
    assert world.run.stalled == ""


def test_the_trouble_of_a_run_is_a_single_line_that_ends_as_the_traceback_does(
    world: Clockwork,
) -> None:
    world.come("store", "run", "init", "eval")
    world.submit(group(n=8))
    world.core.pump(8)
    traceback = "\n".join((*("  a frame, line 1" for _ in range(40)), "ImportError: no openai"))
    for record in world.run.rollouts.values():
        world.core.rollouts.failed(record, 1, "stage_error", f"it ended:\n{traceback}")
    world.watchdog.look("")
    assert "the first: it ended: a frame" in world.run.stalled
    assert world.run.stalled.endswith("ImportError: no openai")
    assert "\n" not in world.run.stalled
    assert len(world.run.stalled) < 400


def test_an_open_run_without_work_is_idle_until_it_gets_some(world: Clockwork) -> None:
    world.come("store", "run", "init", "eval")
    assert world.stalled() == "", "its submitter may submit in phases"
    assert world.run.idle == (
        "nothing was submitted and the run is open: submit tasks, the last ones with last=True"
    )
    assert world.watchdog.look("") == [], "said once"
    world.submit(group())
    assert (world.run.idle, world.run.stalled) == ("", ""), "before the next look"
    assert world.watchdog.look("") == [world.run], "a stream hears that it moves"
    world.run.accepted.next_rollout = 0
    world.run.decisions.states["dropped"] = 1
    assert world.stalled() == ""
    assert world.run.idle.startswith("all that was submitted has ended and the run is open")
    world.run.life.last = True
    world.watchdog.look("")
    assert world.run.idle == ""


def test_what_has_moved_is_not_called_stalled_until_the_next_look(world: Clockwork) -> None:
    world.submit(group())
    assert world.stalled() == "no store worker is there"
    world.run.progress.turns += 1
    assert world.run.stalled == ""


def test_a_filter_that_keeps_nothing_is_reported_while_the_run_moves(world: Clockwork) -> None:
    run, reasons = world.run, world.run.decisions.drop_reasons
    reasons["all_equal"] = 31
    assert world.stalled(seconds=0.0) == ""
    reasons["incomplete"] = 1
    expected = "none of 32 groups was kept (31 all_equal, 1 incomplete): take tasks of another"
    assert world.stalled(seconds=0.0).startswith(expected)
    run.delivery.kept = 1
    assert world.stalled(seconds=0.0) == ""
