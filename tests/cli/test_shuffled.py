"""The control deals the same advantages to others of the same group."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prorl import plugins
from prorl.analysis.synthetic import SyntheticShape
from prorl.cli.demo.recipe import Recipe, trainer_config
from prorl.cli.demo.shuffled import shuffled
from prorl.client.advantages import mean_std
from prorl.errors import ConfigError
from tests.trainer.tiny_model import batch_of


def test_a_group_keeps_its_advantages_and_their_bearers_change() -> None:
    batch = batch_of(12, SyntheticShape(n=8, num_turns=2, num_tokens=40))
    right, dealt = mean_std(batch), shuffled(batch)
    for group in np.unique(batch.group_ids):
        here = batch.group_ids == group
        _, first = np.unique(batch.rollout_ids[here], return_index=True)
        assert sorted(right[here][first]) == sorted(dealt[here][first])
    assert (right != dealt).mean() > 0.3
    np.testing.assert_array_equal(dealt, shuffled(batch))


def test_the_trainer_finds_it_as_the_demo_names_it(tmp_path: Path) -> None:
    config = trainer_config(Recipe(control="shuffled-rewards"), tmp_path, "r", tmp_path)
    assert plugins.load("prorl.advantages", str(config["advantages"]), ConfigError) is shuffled
