"""Advantages against a plain float64 reference over distinct rollouts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.client import PackedBatch
from prorl.client.advantages import (
    AdvantageFn,
    add_advantages,
    leave_one_out,
    mean_centred,
    mean_std,
    overlong,
)
from prorl.errors import UserError
from prorl.types import SpanKind


def batch_of(num_groups: int, shape: SyntheticShape, seed: int = 0) -> PackedBatch:
    return PackedBatch(delivered([group(i, shape, seed) for i in range(num_groups)]), "demo")


def reference(
    batch: PackedBatch, of_group: Callable[[list[float]], Callable[[float], float]]
) -> list[float]:
    rewards: dict[int, dict[int, float]] = defaultdict(dict)
    rows = list(
        zip(
            batch.group_ids.tolist(),
            batch.rollout_ids.tolist(),
            batch.rewards.tolist(),
            strict=True,
        )
    )
    for group_id, rollout_id, reward in rows:
        rewards[group_id][rollout_id] = reward
    return [of_group(list(rewards[group_id].values()))(reward) for group_id, _, reward in rows]


def centred(rewards: list[float]) -> Callable[[float], float]:
    return lambda reward: reward - statistics.fmean(rewards)


def normalised(rewards: list[float]) -> Callable[[float], float]:
    return lambda reward: (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def against_others(rewards: list[float]) -> Callable[[float], float]:
    return lambda reward: reward - (sum(rewards) - reward) / (len(rewards) - 1)


@pytest.mark.parametrize("how", [mean_std, mean_centred, leave_one_out])
def test_what_cannot_train_is_nobodys_sibling(how: AdvantageFn) -> None:
    """A rollout that nobody's weights sampled, as far as is known."""
    rows = delivered([group(0, SyntheticShape(n=4), 0)])
    silent = rows.column("rollout_id")[0].as_py()
    at = rows.schema.get_field_index("span_kind")
    kinds = [
        [SpanKind.SAMPLED if kind == SpanKind.TRAINED else kind for kind in row["span_kind"]]
        if row["rollout_id"] == silent
        else row["span_kind"]
        for row in rows.select(["rollout_id", "span_kind"]).to_pylist()
    ]
    changed = rows.set_column(
        at, rows.schema.field(at), pa.array(kinds, rows.schema.field(at).type)
    )
    others = rows.filter(pc.not_equal(rows.column("rollout_id"), silent))
    advantages = how(PackedBatch(changed, "demo"))
    is_silent = np.array(
        [rollout_id == silent for rollout_id in rows.column("rollout_id").to_pylist()]
    )
    assert not advantages[is_silent].any()
    assert np.array_equal(advantages[~is_silent], how(PackedBatch(others, "demo")))


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_formulas_over_distinct_rollouts(seed: int) -> None:
    batch = batch_of(6, SyntheticShape(n=5, rewritten_share=0.5), seed)
    assert batch.num_sequences > 30, "some rollouts must have two sequences"
    np.testing.assert_allclose(mean_centred(batch), reference(batch, centred), atol=1e-7)
    np.testing.assert_allclose(mean_std(batch), reference(batch, normalised), atol=1e-6)
    np.testing.assert_allclose(leave_one_out(batch), reference(batch, against_others), atol=1e-6)


def test_long_rollouts_lose_reward_softly() -> None:
    batch = batch_of(2, SyntheticShape(n=5, rewritten_share=0.5))
    sampled: dict[int, int] = defaultdict(int)
    counts = np.diff(batch.logprob_offsets).tolist()
    for rollout, count in zip(batch.rollout_ids.tolist(), counts, strict=True):
        sampled[rollout] += count
    shortest, longest = min(sampled.values()), max(sampled.values())
    limit, buffer = longest, longest - shortest
    assert buffer > 1
    expected = [
        reward + min(0.0, max(-1.0, (limit - buffer - sampled[rollout]) / buffer))
        for rollout, reward in zip(batch.rollout_ids.tolist(), batch.rewards.tolist(), strict=True)
    ]
    shaped = overlong(batch, limit, buffer)
    np.testing.assert_allclose(shaped.rewards, expected, atol=1e-6)
    lost = batch.rewards - shaped.rewards
    assert (lost.min(), lost.max()) == (0, 1)
    np.testing.assert_array_equal(shaped.token_ids, batch.token_ids)


def test_a_rewritten_rollout_counts_once() -> None:
    shape = SyntheticShape(n=4, rewritten_share=0.5)
    batch = next(b for b in (batch_of(1, shape, seed) for seed in range(20)) if b.num_sequences > 4)
    per_rollout = dict(zip(batch.rollout_ids.tolist(), mean_centred(batch).tolist(), strict=True))
    assert sum(per_rollout.values()) == pytest.approx(0, abs=1e-6)


def test_a_lone_or_equal_group_teaches_nothing() -> None:
    assert mean_std(batch_of(2, SyntheticShape(n=1))).tolist() == [0.0, 0.0]
    assert mean_centred(batch_of(2, SyntheticShape(n=1))).tolist() == [0.0, 0.0]


def test_the_same_group_gets_the_same_bits_in_any_batch() -> None:
    batch = batch_of(5, SyntheticShape(n=7, rewritten_share=0.3))
    whole = mean_std(batch)
    parts = [mean_std(batch.groups(i, i + 1)) for i in range(5)]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_names_functions_and_none() -> None:
    batch = batch_of(2, SyntheticShape())
    assert add_advantages(batch, None).advantages is None
    ones = add_advantages(batch, lambda b: np.ones(b.num_sequences, np.float32)).advantages
    assert ones is not None
    assert ones.sum() == batch.num_sequences
    with pytest.raises(UserError, match="one of group, centred"):
        add_advantages(batch, "gae")  # type: ignore[arg-type]
