"""Records say what the batch says, token by token, and a feed goes on where it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import PackedBatch
from prorl.client.advantages import mean_std
from prorl.client.records import Feed, records
from prorl.errors import UserError
from prorl.storage.read.catalog import query
from tests.client.replay_process import served

SHAPE = SyntheticShape(n=4, num_tokens=24, num_turns=2, vocab_size=64, rewritten_share=0.5)
GROUPS = 6


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return write_run(folder, [group(i, SHAPE) for i in range(GROUPS)], "demo")


@pytest.fixture(scope="module")
def location(run_dir: Path) -> Iterator[str]:
    with served(run_dir) as where:
        yield where


def test_every_array_is_as_long_as_the_sequence_and_says_what_the_batch_says() -> None:
    batch = PackedBatch(delivered([group(i, SHAPE) for i in range(3)]), "demo")
    batch = batch.with_advantages(mean_std(batch))
    sequence_records = records(batch)
    assert len(sequence_records) == batch.num_sequences
    names = ("ids", "mask", "logprobs", "versions", "temperatures")
    together = {
        name: np.concatenate([getattr(record, name) for record in sequence_records])
        for name in names
    }
    sampled = batch.sampled_index()
    np.testing.assert_array_equal(together["ids"], batch.token_ids)
    np.testing.assert_array_equal(together["mask"], batch.loss_mask().astype(bool))
    np.testing.assert_array_equal(together["logprobs"][sampled], batch.logprobs)
    assert not np.delete(together["logprobs"], sampled).any()
    assert set(np.delete(together["versions"], sampled).tolist()) == {-1}
    for row, record in enumerate(sequence_records):
        assert record.ids.shape == record.mask.shape == record.versions.shape
        assert not record.temperatures[: record.first].any()
        assert record.temperatures[record.first] > 0
        assert record.advantage == pytest.approx(float(batch.advantages[row]))  # type: ignore[index]
    weights = {record.rollout: 0.0 for record in sequence_records}
    for record in sequence_records:
        weights[record.rollout] += record.weight
    assert set(weights.values()) == {1.0}, "a rollout counts once, however often it was rewritten"
    assert any(record.weight < 1 for record in sequence_records)


def test_what_trains_is_what_sql_says(location: str, run_dir: Path) -> None:
    stored = query(
        run_dir,
        "SELECT rollout_id, segment, sum(kind_length) AS trained FROM (SELECT rollout_id, segment, "
        "unnest(span_kind) AS kind, unnest(span_end) - unnest([0] || span_end[:-2]) AS kind_length "
        "FROM sequences) WHERE kind = 1 GROUP BY ALL",
    ).to_pylist()
    fed = [record for group in Feed(location, "demo", consumer="sql") for record in group]
    assert {(record.rollout, record.segment): int(record.mask.sum()) for record in fed} == {
        (row["rollout_id"], row["segment"]): row["trained"] for row in stored
    }


def test_a_feed_goes_on_behind_its_checkpoint_and_pickles_its_address(location: str) -> None:
    feed = Feed(location, "demo", consumer="a")
    groups = iter(feed)
    first = [record.group for record in next(groups)]
    saved = pickle.loads(pickle.dumps(feed.state_dict()))
    second = [record.group for record in next(groups)]
    again = pickle.loads(pickle.dumps(Feed(location, "demo", consumer="a")))
    again.load_state_dict(saved)
    rest = [group[0].group for group in again]
    assert rest[0] == second[0] != first[0]
    assert len(rest) == GROUPS - 1
    again.commit()
    with pytest.raises(UserError, match="checkpoint of run 'other'"):
        again.load_state_dict({**saved, "run": "other"})
