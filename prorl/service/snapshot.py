"""What a store that has just come must know of a run, read from the log: exactly what is durable,
nothing that is still in the journal.

Everything that happens after the snapshot's transaction reaches that store as messages, so nothing
is said twice and nothing is missed.
"""

from __future__ import annotations

from typing import Any

import orjson

from prorl.control import ControlRow, Kind
from prorl.service import log_schema as sql
from prorl.service import messages
from prorl.service.log import ControlLog
from prorl.service.recover import load_group
from prorl.service.state import ADOPTED, GroupRecord, RunRecord

_TERMINALS = """
    SELECT DISTINCT group_id FROM rollouts
    WHERE run_id = ? AND part = '' AND state IN ('failed', 'cancelled') ORDER BY group_id
"""
_COMPLETE = """
    SELECT group_id FROM groups g WHERE run_id = ? AND state = 'open' AND NOT EXISTS (
        SELECT 1 FROM rollouts r WHERE r.run_id = g.run_id AND r.rollout_id >= g.first_rollout
        AND r.rollout_id < g.first_rollout + g.n AND r.state NOT IN ('completed', 'failed', 'cancelled'))
    ORDER BY group_id
"""
_EVENTS = (
    f"SELECT {', '.join(sql.EVENT_COLUMNS)} FROM group_events WHERE run_id = ? AND event_seq >= ?"
    " ORDER BY event_seq"
)
_UNPUBLISHED = (
    "SELECT commit_seq, part, files FROM parts WHERE run_id = ? AND NOT published ORDER BY"
    " commit_seq"
)


def wanted(run: RunRecord) -> bool:
    """Whether a store has anything to do for the run: it is open, or its trainer has not read all
    of it. Never for an adopted one: it is served from its directory.
    """
    if run.state == ADOPTED:
        return False
    streaming = run.config.delivery == "stream" and (
        run.waiting > 0 or run.acked < run.next_delivery
    )
    return run.state == "open" or bool(run.parts) or run.events_stored < run.next_event or streaming


def run_snapshot(log: ControlLog, run: RunRecord, wall: float) -> list[ControlRow]:
    """The `run` row, followed by `rows` when the tasks that are not stored are many."""
    run_id = run.run_id

    def column(statement: str) -> list[Any]:
        return [row[0] for row in log.read(statement, (run_id,))]

    def groups(statement: str) -> list[GroupRecord]:
        return [
            group
            for group_id in column(statement)
            if (group := load_group(log, run, group_id)) is not None
        ]

    unstored = (
        f"SELECT group_id FROM groups WHERE run_id = ? AND group_id >= {int(run.tasks_stored)}"
        " ORDER BY group_id"
    )
    tasks = messages.table_rows(
        run, "tasks", (messages.task_row(group) for group in groups(unstored))
    )
    payload = {
        "run_id": run_id,
        "config": run.config.model_dump(mode="json"),
        "filter_sql": run.config.filter,
        "group_size": log.read(
            "SELECT coalesce(max(n), 1) FROM groups WHERE run_id = ?", (run_id,)
        )[0][0],
        "seed": run.config.seed,
        "state": run.state,
        "tasks": tasks[0].payload["rows"] if tasks else [],
        "unpublished": [
            {"commit_seq": seq, "part": part, "files": orjson.loads(files)}
            for seq, part, files in log.read(_UNPUBLISHED, (run_id,))
        ],
        "terminals": [
            _terminal(row) for group in groups(_TERMINALS) for row in _ended(group, wall)
        ],
        "complete": [_complete(messages.group_complete(group)) for group in groups(_COMPLETE)],
        "kept": column(
            "SELECT group_id FROM groups WHERE run_id = ? AND state = 'kept' ORDER BY group_id"
        ),
        "delivered": log.read(
            "SELECT group_id, delivery_seq FROM groups WHERE run_id = ? AND delivery_seq >= 0 ORDER"
            " BY delivery_seq",
            (run_id,),
        ),
        "group_events": [
            messages.event_row(values) for values in log.read(_EVENTS, (run_id, run.events_stored))
        ],
        "cursors": dict(log.read("SELECT consumer, seq FROM cursors WHERE run_id = ?", (run_id,))),
        "parts": column("SELECT part FROM parts WHERE run_id = ? ORDER BY commit_seq"),
    }
    return [ControlRow(kind=Kind.RUN, run_id=run_id, payload=payload), *tasks[1:]]


def _ended(group: GroupRecord, wall: float) -> list[ControlRow]:
    ended = [r for r in group.rollouts if not r.part and r.life.state in ("failed", "cancelled")]
    return [messages.terminal(record, wall) for record in ended]


def _terminal(row: ControlRow) -> dict[str, Any]:
    """A `terminal` row as a value: the payload and the ids that travel as columns otherwise."""
    return {"rollout_id": row.rollout_id, "group_id": row.group_id, **row.payload}


def _complete(row: ControlRow) -> dict[str, Any]:
    return {"group_id": row.group_id, **row.payload}
