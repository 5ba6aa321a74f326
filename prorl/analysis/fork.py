"""Forks of stored rollouts: tasks that begin with the turns which a run has recorded.

    tasks = fork_tasks(StoredRun("prorl-runs/my-run"), turn=3)

Ids, logprobs, versions and temperatures come from `sequences`, what the tools said from `messages`;
nothing is rendered or encoded again. A rollout with fewer turns is continued after its last one.
Where a task was rolled out more than once, each fork is a task of its own, `TASK~ROLLOUT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from prorl.errors import UserError
from prorl.journal import Said
from prorl.journal.fork import Text, forked_task
from prorl.storage.read.catalog import StoredRun
from prorl.task_json import task_from_json
from prorl.types import Completion, FinishReason, PolicyVersion, SpanKind, Task

SELECT = "select rollout_id from rollouts where status = 'completed' order by rollout_id"

_ROLLOUTS = "select r.rollout_id, r.run_id, t.task from rollouts r join tasks t using (group_id)"
_SEQUENCES = "select * from sequences order by rollout_id, segment"
_TURNS = "select * from turns order by rollout_id, turn"
_TEXTS = (
    "select rollout_id, turn, content from messages where role = 'tool' order by rollout_id, index"
)


def fork_tasks(stored: StoredRun, turn: int, select: str = SELECT) -> Iterator[Task]:
    """A task for each rollout that `select` names by `rollout_id`, continued from `turn` on.

    Raises UserError for SQL without that column, or a turn below 0.
    """
    if turn < 0:
        raise UserError(f"turn {turn}", "0 or more: how many recorded turns a fork begins with")
    originals = _selected(stored, select)
    sequences, turns, texts = (
        _by_rollout(stored.sql(query)) for query in (_SEQUENCES, _TURNS, _TEXTS)
    )
    has_siblings = len({task.task_id for task in originals.values()}) < len(originals)
    for rollout_id, task in originals.items():
        spoken = (_said(each, turns[rollout_id]) for each in sequences.get(rollout_id, ()))
        said = [one for turns_said in spoken for one in turns_said if one.turn < turn]
        if has_siblings:
            task = replace(task, task_id=f"{task.task_id}~{rollout_id}")
        source = f"{stored.run_id}/{rollout_id}/{len(said)}"
        past = [text for text in _texts(texts.get(rollout_id, ())) if text.turn < len(said)]
        yield forked_task(task, source, said, past)


def _selected(stored: StoredRun, select: str) -> dict[int, Task]:
    """The task of each rollout that SQL names, in its order. Raises UserError."""
    chosen = stored.sql(select)
    if "rollout_id" not in chosen.column_names:
        raise UserError(f"a selection of {', '.join(chosen.column_names)}", "a column rollout_id")
    rollouts = list(dict.fromkeys(chosen.column("rollout_id").to_pylist()))
    tasks = {row["rollout_id"]: row["task"] for row in stored.sql(_ROLLOUTS).to_pylist()}
    if strange := [str(rollout_id) for rollout_id in rollouts if rollout_id not in tasks]:
        raise UserError(
            f"rollout {', '.join(strange[:5])}", f"rollouts that are stored in {stored.run_id}"
        )
    return {rollout_id: task_from_json(tasks[rollout_id]) for rollout_id in rollouts}


Rows = tuple[dict[str, Any], ...]


def _by_rollout(table: pa.Table) -> dict[int, Rows]:
    """Rows of each rollout, their lists of numbers as numpy arrays."""
    found: dict[int, list[dict[str, Any]]] = {}
    for batch in table.to_batches():
        for place in range(batch.num_rows):
            row = {
                name: _value(batch.column(index)[place])
                for index, name in enumerate(batch.schema.names)
            }
            found.setdefault(row["rollout_id"], []).append(row)
    return {rollout_id: tuple(rows) for rollout_id, rows in found.items()}


def _value(scalar: pa.Scalar) -> Any:
    is_list = isinstance(scalar, pa.ListScalar)
    return scalar.values.to_numpy(zero_copy_only=False) if is_list else scalar.as_py()


def _said(sequence: dict[str, Any], turns: Rows) -> Iterator[Said]:
    """The turns of a sequence; context behind its last sampled id is nobody's yet."""
    ends, kinds = sequence["span_end"], sequence["span_kind"]
    bounds = list(pairwise([0, *ends.tolist()]))
    sampled_before = np.cumsum(
        [0, *(b - a if k else 0 for (a, b), k in zip(bounds, kinds, strict=True))]
    )
    for turn in np.unique(sequence["span_turn"][kinds != SpanKind.CONTEXT]).tolist():
        spans = np.flatnonzero((sequence["span_turn"] == turn) & (kinds != SpanKind.CONTEXT))
        first, last = int(spans[0]), int(spans[-1])
        start, stop = bounds[first][0], bounds[last][1]
        told = first and not kinds[first - 1] and sequence["span_turn"][first - 1] == turn
        before = bounds[first - 1] if told else (0, 0)
        row = turns[turn]
        completion = Completion(
            token_ids_C=sequence["token_ids"][start:stop],
            logprobs_C=sequence["logprobs"][sampled_before[first] : sampled_before[last + 1]],
            finish_reason=FinishReason(row["finish_reason"]),
            version_ends=tuple(int(ends[span]) - start for span in spans),
            versions=tuple(PolicyVersion(int(sequence["span_version"][span])) for span in spans),
            cached_tokens=row["cached_tokens"],
            backend=row["backend"],
        )
        yield Said(
            turn=turn,
            segment=sequence["segment"],
            context_ids=sequence["token_ids"][before[0] : before[1]],
            completion=completion,
            temperature=float(sequence["span_temperature"][first]),
            llm_s=row["llm_s"],
        )


def _texts(rows: Rows) -> Iterator[Text]:
    last, number = -1, 0
    for row in rows:
        number = number + 1 if row["turn"] == last else 0
        last = row["turn"]
        yield Text(last, number, row["content"])
