"""One rollout of many: the files that cannot hold it are not opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.errors import NotFoundError
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import OF_ROLLOUTS, StoredRun
from tests.storage.compactable_run import run_of_many_parts


@pytest.mark.parametrize("compacted", [False, True])
def test_its_rows_are_returned_and_no_others(tmp_path: Path, compacted: bool) -> None:
    run = run_of_many_parts(tmp_path)
    if compacted:
        compact(run)
    stored = StoredRun(run.root)
    num_rows = {name: rows.num_rows for name, rows in stored.rollout(7).items()}
    assert num_rows == {"rollouts": 1, "sequences": 1, "turns": 2, "messages": 3}
    assert set(stored.rollout(7)["turns"].column("rollout_id").to_pylist()) == {7}
    assert stored.rollout(24)["turns"].num_rows == 0, "it has no trajectory"
    with pytest.raises(NotFoundError, match="no rollout 25"):
        stored.rollout(25)


def test_other_files_are_not_opened(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path)
    stored = StoredRun(run.root)
    for table in OF_ROLLOUTS:
        for file in stored.files(table):
            if not file.first <= 7 <= file.last:
                Path(run.path(file.path)).write_bytes(b"of no concern")
    assert stored.rollout(7)["turns"].num_rows == 2
