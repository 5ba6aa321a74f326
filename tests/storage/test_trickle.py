"""A day of a rollout a second, in virtual time: the store's files are as many at its end as in its
morning, and hold every row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prorl.analysis.synthetic_runs import add_commit, make_run
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.compact import collect, compact
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify

MINUTES, A_MINUTE = 24 * 60, 60
EVERY = 60
"""Commits between two compactions, one a minute; a service has 256."""

TABLES_AND_COMMIT = 7


def _files(run: RunDir) -> int:
    return sum(path.is_file() for path in Path(run.root).rglob("*"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_day_of_commits_leaves_few_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run = make_run(tmp_path / "r", A_MINUTE, 1, tokens=16)
    delivered, most, after = StoredRun(run.where).delivered().size, list[int](), list[int]()
    for minute in range(1, MINUTES):
        rollouts = range(minute * A_MINUTE, (minute + 1) * A_MINUTE)
        delivered = add_commit(run, minute + 1, rollouts, delivered, 16, rng)
        if minute % EVERY == EVERY - 1:
            most.append(_files(run))
            compact(run)
            collect(run, grace_s=0.0)
            after.append(_files(run))
    size = sum(path.stat().st_size for path in Path(run.root).rglob("*") if path.is_file())
    print(f"files before a compaction, hours 2, 12, 24: {[most[h - 1] for h in (2, 12, 24)]}")
    print(
        f"files after it, hours 2, 12, 24: {[after[h - 1] for h in (2, 12, 24)]}; {size >> 20} MB"
    )
    assert max(after) < 10 * TABLES_AND_COMMIT
    assert max(most) < EVERY * TABLES_AND_COMMIT + max(after) + TABLES_AND_COMMIT
    stored = StoredRun(run.where)
    ids = stored.read("rollouts", ["rollout_id"]).column("rollout_id").to_numpy()
    assert np.array_equal(np.sort(ids), np.arange(MINUTES * A_MINUTE))
    assert len(stored.delivered()) == delivered
    assert verify(run.where) == []
