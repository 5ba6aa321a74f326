"""Accepts runs and groups: checks, identity, ids. What is accepted here reaches an end.

Identity. A group's key is the client's, else a hash of (run, group id): only a client's own key
makes a repeated submission the same one. The digest covers task, n, env and sampling: same key and
same digest give the current state, another digest is a conflict. Group and rollout ids are dense
per run, given here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import orjson

from prorl.config import RunConfig
from prorl.config.validation import differing
from prorl.errors import ConflictError, QueueFullError
from prorl.pluralize import pluralize
from prorl.service.core.candidates import (
    Candidate,
    GroupBody,
    candidate_of,
    digest,
)
from prorl.service.core.changes import Base, CorePart, group_row, rollout_row
from prorl.service.core.lifecycle import RolloutLife
from prorl.service.core.outbox import TASK
from prorl.service.core.recover import find_run, load_keys
from prorl.service.core.state import GroupRecord, RolloutRecord, RunGrants, RunRecord
from prorl.service.log import log_schema as sql


class Acceptance(CorePart):
    def __init__(self, base: Base, max_queued: int) -> None:
        super().__init__(base)
        self._max_queued = max_queued

    def run(self, config: RunConfig) -> bool:
        """Accept a run; False when it is there already. Raises ConflictError when it is there with
        another config.
        """
        if (existing := find_run(self._log, self._state, config.run_id)) is not None:
            check_same(existing.config, config)
            return False
        now = self._wall()
        grants = RunGrants(granted_at=self._clock())
        run = RunRecord(config=config, created_at=now, grants=grants)
        self._state.add(run)
        text = orjson.dumps(config.model_dump(mode="json")).decode()
        self._changes.insert(sql.INSERT_RUN, (run.run_id, text, now, "open", 0, 0, 0.0, 0.0, "", 1))
        self._changes.tell_run(run)
        return True

    def check(
        self,
        run: RunRecord,
        bodies: Sequence[GroupBody],
        seen: dict[str, str],
        first: int = 0,
    ) -> list[Candidate]:
        """Check groups before one is accepted. Raises TaskError that names the row, ConflictError.
        `seen` has the keys of earlier parts of the same batch, `first` is the place of `bodies[0]`
        in it.
        """
        candidates: list[Candidate] = []
        there = self._there(run, [body.key for body in bodies])
        default = orjson.dumps(asdict(run.config.sampling.params())).decode()
        for index, body in enumerate(bodies, first):
            where = f"groups[{index}] (task {body.task.task_id!r})"
            candidate = candidate_of(body, run.config, default, where)
            if key := candidate.key:
                existing = there.get(key)
                before = existing.digest if existing else seen.setdefault(key, candidate.digest)
                if before != candidate.digest:
                    raise used(key, where)
            candidates.append(candidate)
        return candidates

    def _there(self, run: RunRecord, keys: Iterable[str]) -> dict[str, GroupRecord]:
        groups = {key: run.keys[key] for key in keys if key in run.keys}
        if run.accepted.next_group == len(run.groups):
            return groups  # nothing was forgotten
        missing = [key for key in keys if key and key not in groups]
        return groups | {group.key: group for group in load_keys(self._log, run, missing)}

    def groups(
        self, run: RunRecord, candidates: Sequence[Candidate]
    ) -> list[tuple[GroupRecord, bool]]:
        """Accept groups in order; a known key gives the group that is there. Raises ConflictError
        when the run takes no more.
        """
        accepted: list[tuple[GroupRecord, bool]] = []
        there = self._there(run, [candidate.key for candidate in candidates])
        for candidate in candidates:
            existing = there.get(candidate.key) or run.keys.get(candidate.key)
            if existing is not None and existing.digest != candidate.digest:
                raise used(candidate.key)
            if existing is None:
                check_open(run)
            accepted.append((existing or self.add(run, candidate), existing is None))
        self._changes.urgent = True
        return accepted

    def check_room(self, run: RunRecord, candidates: Sequence[Candidate]) -> None:
        """Checks the room before a request is accepted. Raises QueueFullError when the service
        takes no more.
        """
        queued = sum(run.queued for run in self._state.open.values())
        num_new = sum(candidate.n for candidate in candidates)
        if queued + num_new <= self._max_queued:
            return
        there = self._there(run, [candidate.key for candidate in candidates])
        num_new = sum(candidate.n for candidate in candidates if candidate.key not in there)
        if num_new and queued + num_new > self._max_queued:
            raise QueueFullError(
                f"{pluralize(queued, 'rollout waits', 'rollouts wait')}, {num_new:,} more would"
                f" exceed {self._max_queued:,}; send them when some have ended, or raise"
                " `max_queued_rollouts`"
            )

    def add(self, run: RunRecord, candidate: Candidate) -> GroupRecord:
        now, group_id, limits = self._clock(), run.accepted.next_group, run.config.limits
        key = candidate.key or digest(b"group", run.run_id.encode(), str(group_id).encode())
        group = GroupRecord(
            run=run,
            group_id=group_id,
            first_rollout=run.accepted.next_rollout,
            accepted_at=self._wall(),
            **candidate._replace(key=key)._asdict(),
        )
        life = RolloutLife(
            max_attempts=limits.max_attempts, max_worker_losses=limits.max_worker_losses
        )
        for index in range(group.n):
            group.add(RolloutRecord(group, group.first_rollout + index, index, life, since=now))
        self._insert(group)
        run.add(group)
        run.queues.add_groups(group.group_id, group.group_id + 1, now)
        self.note_size(run, group.n)
        self._changes.evict_when_idle(group)
        self._changes.mark_run(run)
        run.accepted.next_group += 1
        run.accepted.next_rollout += group.n
        return group

    @staticmethod
    def note_size(run: RunRecord, size: int) -> None:
        """The run has, or will have, a group of this size."""
        run.accepted.group_size = max(run.accepted.group_size, size)

    def _insert(self, group: GroupRecord) -> None:
        run_id = group.run.run_id
        facts = (getattr(group, name) for name in sql.GROUP_FACTS)
        self._changes.insert(sql.INSERT_GROUP, (run_id, *facts, *group_row(group)))
        self._changes.append_outbox(group.run, TASK, group.group_id, None)
        for rollout in group.rollouts:
            identity = (run_id, rollout.rollout_id, group.group_id, rollout.sample_index)
            self._changes.insert(sql.INSERT_ROLLOUT, identity + rollout_row(rollout))


def check_open(run: RunRecord) -> None:
    """Raises ConflictError for a run that takes nothing new."""
    if run.life.last or run.life.state != "open":
        closed = "was told that no more groups will come"
        why = closed if run.life.state == "open" else f"is {run.life.state}"
        raise ConflictError(f"run {run.run_id!r} {why}", "an open run", "make another run")


def check_same(existing: RunConfig, config: RunConfig) -> None:
    """Raises ConflictError that names what differs, for a run of this name with another config."""
    before, other = existing.model_dump(mode="json"), config.model_dump(mode="json")
    if keys := ", ".join(differing(before, other)):
        problem = f"run {existing.run_id!r} exists with another config: other {keys}"
        hint = "choose another run_id, or send the config that it has"
        raise ConflictError(problem, "the same config", hint)


def used(key: str, where: str = "") -> ConflictError:
    """A key that stands for something else, here or in the same batch."""
    problem = f"key {key!r} was used for another task, n or sampling"
    problem = f"{where}: {problem}" if where else problem
    return ConflictError(problem, "the same content for the same key", "use another key")
