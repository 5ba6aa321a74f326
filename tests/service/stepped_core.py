"""A gateway's core over a log, moved by hand: its time, its workers, its transactions."""

from __future__ import annotations

from collections.abc import Iterable

from prorl.control import CommitPart, Committed, CommittedRollout, ControlRow, Hello
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.core.changes import LogBatch
from prorl.service.core.core import Core
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord, WorkerRecord
from prorl.service.log.log import ControlLog
from prorl.types import Json


class SteppedCore:
    """Workers are called as their roles; what is granted goes to `init`, if it is there."""

    def __init__(self, log: ControlLog, now: float = 0.0, **core: Json) -> None:
        self.log, self.now, self._more, self._parts = log, now, core, 0
        self.restart()

    def restart(self) -> None:
        """The next incarnation of the gateway: pending changes are lost."""
        self.core = Core(
            self.log, ["scripted:oracle"], lambda: self.now, lambda: self.now, **self._more
        )

    @property
    def run(self) -> RunRecord:
        return self.core.run("r")

    def come(self, *roles: str) -> list[WorkerRecord]:
        hellos = [
            Hello(worker=role, roles={role: 1}, schema_version=SCHEMA_VERSION) for role in roles
        ]
        return [self.core.workers.hello(1, ControlRow.of(hello)) for hello in hellos]

    def write(self) -> LogBatch:
        """A transaction, and what waited for it."""
        batch = self.core.changes.take()
        self.log.write_now(batch.writes)
        self.core.note_durable(batch)
        init = self.core.state.workers.get("init")
        if init is not None:
            for record, _ in batch.granted:
                self.core.rollouts.add_holder(record, init, "init")
        return batch

    def submit(self, *bodies: GroupBody, run: RunRecord | None = None) -> list[GroupRecord]:
        """Accept groups, durably."""
        run, acceptance = run or self.run, self.core.acceptance
        checked = acceptance.check(run, bodies, {})
        acceptance.check_room(run, checked)
        accepted = acceptance.groups(run, checked)
        self.write()
        return [group for group, _ in accepted]

    def commit(self, records: Iterable[RolloutRecord], outbox_upto: int = 0) -> None:
        """Store attempts of one run with the reward 1."""
        records = list(records)
        self.core.commits.reserve(self.core.state.workers["store"], [r.key for r in records])
        rows = tuple(
            CommittedRollout(rollout_id=r.rollout_id, attempt=r.life.attempt, reward=1.0)
            for r in records
        )
        self._parts += 1
        part = CommitPart(part=f"p{self._parts}", rollouts=rows, outbox_upto=outbox_upto)
        assert isinstance(self.core.commits.commit(records[0].run, part), Committed)
