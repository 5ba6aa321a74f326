"""A run's counts from its rows, all of them: what its counters must say (`RunRecord.counters`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prorl.service.core.state import RunRecord
from prorl.service.log.log import ControlLog

_FROM_GROUPS = "FROM groups WHERE run_id = ?"
_FROM_ROLLOUTS = "FROM rollouts WHERE run_id = ?"

_COUNTS: Mapping[str, str] = {
    "next_group": f"SELECT coalesce(max(group_id) + 1, 0) {_FROM_GROUPS}",
    "next_rollout": f"SELECT coalesce(max(rollout_id) + 1, 0) {_FROM_ROLLOUTS}",
    "next_commit": "SELECT coalesce(max(commit_seq) + 1, 1) FROM parts WHERE run_id = ?",
    "next_delivery": f"SELECT coalesce(max(delivery_seq) + 1, 0) {_FROM_GROUPS}",
    "acked": f"SELECT coalesce(max(delivery_seq) + 1, 0) {_FROM_GROUPS} AND state = 'acked'",
    "version": "SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ? AND published",
    "given_version": "SELECT coalesce(max(version), 0) FROM versions WHERE run_id = ?",
    "unstored": f"SELECT count(*) {_FROM_ROLLOUTS} AND part = ''",
    "group_size": f"SELECT coalesce(max(n), 1) {_FROM_GROUPS}",
    "open_groups": f"SELECT count(*) {_FROM_GROUPS} AND state = 'open' AND opened",
}
"""Counts of a RunRecord by the one number that a statement gives."""


def recount(log: ControlLog, run: RunRecord) -> None:
    asked = (run.run_id,)
    for name, statement in _COUNTS.items():
        setattr(run.record_of(name), name, log.read(statement, asked)[0][0])
    states = dict(log.read(f"SELECT state, count(*) {_FROM_GROUPS} GROUP BY state", asked))
    run.group_states = Counter(states)
    run.undecided, run.delivery.waiting = states.get("open", 0), states.get("kept", 0)
    run.delivery.kept = run.delivery.waiting + states.get("delivered", 0) + states.get("acked", 0)
    rollouts = log.read(f"SELECT state, count(*) {_FROM_ROLLOUTS} GROUP BY state", asked)
    run.rollout_states = Counter(dict(rollouts))
    run.num_rewards, run.reward_sum = log.read(
        f"SELECT count(reward), total(reward) {_FROM_ROLLOUTS}", asked
    )[0]
