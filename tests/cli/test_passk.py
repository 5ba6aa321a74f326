"""pass@k: the view against all draws, and what `prorl eval` reads of a run."""

from __future__ import annotations

import itertools
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from prorl.analysis.synthetic_runs import make_run, write_commit
from prorl.cli.passk import evaluation, wilson
from prorl.schema import TABLES
from prorl.storage.read.catalog import DERIVED, StoredRun

GROUPS = [(n, right) for n in range(1, 8) for right in range(n + 1)]


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    names = ("run_id", "group_id", "task_id", "data_source", "valid", "reward")
    rollouts = pa.Table.from_pylist(
        [
            dict(zip(names, ("r", group, "t", "s", True, float(i < right)), strict=True))
            for group, (n, right) in enumerate(GROUPS)
            for i in range(n)
        ]
    )
    with duckdb.connect() as database:
        database.register("rollouts", rollouts)
        rows = database.sql(DERIVED["passk"].sql).to_arrow_table().to_pylist()
    assert {(row["group_id"], row["k"]) for row in rows} == {
        (group, k) for group, (n, _) in enumerate(GROUPS) for k in (1, 2, 4) if k <= n
    }
    for row in rows:
        n, right = GROUPS[row["group_id"]]
        draws = list(itertools.combinations([True] * right + [False] * (n - right), row["k"]))
        assert row["pass_at_k"] == pytest.approx(sum(map(any, draws)) / len(draws))


def test_an_evaluation_is_read_by_source_and_mode(tmp_path: Path) -> None:
    """Six groups of four; of one nothing counts, of another one rollout does not."""
    run = make_run(tmp_path / "e", 8, 1)
    row = StoredRun(run.where).read("rollouts").to_pylist()[0]
    greedily = '{"mode": "greedy"}'
    rows = [
        row
        | {
            "rollout_id": 4 * group + i,
            "group_id": group,
            "data_source": "s",
            "extra": greedily if group >= 4 else "",
            "valid": group != 2 and (group, i) != (3, 0),
            "reward": float(i < group),
        }
        for group in range(6)
        for i in range(4)
    ]
    only = make_run(tmp_path / "only", 0, 0)
    write_commit(only, "only", 1, {"rollouts": pa.Table.from_pylist(rows, TABLES["rollouts"])})
    sampled, greedy = evaluation(tmp_path / "only")
    assert (sampled.mode, sampled.tasks, sampled.n, sampled.masked) == ("sampled", 3, 3, 5)
    assert list(sampled.at) == [1, 2]
    assert sampled.at[1].value == pytest.approx((0 + 1 / 4 + 2 / 3) / 3)
    assert sampled.at[1] == wilson(sampled.at[1].value, 3)
    assert (greedy.mode, greedy.tasks, greedy.n, greedy.masked) == ("greedy", 2, 4, 0)
    assert greedy.at == {k: wilson(1.0, 2) for k in (1, 2, 4)}
