"""The demo's toy learns by TRL's GRPOTrainer, live from `prorl serve`: the recipes' own script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.backends.embedded import TOY
from prorl.cli.demo.recipe import Recipe, heldout_tasks, train_run, train_tasks
from tests.trainer.toy_service import evaluate_heldout, toy_service

SCRIPT = "prorl.trainer.adapters.train_trl"
STEPS, GROUPS = 12, 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_toys_heldout_reward_rises(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    recipe = Recipe(seed=seed, steps=STEPS, groups_per_step=GROUPS, heldout=96, greedy=0)
    run = train_run(recipe, "toy").model_dump(mode="json")
    trainer = [sys.executable, "-m", SCRIPT, str(TOY), str(tmp_path / "root"), "toy"]
    trainer += [str(tmp_path / "out"), "--cpu", "--steps", str(STEPS), "--groups", str(GROUPS)]
    trainer += ["--rows", "96", "--learning-rate", "5e-4"]
    with toy_service(tmp_path / "root") as client:
        before = evaluate_heldout(client, "before", heldout_tasks(recipe))
        client.create_run(**{**run, "target_groups": 0})
        client.submit("toy", train_tasks(recipe), recipe.n, key="tasks", last=True)
        done = subprocess.run(
            trainer,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        client.cancel("toy")
        trained = client.run("toy")
        after = evaluate_heldout(client, "after", heldout_tasks(recipe))
    print(f"seed {seed}: held-out {before:.3f} -> {after:.3f}, version {trained['version']}")
    assert trained["version"] == STEPS
    assert after > before + 0.1
