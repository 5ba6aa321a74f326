"""Reads the state back from the control log: all that is unfinished at start, single groups later.

The work goes with what is unfinished, not with what was ever done. Which workers hold an attempt is
not in the log: they say it in their `hello`, within `WORKER_GRACE_S` of the start (`Core`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from prorl.config import RunConfig, parse
from prorl.control import TrajectorySummary
from prorl.errors import SchemaError
from prorl.service.core.lifecycle import EventKind, RolloutLife
from prorl.service.core.state import (
    IN_HAND,
    NO_TRAJECTORY,
    GroupMembers,
    GroupOutcome,
    GroupRecord,
    RolloutRecord,
    RunCommits,
    RunDelivery,
    RunGrants,
    RunLife,
    RunRecord,
    RunWeightsState,
    State,
    StoredRow,
)
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.types import FailureCode, GroupState, RolloutState

_GROUPS = f"SELECT {', '.join(sql.GROUP_COLUMNS)} FROM groups WHERE run_id = ?"
_ROLLOUTS = f"SELECT {', '.join(sql.ROLLOUT_COLUMNS)} FROM rollouts WHERE run_id = ?"
# Without statistics SQLite would rather walk all groups of the run than a partial index.
_STARTED = (
    f"SELECT {', '.join(sql.GROUP_COLUMNS)} FROM groups INDEXED BY groups_started"
    " WHERE run_id = ? AND state = 'open' AND opened = 1 ORDER BY group_id"
)
_POOL_END = (
    "(SELECT group_id FROM groups INDEXED BY groups_pooled"
    " WHERE run_id = ? AND state = 'open' AND opened = 0 ORDER BY group_id {} LIMIT 1)"
)
_POOL_ENDS = f"SELECT {_POOL_END.format('ASC')}, {_POOL_END.format('DESC')}"
_WAITING = (
    f"SELECT {', '.join(sql.GROUP_COLUMNS)} FROM groups INDEXED BY groups_pooled"
    " WHERE run_id = ? AND group_id >= ? AND group_id < ? AND state = 'open' AND opened = 0"
    " ORDER BY group_id"
)
_RUNS = f"SELECT {', '.join(sql.RUN_COLUMNS)} FROM runs"
_CURSORS = "SELECT consumer, seq FROM cursors WHERE run_id = ?"
_UNPUBLISHED = (
    "SELECT part, commit_seq FROM parts INDEXED BY parts_unpublished"
    " WHERE run_id = ? AND published = 0"
)
_SERVED = "SELECT version, note FROM versions WHERE run_id = ? AND (published OR version = 0)"
"""The query for what a run published, and what served when it began."""
_KEYED = (
    f"SELECT {', '.join(sql.GROUP_COLUMNS)} FROM groups INDEXED BY groups_key"
    " WHERE run_id = ? AND key IN ({})"
)
_STATES = {state.value: state for state in RolloutState}
_CODES = {code.value: code for code in FailureCode}
_GROUP_ID = sql.ROLLOUT_COLUMNS.index("group_id")
_IN_GROUP = " AND rollout_id >= ? AND rollout_id < ? ORDER BY rollout_id"


def load(
    log: ControlLog, state: State, now: float, refusal_of: Callable[[str], str] = lambda run_id: ""
) -> list[RolloutRecord]:
    """Fill `state` with every run of the log that is not over. Returns the rollouts whose attempts
    are in somebody's hands. A run that `refusal_of` gives a reason for, or whose config cannot be
    read, is passed over: `State.refused`.
    """
    state.num_commits = log.read("SELECT count(*) FROM parts")[0][0]
    for values in log.read(f"{_RUNS} INDEXED BY runs_wanted WHERE wanted = 1 ORDER BY created_at"):
        run_id = values[sql.RUN_COLUMNS.index("run_id")]
        if reason := refusal_of(run_id):
            state.refused[run_id] = reason
        else:
            _add_run(log, state, values, now)
    in_hand = [
        r for run in state.open.values() for r in run.rollouts.values() if r.life.state in IN_HAND
    ]
    for record in in_hand:
        if record.backend:
            state.balancer.assign(record, record.backend)
    return in_hand


def find_run(log: ControlLog, state: State, run_id: str) -> RunRecord | None:
    """None for a run that is unknown, or refused."""
    if run_id in state.refused:
        return None
    if run_id in state.runs:
        return state.runs[run_id]
    rows = log.read(f"{_RUNS} WHERE run_id = ?", (run_id,))
    return _add_run(log, state, rows[0], 0.0) if rows else None


def closed_runs(log: ControlLog) -> list[RunRecord]:
    """Returns what the log says of runs that are over: their counts, without what they hold."""
    runs = []
    for values in log.read(f"{_RUNS} WHERE state <> 'open' ORDER BY created_at"):
        fields = dict(zip(sql.RUN_COLUMNS, values, strict=True))
        config = RunConfig.model_construct(run_id=fields["run_id"])
        run = RunRecord(config=config, created_at=fields["created_at"], life=_life(fields))
        run.restore(fields["counters"])
        runs.append(run)
    return runs


def _add_run(
    log: ControlLog, state: State, values: tuple[Any, ...], now: float
) -> RunRecord | None:
    fields = dict(zip(sql.RUN_COLUMNS, values, strict=True))
    try:
        config = parse(RunConfig, orjson.loads(fields["config"]), f"run {fields['run_id']}")
    except ValueError as error:
        problem = SchemaError(
            str(error), "a run config of this version", "read it with the prorl that wrote it"
        )
        state.refused[fields["run_id"]] = str(problem)
        return None
    run_id = (config.run_id,)
    versions = log.read(_SERVED, run_id)
    run = RunRecord(
        config=config,
        created_at=fields["created_at"],
        life=_life(fields),
        grants=RunGrants(granted_at=now),
        delivery=RunDelivery(cursors=dict(log.read(_CURSORS, run_id))),
        commits=RunCommits(parts=dict(log.read(_UNPUBLISHED, run_id))),
        weights=RunWeightsState(
            published=any(version and note for version, note in versions),
            announced=any(note == sql.ANNOUNCED for _, note in versions),
            start=next((tuple(note.split()) for version, note in versions if version == 0), ()),
        ),
    )
    state.add(run)
    if fields["counters"]:
        run.restore(fields["counters"])
    if run.life.state == "open":
        _live(log, run, now)
    return run


def load_group(
    log: ControlLog, run: RunRecord, group_id: int, now: float = 0.0
) -> GroupRecord | None:
    """A group that memory has forgotten. The caller decides whether it becomes live again."""
    rows = log.read(f"{_GROUPS} AND group_id = ?", (run.run_id, group_id))
    return _members(log, _group(run, rows[0]), now) if rows else None


def load_groups(
    log: ControlLog, run: RunRecord, first: int, count: int, now: float
) -> list[GroupRecord]:
    """A group, and those of the `count` ids from it on that wait to be started, in order."""
    rows = log.read(_WAITING, (run.run_id, first, first + count))
    groups = {group.group_id: group for group in (_group(run, values) for values in rows)}
    if first not in groups:
        head = load_group(log, run, first, now)
        return [] if head is None else [head]
    last = groups[max(groups)]
    span = (run.run_id, groups[first].first_rollout, last.first_rollout + last.n)
    for values in log.read(_ROLLOUTS + _IN_GROUP, span):
        if (group := groups.get(values[_GROUP_ID])) is not None:
            _add_rollout(group, values, now)
    return list(groups.values())


def load_keys(log: ControlLog, run: RunRecord, keys: Sequence[str]) -> list[GroupRecord]:
    """Loads groups by a request's keys, fewer than SQLite takes parameters (32,766)."""
    rows = log.read(_KEYED.format(", ".join("?" * len(keys))), (run.run_id, *keys)) if keys else []
    return [_members(log, _group(run, values), 0.0) for values in rows]


def load_rollout(log: ControlLog, run: RunRecord, rollout_id: int) -> RolloutRecord | None:
    rows = log.read(
        "SELECT group_id FROM rollouts WHERE run_id = ? AND rollout_id = ?",
        (run.run_id, rollout_id),
    )
    group = load_group(log, run, rows[0][0]) if rows else None
    return next((r for r in group.rollouts if r.rollout_id == rollout_id), None) if group else None


def _life(values: dict[str, Any]) -> RunLife:
    return RunLife(
        state=values["state"],
        last=bool(values["last"]),
        cancelled=bool(values["cancelled"]),
        started_at=values["started_at"],
        finished_at=values["finished_at"],
    )


def _live(log: ControlLog, run: RunRecord, now: float) -> None:
    for values in log.read(_STARTED, (run.run_id,)):
        group = _members(log, _group(run, values), now)
        run.add(group)
        run.queues.add_members(r for r in group.rollouts if r.life.state is RolloutState.QUEUED)
    first, last = log.read(_POOL_ENDS, (run.run_id, run.run_id))[0]
    if first is not None:
        run.queues.add_groups(first, last + 1, now)
    pool_end = run.pool_end(run.demand)
    if pool_end is not None and pool_end.kind is EventKind.CANCEL:  # its end was cut short
        run.queues.end(run.groups.values(), pool_end.code)


def _members(log: ControlLog, group: GroupRecord, now: float) -> GroupRecord:
    first, end = group.first_rollout, group.first_rollout + group.n
    for values in log.read(_ROLLOUTS + _IN_GROUP, (group.run.run_id, first, end)):
        _add_rollout(group, values, now)
    return group


def _group(run: RunRecord, values: tuple[Any, ...]) -> GroupRecord:
    fields = dict(zip(sql.GROUP_COLUMNS, values, strict=True))
    facts = {name: fields[name] for name in sql.GROUP_FACTS}
    return GroupRecord(
        run=run,
        **facts,
        members=GroupMembers(opened=bool(fields["opened"])),
        decision=GroupOutcome(
            state=GroupState(fields["state"]),
            reason=fields["reason"],
            num_valid=fields["num_valid"],
            mean_reward=fields["mean_reward"],
            min_version=fields["min_version"],
            delivery_seq=fields["delivery_seq"],
        ),
    )


def _add_rollout(group: GroupRecord, values: tuple[Any, ...], now: float) -> None:
    _, rollout_id, _, sample_index, state, attempt, infra_failures, losses, *rest = values
    code, cancel_code, message, backend, reward, part, *summary = rest
    limits = group.run.config.limits
    life = RolloutLife(
        state=_STATES[state],
        attempt=attempt,
        infra_failures=infra_failures,
        worker_losses=losses,
        code=_CODES[code],
        cancel_code=_CODES[cancel_code],
        max_attempts=limits.max_attempts,
        max_worker_losses=limits.max_worker_losses,
    )
    counts = TrajectorySummary(**dict(zip(sql.SUMMARY_COLUMNS, summary, strict=True)))
    record = RolloutRecord(
        group=group,
        rollout_id=rollout_id,
        sample_index=sample_index,
        life=life,
        message=message,
        backend=backend,
        stored=StoredRow(part, reward, counts if part else NO_TRAJECTORY),
        since=now,
        lease_confirmed=True,
    )
    group.add(record)
