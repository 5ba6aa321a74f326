"""The demo's recipe, what it shows while it runs, and pass@k; the demo itself runs in
tests/integration/test_learning.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prorl.cli.demo.command import _figures
from prorl.cli.demo.recipe import Recipe, heldout_tasks, train_run, train_tasks
from prorl.cli.passk import wilson
from prorl.envs import get_env
from prorl.envs.users import users_code
from prorl.types import GroupState

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"


def test_the_config_file_says_what_happens_without_it() -> None:
    assert Recipe.model_validate(yaml.safe_load(CONFIG.read_text())) == Recipe()


def test_heldout_tasks_are_equal_for_every_seed_and_training_tasks_differ() -> None:
    recipe, other = Recipe(seed=1, steps=2), Recipe(seed=2, steps=2)
    assert heldout_tasks(recipe) == heldout_tasks(other)
    assert train_tasks(recipe) == train_tasks(recipe) != train_tasks(other)
    heldout_prompts = {task.prompt for task in heldout_tasks(recipe)}
    assert not heldout_prompts & {task.prompt for task in train_tasks(recipe)}
    assert [task.env for task in train_tasks(recipe)[:3]] == ["arith", "shop", "repair"]


def test_another_agents_tasks_are_the_same_ones_for_a_guest() -> None:
    native = [task for task in heldout_tasks(Recipe(heldout=4, greedy=2)) if task.env != "repair"]
    openai = heldout_tasks(Recipe(heldout=4, greedy=2, agent="openai"))
    for ours, theirs in zip(native, openai, strict=True):
        get_env("guest").check(theirs)
        assert users_code(theirs) == ()
        assert (theirs.task_id, theirs.prompt) == (ours.task_id, ours.prompt)
        assert (theirs.env, theirs.data["answer"]) == ("guest", ours.data["answer"])


def test_no_more_is_open_than_the_next_step_takes() -> None:
    synchronous, ahead = (
        train_run(Recipe(groups_per_step=6, steps_ahead=0), "r"),
        train_run(Recipe(groups_per_step=6, steps_ahead=1), "r"),
    )
    assert (synchronous.max_uncommitted_groups, ahead.max_uncommitted_groups) == (6, 12)


def test_the_trainers_step_and_dapos_decisions_are_displayed() -> None:
    groups = {state.value: 0 for state in GroupState} | {"committed": 3, "dropped": 2}
    figures = _figures(Recipe(steps=34), {"version": 5, "groups": groups})
    assert figures == ["step 5/34", "DAPO kept 3 dropped 2", "policy v5"]


def test_wilson_against_published_figures() -> None:
    """Newcombe (1998), Statistics in Medicine 17:857, table I, method 3."""
    assert wilson(81 / 263, 263)[1:] == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15 / 148, 148)[1:] == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0.0, 20)[1:] == pytest.approx((0.0, 0.1611), abs=1e-4)
