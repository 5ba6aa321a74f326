"""One update: masks for stale tokens, warm-up, and passes and minibatches that are only a matter of
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner
from tests.trainer.tiny import batch_of, save_model


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


def test_tokens_beyond_the_staleness_bound_do_not_train(model_dir: Path) -> None:
    one = learner(model_dir, max_staleness=1)
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    figures = one.update(batch_of(2), step=9, version=2)
    assert (figures["trained_tokens"], figures["staleness_max"], figures["grad_norm"]) == (0, 2, 0)
    assert all(
        torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True)
    )
    assert one.update(batch_of(2), step=9, version=1)["trained_tokens"] == len(batch_of(2).logprobs)


def test_the_learning_rate_warms_up(model_dir: Path) -> None:
    one = learner(model_dir, learning_rate=1e-3, warmup_steps=4)
    rates = []
    for step in (0, 1, 3, 7):
        one.update(batch_of(1), step=step, version=0)
        rates.append(one.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_passes_only_save_memory(model_dir: Path) -> None:
    batch = batch_of(3)
    whole, cut = learner(model_dir, tokens_per_pass=10**6), learner(model_dir, tokens_per_pass=1)
    one, other = whole.update(batch, step=9, version=0), cut.update(batch, step=9, version=0)
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-5)


def test_more_minibatches_than_groups_are_as_many_as_groups(model_dir: Path) -> None:
    one = learner(model_dir, minibatches=8)
    one.update(batch_of(3), step=0, version=0)
    steps = {int(state["step"]) for state in one.optimizer.state.values()}
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
