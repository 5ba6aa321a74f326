"""EVAL without inference: the stored artifacts of a run graded again, with other tests or code.

The same operator as in the service grades (`eval.py`): fresh sandboxes, the same tries, the same
classes of failure. Nothing of the run changes; what comes out is a table of `scores`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from prorl.env_settings import merge
from prorl.envs.users import GetEnv
from prorl.protocols import SandboxHost
from prorl.schema import RAN, SCORES
from prorl.schema.columns import ScoredColumns, artifact_digest
from prorl.schema.rows import Row
from prorl.stages.eval import EvalOperator
from prorl.storage.read.catalog import StoredRun
from prorl.task_json import task_from_json, task_to_json
from prorl.types import UNSCORED, FailureCode, Json, RolloutLimits, Task

_PLAYED_ROWS = (
    "select rollout_id, attempt, group_id, artifact, artifact_digest, failure_class, failure_code,"
    " failure_message, true as rescorable, coalesce(env_state, '') as env_state from rollouts"
    " where (status = 'completed' or num_turns > 0) and coalesce(rescorable, true)"
    " order by rollout_id"
)
"""Rollouts whose stored artifact can be graded again, those that EVAL could not score included.
"""
_IN_PLACE = "select count(*) from rollouts where not coalesce(rescorable, true)"
_COLUMNS = (
    "run_id",
    "rollout_id",
    "attempt",
    "task",
    "limits",
    "artifact",
    "env_state",
    "rescorable",
    "failure_class",
    "failure_code",
    "failure_message",
)
_ROW = pa.schema([RAN.field(name) for name in _COLUMNS])
"""The columns that EVAL reads of a row."""


def num_graded_in_place(stored: StoredRun) -> int:
    """Rollouts that cannot be graded again: the tests ran in the agent's own sandbox."""
    return int(stored.sql(_IN_PLACE).column(0)[0].as_py())


async def rescore(
    stored: StoredRun,
    name: str,
    host: SandboxHost,
    get_env: GetEnv,
    *,
    tasks: Mapping[str, Task] | None = None,
    env: str = "",
    settings: Mapping[str, Mapping[str, Json]] = MappingProxyType({}),
    eval_s: float = 120.0,
    concurrency: int = 4,
    provenance: str = "",
) -> pa.Table:
    """Scores of every rollout that was played to its end, in SCORES' shape, those included that
    EVAL could not score at the time, and without those of `num_graded_in_place`.

    `tasks` (by id) stand in for those that the run stored, `env` for theirs, and `settings` of an
    env for those that a stored task has of the same names.
    """
    operator = EvalOperator(host, get_env, is_cancelled=lambda key: False)
    room = asyncio.Semaphore(concurrency)

    async def score(row: dict[str, Json]) -> dict[str, Json]:
        received = Row(pa.RecordBatch.from_pylist([row], schema=_ROW), 0)
        async with room:
            return _score(name, row, await operator(received))

    rows = list(_rows_to_score(stored, dict(_tasks(stored, tasks or {}, env, settings)), eval_s))
    scores = await asyncio.gather(*map(score, (row for row in rows if "task" in row)))
    lost = [
        {
            **_key(name, row),
            "failure_code": FailureCode.EVAL_FAILED.value,
            "failure_message": row["reason"],
        }
        for row in rows
        if "task" not in row
    ]
    ordered = sorted([*scores, *lost], key=lambda row: int(row["rollout_id"]))
    return pa.Table.from_pylist(
        [{**row, "provenance": provenance} for row in ordered], schema=SCORES
    )


def _rows_to_score(
    stored: StoredRun, texts: Mapping[int, str], eval_s: float
) -> Iterator[dict[str, Any]]:
    """Rows for EVAL, with the tasks' `texts` by group; one that cannot be graded has no `task` but
    the reason.
    """
    limits = asdict(RolloutLimits(eval_s=eval_s))
    for row in stored.sql(_PLAYED_ROWS).to_pylist():
        base = {"run_id": stored.run_id, **row, "limits": limits}
        if row["failure_code"] in UNSCORED:  # EVAL's failure, not RUN's
            base |= {"failure_class": "", "failure_code": "", "failure_message": ""}
        if row["artifact_digest"] and artifact_digest(row["artifact"]) != row["artifact_digest"]:
            yield {**base, "reason": "the artifact was too large to be stored"}
        else:
            yield {**base, "task": texts[row["group_id"]]}


def _tasks(
    stored: StoredRun,
    tasks: Mapping[str, Task],
    env: str,
    settings: Mapping[str, Mapping[str, Json]],
) -> Iterable[tuple[int, str]]:
    for row in stored.read("tasks", ["group_id", "task"]).to_pylist():
        task = task_from_json(row["task"])
        if task.task_id in tasks:
            task = tasks[task.task_id]
        else:
            task = merge(replace(task, env=env or task.env), settings, above=True)
        yield row["group_id"], task_to_json(task)


def _key(name: str, row: Mapping[str, Json]) -> dict[str, Json]:
    return {"score": name, **{key: row[key] for key in ("run_id", "rollout_id", "attempt")}}


def _score(name: str, row: Mapping[str, Json], added: Any) -> dict[str, Json]:
    assert isinstance(added, ScoredColumns)
    return {
        **_key(name, row),
        "reward": added.reward if added.scored else None,
        "reward_parts": added.reward_parts,
        "failure_code": added.eval_failure_code,
        "failure_message": added.eval_failure_message,
        "grader_log": added.grader_log,
        "eval_s": added.eval_s,
    }
