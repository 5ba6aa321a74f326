"""What a store that has just come must know of a run, read from the log.

Exactly what is durable, nothing that is still in the journal. It says what is alive, however long
the run: what was handed out lies in the store's own files, but for the group events that are not
stored yet.

Everything that happens after the snapshot's transaction reaches that store as messages, so nothing
is said twice and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from prorl.control import ControlRow, PartFile, Rows, RunSnapshot, Terminal, Unpublished
from prorl.service import log_schema as sql
from prorl.service import messages
from prorl.service.log import ControlLog
from prorl.service.recover import load_group
from prorl.service.state import ADOPTED, GroupRecord, RolloutRecord, RunRecord

_TERMINALS = """
    SELECT DISTINCT group_id FROM rollouts INDEXED BY rollouts_ended
    WHERE run_id = ? AND part = '' AND state IN ('failed', 'cancelled') ORDER BY group_id
"""
_COMPLETE = """
    SELECT group_id FROM groups g INDEXED BY groups_started
    WHERE run_id = ? AND state = 'open' AND opened = 1 AND NOT EXISTS (
        SELECT 1 FROM rollouts r WHERE r.run_id = g.run_id AND r.rollout_id >= g.first_rollout
        AND r.rollout_id < g.first_rollout + g.n
        AND r.state NOT IN ('completed', 'failed', 'cancelled'))
    ORDER BY group_id
"""
_KEPT = (
    "SELECT group_id FROM groups INDEXED BY groups_kept WHERE run_id = ? AND state = 'kept'"
    " ORDER BY group_id"
)
_EVENTS = (
    f"SELECT {', '.join(sql.EVENT_COLUMNS)} FROM group_events WHERE run_id = ? AND event_seq >= ?"
    " ORDER BY event_seq"
)
_UNPUBLISHED = (
    "SELECT commit_seq, part, files FROM parts INDEXED BY parts_unpublished"
    " WHERE run_id = ? AND published = 0 ORDER BY commit_seq"
)

_DECIDED = (
    "SELECT group_id FROM group_events WHERE run_id = ? AND event_seq >= ? AND event_seq < ?"
    " AND event = 'decided' ORDER BY event_seq DESC"
)
_PAGE = 1000

_NUM_COMMITS = "SELECT coalesce(max(commit_seq), 0) FROM parts WHERE run_id = ?"


def wanted(run: RunRecord) -> bool:
    """Whether a store has anything to do for the run: it is open, or its trainer is behind.

    Never for an adopted one: it is served from its directory.
    """
    if run.state == ADOPTED:
        return False
    streaming = run.config.delivery == "stream" and (
        run.waiting > 0 or run.acked < run.next_delivery
    )
    return run.state == "open" or bool(run.parts) or run.events_stored < run.next_event or streaming


def run_snapshot(log: ControlLog, run: RunRecord, wall: float) -> list[ControlRow]:
    """The `run` row, followed by `rows` when the tasks that are not stored are many."""
    run_id, events = run.run_id, (run.run_id, run.events_stored)
    tasks = list(messages.task_chunks(_groups(log, run, _unstored(run))))
    snapshot = RunSnapshot(
        run_id=run_id,
        filter=run.config.filter,
        delivery=run.config.delivery,
        group_size=run.group_size,
        state=run.state,
        tasks=tasks[0] if tasks else (),
        unpublished=tuple(_unpublished(*row) for row in log.read(_UNPUBLISHED, (run_id,))),
        terminals=_terminals(log, run, wall),
        complete=tuple(messages.group_complete(group) for group in _groups(log, run, _COMPLETE)),
        kept=tuple(_as_decided(log, run, _column(log, run, _KEPT))),
        group_events=tuple(messages.event_row(values) for values in log.read(_EVENTS, events)),
        cursors=dict(log.read("SELECT consumer, seq FROM cursors WHERE run_id = ?", (run_id,))),
        num_commits=_column(log, run, _NUM_COMMITS)[0],
    )
    rest = [ControlRow.of(Rows(tasks=chunk), run_id=run_id) for chunk in tasks[1:]]
    return [ControlRow.of(snapshot, run_id=run_id), *rest]


def _column(log: ControlLog, run: RunRecord, statement: str) -> list[Any]:
    return [row[0] for row in log.read(statement, (run.run_id,))]


def _groups(log: ControlLog, run: RunRecord, statement: str) -> list[GroupRecord]:
    """The groups whose ids a statement gives."""
    found = (load_group(log, run, group_id) for group_id in _column(log, run, statement))
    return [group for group in found if group is not None]


def _terminals(log: ControlLog, run: RunRecord, wall: float) -> tuple[Terminal, ...]:
    """Rollouts that have ended without a trajectory, and are not stored yet."""
    return tuple(
        messages.terminal(record, wall)
        for group in _groups(log, run, _TERMINALS)
        for record in _ended(group)
    )


def _unstored(run: RunRecord) -> str:
    """Groups whose tasks the store has not said to be stored."""
    return (
        f"SELECT group_id FROM groups WHERE run_id = ? AND group_id >= {int(run.tasks_stored)}"
        " ORDER BY group_id"
    )


def _as_decided(log: ControlLog, run: RunRecord, kept: Collection[int]) -> list[int]:
    """Kept groups in the order of their decisions, which a store that has not died would keep.

    Read backwards in pages: what waits for its trainer was decided lately, however long the run.
    """
    missing, found, before = set(kept), list[int](), run.next_event
    while missing and before > 0:
        page = log.read(_DECIDED, (run.run_id, before - _PAGE, before))
        found += [group_id for (group_id,) in page if group_id in missing]
        missing.difference_update(found)
        before -= _PAGE
    return [*sorted(missing), *reversed(found)]


def _unpublished(commit_seq: int, part: str, files: str) -> Unpublished:
    found = msgspec.json.decode(files, type=tuple[PartFile, ...])
    return Unpublished(commit_seq=commit_seq, part=part, files=found)


def _ended(group: GroupRecord) -> list[RolloutRecord]:
    return [r for r in group.rollouts if not r.part and r.life.state in ("failed", "cancelled")]
