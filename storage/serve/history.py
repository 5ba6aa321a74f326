"""The history of a run's tasks: one row for each task, over the groups that were decided so far.

A task takes a hundred bytes. A store that starts computes the history from the stored rows, and
adds to it from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

HISTORY = pa.schema(
    [
        ("task_id", pa.utf8()),
        ("groups", pa.int32()),  # that had a valid member
        ("informative", pa.int32()),  # of them: whose rewards differed
        ("streak", pa.int32()),  # groups without a difference since the last that had one
        ("rollouts", pa.int32()),
        ("mean_reward", pa.float64()),
        ("last_reward", pa.float64()),  # mean of the last group
        ("mean_tokens", pa.float64()),
        ("mean_s", pa.float64()),  # of RUN
        ("last_version", pa.int32()),
    ]
)

HISTORY_COLUMNS = ["task_id", "group_id", "valid", "reward", "num_tokens", "run_s", "max_version"]
"""Columns of `rollouts` that the history is made of."""


@dataclass(slots=True)
class _Past:
    groups: int = 0
    informative: int = 0
    streak: int = 0
    rollouts: int = 0
    reward_sum: float = 0.0
    last_reward: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    version: int = -1


class History:
    def __init__(self) -> None:
        self._tasks: dict[str, _Past] = {}

    def add(self, rollouts: pa.Table) -> None:
        """Whole groups, as rows of `rollouts`; members that are not valid count nothing.

        >>> history = History()
        >>> rows = {"task_id": ["a"] * 2, "group_id": [0, 0], "valid": [True] * 2,
        ...         "reward": [1.0, 0.0], "num_tokens": [10, 30], "run_s": [1.0, 2.0],
        ...         "max_version": [3, 4]}
        >>> history.add(pa.table(rows))
        >>> found = history.table(["a", "b"]).to_pylist()
        >>> len(found), found[0]["informative"], found[0]["mean_tokens"], found[0]["last_version"]
        (1, 1, 20.0, 4)
        """
        valid = rollouts.select(HISTORY_COLUMNS).filter(
            pc.and_(rollouts.column("valid"), pc.is_valid(rollouts.column("reward")))
        )
        groups = valid.group_by(["group_id", "task_id"]).aggregate(
            [
                ("reward", "count"),
                ("reward", "sum"),
                ("reward", "min_max"),
                ("num_tokens", "sum"),
                ("run_s", "sum"),
                ("max_version", "max"),
            ]
        )
        for row in groups.sort_by("group_id").to_pylist():
            past = self._tasks.setdefault(row["task_id"], _Past())
            differs = row["reward_min_max"]["min"] < row["reward_min_max"]["max"]
            past.groups += 1
            past.informative += differs
            past.streak = 0 if differs else past.streak + 1
            past.rollouts += row["reward_count"]
            past.reward_sum += row["reward_sum"]
            past.last_reward = row["reward_sum"] / row["reward_count"]
            past.tokens += row["num_tokens_sum"]
            past.seconds += row["run_s_sum"]
            past.version = max(past.version, row["max_version_max"])

    def table(self, tasks: Iterable[str]) -> pa.Table:
        """`HISTORY` of those of these tasks that have one."""
        rows = [
            (
                *(task, past.groups, past.informative, past.streak, past.rollouts),
                past.reward_sum / past.rollouts,
                past.last_reward,
                past.tokens / past.rollouts,
                past.seconds / past.rollouts,
                past.version,
            )
            for task in dict.fromkeys(tasks)
            if (past := self._tasks.get(task)) is not None
        ]
        columns = zip(*rows, strict=True) if rows else ([] for _ in HISTORY)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, HISTORY, strict=True)]
        return pa.Table.from_arrays(arrays, schema=HISTORY)
