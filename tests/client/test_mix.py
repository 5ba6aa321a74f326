"""A live stream and a replay mixed; one replay for two trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import PackedBatch, connect
from prorl.client.mix import mix
from prorl.errors import UserError
from prorl.schema.rows import row_hashes
from tests.client.replay_process import served

SMALL = SyntheticShape(n=2, num_tokens=12)


def groups(run: str, first: int = 0) -> Iterator[PackedBatch]:
    rows = group(0, SMALL)
    return (PackedBatch(delivered([rows], seq), run) for seq in range(first, 2000))


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.1, 0.3, 1.0])
def test_the_ratio_is_exact(ratio: float) -> None:
    mixed = mix(groups("live"), groups("old"), ratio)
    marks = [replayed for _, replayed in (next(mixed) for _ in range(1000))]
    for count in range(1, 1001):
        assert sum(marks[:count]) == int(count * ratio + 1e-9)
    assert sum(marks) == int(1000 * ratio + 1e-9)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), float("inf")])
def test_an_invalid_ratio_is_refused_in_a_single_line(ratio: float) -> None:
    with pytest.raises(UserError, match="ratio"):
        mix(groups("live"), groups("old"), ratio)


def test_a_quarter_of_a_thousand_groups_and_on_after_a_checkpoint() -> None:
    whole = mix(groups("live"), groups("old"), 0.25)
    first = [next(whole) for _ in range(600)]
    live, old = (sum(group.replayed is mark for group in first) for mark in (False, True))
    assert (live, old) == (450, 150)
    again = mix(groups("live", live), groups("old", old), 0.25, num_live=live, num_replayed=old)
    rest = [next(again) for _ in range(400)]
    expected = [next(whole) for _ in range(400)]
    assert [(f.replayed, f.batch.cursor) for f in rest] == [
        (f.replayed, f.batch.cursor) for f in expected
    ]
    assert sum(group.replayed for group in (*first, *rest)) == 250
    assert {group.batch.run for group in first if group.replayed} == {"old"}
    with pytest.raises(UserError, match="150 replayed of 601"):
        mix(groups("live"), groups("old"), 0.5, num_live=451, num_replayed=150)


def hashes(location: str, run: str, consumer: str, size: int) -> list[str]:
    with connect(location) as client:
        batches = client.stream(run, consumer, groups_per_batch=size, advantages=None)
        return [digest for batch in batches for digest in row_hashes(batch.arrow)]


def test_two_trainers_read_the_same_replay_and_a_third_mixes_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [group(i, SMALL) for i in range(40)], "one")
    with served(run) as location:
        seen = [hashes(location, "one", name, size) for name, size in (("a", 7), ("b", 3))]
        with connect(location) as live, connect(location) as old:
            mixed = mix(
                live.stream("one", "live", groups_per_batch=1),
                old.stream("one", "old", groups_per_batch=1),
                0.25,
            )
            marks = [replayed for _, replayed in mixed]
    assert seen[0] == seen[1]
    assert (marks.count(True), marks.count(False)) == (13, 40)
    assert len(seen[0]) == 80
