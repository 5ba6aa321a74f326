"""One update: masks for stale tokens, warm-up, and passes and minibatches that are only a matter of
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from prorl.client import PackedBatch
from prorl.client.advantages import mean_std
from prorl.errors import UserError
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner, first_prompt
from tests.trainer.tiny_model import batch_of, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def learner(model_dir: Path, **changes: Any) -> Learner:
    values = {
        "service": "unused",
        "run": "demo",
        "model": model_dir,
        "output": model_dir,
        "steps": 1,
        **changes,
    }
    return Learner(TrainerConfig(**values), model_dir, resume=False)


@pytest.mark.parametrize(
    "how", [{}, {"ratio": "sequence", "kl": 0.1, "clip_low": 3e-4, "clip_high": 4e-4}]
)
def test_passes_only_save_memory(model_dir: Path, how: dict[str, Any]) -> None:
    batch = batch_of(3)
    whole = learner(model_dir, tokens_per_pass=10**6, warmup_steps=0, **how)
    cut = learner(model_dir, tokens_per_pass=1, warmup_steps=0, **how)
    for step in range(2):  # at the first a reference is the policy itself
        whole_figures, other = (each.update(batch, step=step, version=0) for each in (whole, cut))
        assert whole_figures["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert whole_figures["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert whole_figures["entropy"] == pytest.approx(other["entropy"], rel=1e-4)


@contextmanager
def unmoved(policy_learner: Learner) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in policy_learner.model.parameters()]
    yield
    pairs = zip(before, policy_learner.model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_the_learning_rate_warms_up(model_dir: Path) -> None:
    policy_learner = learner(model_dir, learning_rate=1e-3, warmup_steps=4)
    rates = []
    for step in (0, 1, 3, 7):
        policy_learner.update(batch_of(1), step=step, version=0)
        rates.append(policy_learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_more_minibatches_than_groups_are_as_many_as_groups(model_dir: Path) -> None:
    policy_learner = learner(model_dir, minibatches=8)
    policy_learner.update(batch_of(3), step=0, version=0)
    steps = {int(state["step"]) for state in policy_learner.optimizer.state.values()}
    assert steps == {3}


def test_figures_count_what_the_batch_holds(model_dir: Path) -> None:
    batch = batch_of(3)
    figures = learner(model_dir).update(batch, step=0, version=0)
    rewards = dict(zip(batch.rollout_ids.tolist(), batch.rewards.tolist(), strict=True))
    assert figures["reward"] == pytest.approx(np.mean(list(rewards.values())))
    assert (figures["rollouts"], figures["sequences"], figures["groups"]) == (
        len(rewards),
        batch.num_sequences,
        3,
    )
    assert figures["logprob_diff_max"] > 0.1, "synthetic logprobs are not this model's"
    assert figures["compared_tokens"] == len(batch.logprobs)


def test_uncompared_tokens_are_counted_and_untrained_spans_have_no_age(model_dir: Path) -> None:
    arrow = batch_of(2).arrow
    versions = arrow.column("span_version")
    sampled_versions = versions.flatten().to_numpy()
    values = np.where(np.arange(len(sampled_versions)) % 4 < 2, -1, sampled_versions).astype(
        np.int32
    )
    column = pa.ListArray.from_arrays(versions.offsets, pa.array(values), type=versions.type)
    place = arrow.schema.get_field_index("span_version")
    changed = PackedBatch(arrow.set_column(place, arrow.schema.field(place), column), "demo")
    figures = learner(model_dir).update(
        changed.with_advantages(mean_std(changed)), step=0, version=3
    )
    assert (figures["staleness_max"], figures["staleness_mean"]) == (3, 3)
    assert (figures["compared_tokens"], figures["logprob_diff_max"]) == (0, 0)


def test_a_gradient_that_is_no_number_moves_nothing(model_dir: Path) -> None:
    policy_learner, batch = learner(model_dir), batch_of(1)
    assert batch.advantages is not None
    batch.advantages[0] = np.nan
    with unmoved(policy_learner), pytest.raises(UserError, match="norm is nan in step 3"):
        policy_learner.update(batch, step=3, version=0)


def test_tokens_beyond_the_staleness_bound_do_not_train(model_dir: Path) -> None:
    """Nor do momentum and decay move the weights then."""
    policy_learner = learner(model_dir, max_staleness=1, weight_decay=0.1)
    assert policy_learner.update(batch_of(2), step=9, version=1)["trained_tokens"] == len(
        batch_of(2).logprobs
    )
    with unmoved(policy_learner):
        figures = policy_learner.update(batch_of(2), step=9, version=2)
    assert (figures["trained_tokens"], figures["staleness_max"], figures["grad_norm"]) == (0, 2, 0)


def test_small_steps_move_float32_weights_under_bfloat16_products(model_dir: Path) -> None:
    """At 1e-6 a bfloat16 weight stays where it is: 2 % of them moved."""
    policy_learner = learner(model_dir, dtype="bfloat16", learning_rate=1e-6, warmup_steps=0)
    before = [parameter.detach().clone() for parameter in policy_learner.model.parameters()]
    for step in range(20):
        policy_learner.update(batch_of(2), step=step, version=0)
    pairs = list(zip(before, policy_learner.model.parameters(), strict=True))
    moved = sum(int((old != new).sum()) for old, new in pairs)
    assert moved > 0.9 * sum(old.numel() for old, _ in pairs)


def test_layers_computed_again_give_the_same_step(model_dir: Path) -> None:
    batch = batch_of(2)
    plain = learner(model_dir).update(batch, step=9, version=0)
    again = learner(model_dir, gradient_checkpointing=True).update(batch, step=9, version=0)
    assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_what_servers_must_say_is_the_models_own(model_dir: Path) -> None:
    """The expected logprobs are those of the trainer's pass over the batch's first prompt; packing
    comes back afterwards.
    """
    policy_learner, batch = learner(model_dir), batch_of(1)
    before = policy_learner.update(batch, step=0, version=0)
    expected = policy_learner.expected(first_prompt(batch))
    assert expected["prompt_ids"] == batch.token_ids[: batch.sampled_index()[0]].tolist()
    assert expected["logprobs"] == sorted(expected["logprobs"], reverse=True)
    assert (
        sum(np.exp(expected["logprobs"])) == pytest.approx(1.0, abs=1e-3)
        or len(expected["ids"]) == 256
    )
    assert policy_learner.update(batch, step=1, version=1).keys() == before.keys()
