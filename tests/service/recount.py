"""A run's counts from its rows, all of them: what its counters must say (`RunRecord.counters`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prorl.service.core.state import RunRecord
from prorl.service.log.log import ControlLog

_FROM_GROUPS = "FROM groups WHERE run_id = ?"
_FROM_ROLLOUTS = "FROM rollouts WHERE run_id = ?"

_COUNTS: Mapping[str, str] = {
    "accepted.next_group": f"SELECT coalesce(max(group_id) + 1, 0) {_FROM_GROUPS}",
    "accepted.next_rollout": f"SELECT coalesce(max(rollout_id) + 1, 0) {_FROM_ROLLOUTS}",
    "accepted.group_size": f"SELECT coalesce(max(n), 1) {_FROM_GROUPS}",
    "progress.num_started": f"SELECT count(*) {_FROM_GROUPS} AND opened",
    "commits.next_commit": "SELECT coalesce(max(commit_seq) + 1, 1) FROM parts WHERE run_id = ?",
    "commits.num_rows": f"SELECT count(*) {_FROM_ROLLOUTS} AND part <> ''",
    "commits.num_rewards": f"SELECT count(reward) {_FROM_ROLLOUTS}",
    "commits.reward_sum": f"SELECT total(reward) {_FROM_ROLLOUTS}",
    "delivery.next_delivery": f"SELECT coalesce(max(delivery_seq) + 1, 0) {_FROM_GROUPS}",
    "delivery.committed": f"SELECT coalesce(max(delivery_seq) + 1, 0) {_FROM_GROUPS}"
    " AND state = 'committed'",
    "delivery.waiting": f"SELECT count(*) {_FROM_GROUPS} AND state = 'kept'",
    "delivery.kept": f"SELECT count(*) {_FROM_GROUPS}"
    " AND state IN ('kept', 'delivered', 'committed')",
    "weights.version": "SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ?"
    " AND published",
    "weights.allocated_version": "SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ?",
}
"""Counts of a RunRecord, by record and name, and the statement that gives the number."""

_STATES: Mapping[str, str] = {
    "progress": f"SELECT state, count(*) {_FROM_ROLLOUTS} AND state <> 'queued' GROUP BY state",
    "decisions": f"SELECT state, count(*) {_FROM_GROUPS} AND state <> 'open' GROUP BY state",
}


def recount(log: ControlLog, run: RunRecord) -> None:
    for place, statement in _COUNTS.items():
        part, name = place.split(".")
        setattr(getattr(run, part), name, log.read(statement, (run.run_id,))[0][0])
    for part, statement in _STATES.items():
        getattr(run, part).states = Counter(dict(log.read(statement, (run.run_id,))))
