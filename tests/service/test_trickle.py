"""A day of a rollout a second, in virtual time: the gateway's memory is flat, its files are the
same, and nothing that has ended costs anything.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from prorl.control import Decision, KeptGroup
from prorl.service.core.watchdog import ProgressWatchdog
from prorl.service.log.log import CHECKPOINT_PAGES, ControlLog
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore
from tests.waiting import resident_bytes

MINUTES, A_MINUTE = 24 * 60, 60
PAGE_BYTES = 4096


class Day(SteppedCore):
    """One streaming run whose trainer keeps up; each minute brings sixty groups of one."""

    def __init__(self, log: ControlLog) -> None:
        super().__init__(log)
        self.watchdog = ProgressWatchdog(self.core.state, lambda: self.now)
        self.come("init", "run", "eval", "store")
        self.core.create_run(run_config(delivery="stream", max_uncommitted_groups=2 * A_MINUTE))

    def minute(self, number: int) -> None:
        """Sixty rollouts from their acceptance to their trainer's checkpoint."""
        core, run = self.core, self.run
        self.submit(*(group(f"{number}/{i}", key=f"k{number}/{i}") for i in range(A_MINUTE)))
        core.pump(A_MINUTE)
        self.write()
        records = list(run.rollouts.values())
        self.commit(records, run.outbox.end)
        core.commits.published(run, run.commits.next_commit - 1)
        self.write()
        groups = [record.group.group_id for record in records]
        core.groups.propose(run, [Decision(group_id=g, kept=True) for g in groups])
        core.groups.handout(run, [KeptGroup(g, 0) for g in groups])
        self.write()
        core.groups.cursor(run, "primary", run.delivery.next_delivery)
        self.write()
        self.now += 60.0
        core.sweep()
        self.watchdog.look("")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_day_of_a_rollout_a_second_leaves_no_trace_in_memory(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.db")
    day = Day(log)
    objects: list[int] = []
    resident: list[int] = []
    sizes: list[int] = []
    for number in range(MINUTES):
        day.minute(number)
        if number % 60 == 59:
            gc.collect()
            objects.append(len(gc.get_objects()))
            resident.append(resident_bytes())
            sizes.append((tmp_path / "control.db").stat().st_size)
            wal = (tmp_path / "control.db-wal").stat().st_size
            assert wal < 2 * CHECKPOINT_PAGES * PAGE_BYTES
            assert len(list(tmp_path.iterdir())) == 4, "log, its WAL, its index, its lock"
    assert day.run.delivery.next_delivery == day.run.delivery.committed == MINUTES * A_MINUTE
    assert (len(day.run.groups), len(day.run.rollouts), len(day.run.commits.parts)) == (0, 0, 0)
    assert day.run.stalled == ""
    print(f"objects at hours 2, 12, 24: {[objects[h - 1] for h in (2, 12, 24)]}")
    print(f"resident MB at hours 2, 12, 24: {[resident[h - 1] >> 20 for h in (2, 12, 24)]}")
    print(f"log MB at hours 12, 24: {[sizes[h - 1] >> 20 for h in (12, 24)]}")
    assert objects[23] - objects[1] < 1000
    # of the second half: a process in which hundreds of tests ran before has gaps that fill first
    assert resident[23] - resident[11] < 8 << 20
    assert sizes[23] < 2.2 * sizes[11], "the log grows with what happened, no faster"
    log.close()
