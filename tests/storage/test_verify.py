"""`verify` finds every kind of damage, each by the rule that is about it, and nothing in a sound
directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.storage.files.layout import RunDir
from prorl.storage.read.verify import verify
from prorl.storage.write.convert import tables
from tests.storage.run_directories import (
    add_commit,
    add_events,
    add_rows,
    add_terminals,
    event,
    new_run,
)
from tests.storage.scored_rows import scored, terminal


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A sound directory with three commits."""
    made = new_run(tmp_path)
    add_rows(made, [scored(i, width=50) for i in range(4)])
    add_terminals(made, terminal(4))
    add_events(made, event(0, 0, "decided"), event(1, 0, "delivered", delivery_seq=0))
    return made


def test_a_sound_directory_has_no_finding(run: RunDir) -> None:
    assert verify(run.root) == []


def path(run: RunDir, *names: str) -> Path:
    return Path(run.path(*names))


def test_a_synthetic_run_verifies(tmp_path: Path) -> None:
    assert verify(make_run(tmp_path / "r", 64, 2, tokens=16).where) == []


def test_a_file_that_is_there_and_cannot_be_read_is_not_called_missing(run: RunDir) -> None:
    part = path(run, "turns", "part-0001.parquet")
    part.unlink()
    part.mkdir()
    problems = [
        finding.problem for finding in verify(run.root) if finding.where.startswith("turns/")
    ]
    assert len(problems) == 1
    assert problems[0].startswith("cannot be read: [Errno 21]")


def twice(run: RunDir) -> None:
    add_rows(run, [scored(i) for i in range(4)])


def sequences_without_rollout(run: RunDir) -> None:
    add_commit(run, {"sequences": pa.Table.from_batches([tables(scored(9))["sequences"]])})


def rollout_without_sequences(run: RunDir) -> None:
    rows = tables(scored(9))
    add_commit(run, {name: pa.Table.from_batches([rows[name]]) for name in ("rollouts", "turns")})


def rollout_without_turns(run: RunDir) -> None:
    rows = tables(scored(9))
    add_commit(
        run, {name: pa.Table.from_batches([rows[name]]) for name in ("rollouts", "sequences")}
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda run: path(run, "turns", "part-0001.parquet").unlink(),
            "turns/part-0001.parquet: is missing",
        ),
        (
            lambda run: path(run, "commits", "0000000002.json").unlink(),
            "commits: commit 3 stands where 2 was expected",
        ),
        (
            lambda run: path(run, "rollouts", "part-9.parquet").write_bytes(b"x"),
            "part-9.parquet: is named by no commit",
        ),
        (lambda run: path(run, "turns", ".tmp-1-part").write_bytes(b"x"), "is named by no commit"),
        (
            lambda run: path(run, "partial", ".tmp-1-part").write_bytes(b"x"),
            "partial/.tmp-1-part: is named by no commit",
        ),
        (twice, "rollout 0 is stored 2 times"),
        (sequences_without_rollout, "belongs to no rollout that was played"),
        (
            rollout_without_sequences,
            "rollout 9 counts 1 sequences and 20 tokens, stored are 0 and 0",
        ),
        (rollout_without_turns, "rollout 9 counts 2 turns, stored are 0"),
        (lambda run: add_events(run, event(1, 0, "stale")), "event 1 is stored 2 times"),
        (lambda run: add_events(run, event(2, 0, "decided")), "group 0 was decided 2 times"),
        (
            lambda run: add_events(run, event(2, 7, "delivered", delivery_seq=1)),
            "group 7 was delivered but never kept",
        ),
        (
            lambda run: add_events(run, event(2, 0, "delivered", delivery_seq=5)),
            "delivery_seq 5 stands where 1 was expected",
        ),
    ],
)
def test_damage_is_detected(run: RunDir, damage: Callable[[RunDir], object], text: str) -> None:
    damage(run)
    assert any(text in str(finding) for finding in verify(run.root)), verify(run.root)
