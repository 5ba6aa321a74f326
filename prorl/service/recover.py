"""From the control log back to memory: whole at start, single groups later.

Rebuilt from the log alone; what the log cannot know (who holds an attempt) comes from the workers'
`hello` within `RECOVERY_GRACE_S`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson

from prorl.config import RunConfig, parse
from prorl.control import TrajectorySummary
from prorl.errors import SchemaError
from prorl.service import log_schema as sql
from prorl.service.lifecycle import RolloutLife
from prorl.service.log import ControlLog
from prorl.service.state import GroupRecord, RolloutRecord, RunRecord, State
from prorl.types import FailureCode, GroupState, RolloutState

_GROUPS = f"SELECT {', '.join(sql.GROUP_COLUMNS)} FROM groups WHERE run_id = ?"
_ROLLOUTS = f"SELECT {', '.join(sql.ROLLOUT_COLUMNS)} FROM rollouts WHERE run_id = ?"
_LIVE = """
    AND (state = 'open' OR group_id >= ?
        OR group_id IN (SELECT group_id FROM rollouts WHERE run_id = ? AND part = ''))
    ORDER BY group_id
"""
_IN_GROUP = " AND rollout_id >= ? AND rollout_id < ? ORDER BY rollout_id"


def load(log: ControlLog, state: State, now: float) -> list[RolloutRecord]:
    """Fill `state` with every run of the log.

    Returns the rollouts whose attempts are in somebody's hands.
    """
    for values in log.read(f"SELECT {', '.join(sql.RUN_COLUMNS)} FROM runs ORDER BY created_at"):
        run = _run(dict(zip(sql.RUN_COLUMNS, values, strict=True)))
        state.runs[run.run_id] = run
        _counters(log, run)
        if run.state == "open":
            _live(log, run, now)
    in_hand = [r for run in state.runs.values() for r in run.rollouts.values() if _has_attempt(r)]
    for record in in_hand:
        if record.backend:
            state.balancer.assign((record.run.run_id, record.rollout_id), record.backend)
    return in_hand


def load_group(log: ControlLog, run: RunRecord, group_id: int) -> GroupRecord | None:
    """A group that memory has forgotten. The caller decides whether it becomes live again."""
    rows = log.read(f"{_GROUPS} AND group_id = ?", (run.run_id, group_id))
    if not rows:
        return None
    group = _group(run, rows[0])
    for values in log.read(
        _ROLLOUTS + _IN_GROUP, (run.run_id, group.first_rollout, group.first_rollout + group.n)
    ):
        _add_rollout(group, values, 0.0)
    return group


def load_key(log: ControlLog, run: RunRecord, key: str) -> GroupRecord | None:
    """A forgotten group by its key."""
    rows = log.read("SELECT group_id FROM groups WHERE run_id = ? AND key = ?", (run.run_id, key))
    return load_group(log, run, rows[0][0]) if rows else None


def load_rollout(log: ControlLog, run: RunRecord, rollout_id: int) -> RolloutRecord | None:
    """A rollout of a forgotten group."""
    rows = log.read(
        "SELECT group_id FROM rollouts WHERE run_id = ? AND rollout_id = ?",
        (run.run_id, rollout_id),
    )
    group = load_group(log, run, rows[0][0]) if rows else None
    return next((r for r in group.rollouts if r.rollout_id == rollout_id), None) if group else None


def _has_attempt(record: RolloutRecord) -> bool:
    return record.life.state in (RolloutState.LEASED, RolloutState.RUNNING, RolloutState.RESERVED)


def _run(values: dict[str, Any]) -> RunRecord:
    try:
        config = parse(RunConfig, orjson.loads(values["config"]), f"run {values['run_id']}")
    except ValueError as error:
        raise SchemaError(
            str(error), "a run config of this version", "upgrade prorl to read it"
        ) from None
    return RunRecord(
        config=config,
        digest=values["digest"],
        created_at=values["created_at"],
        state=values["state"],
        last=bool(values["last"]),
        cancelled=bool(values["cancelled"]),
        started_at=values["started_at"],
        finished_at=values["finished_at"],
        tasks_stored=values["tasks_stored"],
        events_stored=values["events_stored"],
    )


def _counters(log: ControlLog, run: RunRecord) -> None:
    def one(statement: str) -> Any:
        return log.read(statement, (run.run_id,))[0][0]

    run.next_group = one("SELECT coalesce(max(group_id) + 1, 0) FROM groups WHERE run_id = ?")
    run.next_rollout = one("SELECT coalesce(max(rollout_id) + 1, 0) FROM rollouts WHERE run_id = ?")
    run.next_commit = one("SELECT coalesce(max(commit_seq) + 1, 1) FROM parts WHERE run_id = ?")
    run.next_event = one(
        "SELECT coalesce(max(event_seq) + 1, 0) FROM group_events WHERE run_id = ?"
    )
    run.next_delivery = one(
        "SELECT coalesce(max(delivery_seq) + 1, 0) FROM groups WHERE run_id = ?"
    )
    run.acked = one(
        "SELECT coalesce(max(delivery_seq) + 1, 0) FROM groups WHERE run_id = ? AND state = 'acked'"
    )
    run.version = one(
        "SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ? AND published"
    )
    run.given_version = one("SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ?")
    run.unstored = one("SELECT count(*) FROM rollouts WHERE run_id = ? AND part = ''")
    run.cursors = dict(
        log.read("SELECT consumer, seq FROM cursors WHERE run_id = ?", (run.run_id,))
    )
    run.parts = dict(
        log.read(
            "SELECT part, commit_seq FROM parts WHERE run_id = ? AND NOT published", (run.run_id,)
        )
    )
    states = dict(
        log.read(
            "SELECT state, count(*) FROM groups WHERE run_id = ? GROUP BY state", (run.run_id,)
        )
    )
    run.group_states = Counter(states)
    run.undecided, run.waiting = states.get("open", 0), states.get("kept", 0)
    run.kept = run.waiting + states.get("delivered", 0) + states.get("acked", 0)
    run.open_groups = one(
        "SELECT count(*) FROM groups WHERE run_id = ? AND state = 'open' AND opened"
    )
    run.rollout_states = Counter(
        dict(
            log.read(
                "SELECT state, count(*) FROM rollouts WHERE run_id = ? GROUP BY state",
                (run.run_id,),
            )
        )
    )
    run.num_rewards, run.reward_sum = log.read(
        "SELECT count(reward), total(reward) FROM rollouts WHERE run_id = ?", (run.run_id,)
    )[0]


def _live(log: ControlLog, run: RunRecord, now: float) -> None:
    groups = {
        values[1]: _group(run, values)
        for values in log.read(_GROUPS + _LIVE, (run.run_id, run.tasks_stored, run.run_id))
    }
    if groups:
        for values in log.read(
            f"{_ROLLOUTS} AND group_id >= ? ORDER BY rollout_id", (run.run_id, min(groups))
        ):
            if values[2] in groups:
                _add_rollout(groups[values[2]], values, now)
    for group in groups.values():
        run.add(group)
        if group.state is not GroupState.OPEN:
            continue
        if not group.opened:
            run.pool.append(group)
        else:
            run.ready.extend(r for r in group.rollouts if r.life.state is RolloutState.QUEUED)
    run.granted_at = now


def _group(run: RunRecord, values: tuple[Any, ...]) -> GroupRecord:
    fields = dict(zip(sql.GROUP_COLUMNS, values, strict=True))
    del fields["run_id"]
    fields["state"] = GroupState(fields["state"])
    fields["opened"] = bool(fields["opened"])
    return GroupRecord(run=run, **fields)


def _add_rollout(group: GroupRecord, values: tuple[Any, ...], now: float) -> None:
    row = dict(zip(sql.ROLLOUT_COLUMNS, values, strict=True))
    limits = group.run.config.limits
    life = RolloutLife(
        state=RolloutState(row["state"]),
        attempt=row["attempt"],
        infra_failures=row["infra_failures"],
        worker_losses=row["worker_losses"],
        code=FailureCode(row["code"]),
        cancel_code=FailureCode(row["cancel_code"]),
        max_attempts=limits.max_attempts,
        max_worker_losses=limits.max_worker_losses,
    )
    record = RolloutRecord(
        group=group,
        rollout_id=row["rollout_id"],
        sample_index=row["sample_index"],
        life=life,
        message=row["message"],
        backend=row["backend"],
        reward=row["reward"],
        part=row["part"],
        summary=TrajectorySummary(**{name: row[name] for name in sql.SUMMARY_COLUMNS}),
        since=now,
        taken=True,
    )
    group.rollouts.append(record)
    group.pending += not life.state.terminal
