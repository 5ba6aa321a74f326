"""The loop over a real replay: bit-equal losses, bit-equal parameters after SIGKILL, exactly one
step per group.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from prorl.analysis.synthetic import group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import Client, connect
from prorl.errors import ConflictError
from prorl.trainer.checkpoint import newest, read_progress
from prorl.trainer.config import TrainerConfig
from prorl.trainer.loop import train
from tests.client.replay_process import served
from tests.trainer.tiny_model import SHAPE, save_model

STEPS, GROUPS = 20, 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run_dir = write_run(
        tmp_path_factory.mktemp("runs") / "demo",
        [group(i, SHAPE) for i in range(STEPS * GROUPS)],
        "demo",
    )
    with served(run_dir) as where:
        yield where


def settings(location: str, model_dir: Path, output: Path, **changes: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "service": location,
        "run": "demo",
        "model": model_dir,
        "output": output,
        "steps": STEPS,
        "groups_per_step": GROUPS,
        "minibatches": 2,
        "tokens_per_pass": 150,
        "publish": False,
        "consumer": output.name,
    }
    return TrainerConfig(**{**values, **changes})


def losses(config: TrainerConfig) -> list[float]:
    step_losses: list[float] = []

    def hook(_: int, figures: Mapping[str, float]) -> None:
        step_losses.append(figures["loss"])

    with connect(config.service) as client:
        train(config, client, hooks=(hook,))
    return step_losses


def weights(output: Path) -> dict[str, torch.Tensor]:
    path = newest(output / "checkpoints")
    assert path is not None
    return load_file(path / "model.safetensors")


def assert_equal_bits(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_two_fresh_trainers_have_bit_equal_losses(
    location: str, model_dir: Path, tmp_path: Path
) -> None:
    first = losses(settings(location, model_dir, tmp_path / "one"))
    other = losses(settings(location, model_dir, tmp_path / "other"))
    assert len(first) == STEPS
    assert first == other
    assert len(set(first)) == STEPS
    assert_equal_bits(weights(tmp_path / "one"), weights(tmp_path / "other"))


def test_the_proximal_ratio_begins_at_1(location: str, model_dir: Path, tmp_path: Path) -> None:
    config = settings(
        location, model_dir, tmp_path / "proximal", proximal=True, minibatches=1, steps=1
    )
    losses(config)
    row = pq.read_table(config.output / "metrics" / "step-00000001.parquet").to_pylist()[0]
    assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert 0 < row["correction"] <= 2.0


def test_resumed_in_this_process_it_ends_with_equal_bits(
    location: str, model_dir: Path, tmp_path: Path
) -> None:
    whole = settings(location, model_dir, tmp_path / "whole", steps=6)
    losses(whole)
    for steps in (1, 4, 6):
        losses(settings(location, model_dir, tmp_path / "parts", steps=steps))
    assert_equal_bits(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    path = newest(tmp_path / "parts" / "checkpoints")
    assert path is not None
    assert read_progress(path).cursor == f"demo@{6 * GROUPS}"


def test_a_step_with_a_durable_checkpoint_has_its_row(
    location: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the trainer behind its checkpoint: here the service, which hears of it."""
    config = settings(
        location, model_dir, tmp_path / "out", steps=2, consumer="a/b", checkpoint_steps=1
    )
    with monkeypatch.context() as patched, connect(location) as client:
        patched.setattr(Client, "commit", refuse)
        with pytest.raises(ConflictError):
            train(config, client)
    path = newest(config.output / "checkpoints")
    assert path is not None
    assert read_progress(path).step == 1
    losses(config)
    rows = pq.read_table(config.output / "metrics").sort_by("step").to_pylist()
    assert [row["step"] for row in rows] == [1, 2]


def refuse(*_: object) -> None:
    raise ConflictError("no")


def test_a_run_that_ends_ends_the_training(location: str, model_dir: Path, tmp_path: Path) -> None:
    step_losses = losses(
        settings(location, model_dir, tmp_path / "end", steps=99, groups_per_step=25)
    )
    assert len(step_losses) == 3
    rows = pq.read_table(tmp_path / "end" / "metrics").to_pylist()
    assert [row["groups"] for row in sorted(rows, key=lambda row: row["step"])] == [25, 25, 10]


def start(config: TrainerConfig, file: Path) -> subprocess.Popen[str]:
    file.write_text(config.model_dump_json())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "prorl.trainer", "--config", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.faults
def test_killed_at_random_steps_it_ends_with_equal_bits(
    location: str, model_dir: Path, tmp_path: Path
) -> None:
    losses(settings(location, model_dir, tmp_path / "whole"))
    config = settings(location, model_dir, tmp_path / "killed")
    chance = random.Random(os.environ.get("PRORL_TEST_SEED", "7"))
    seen: list[dict[str, Any]] = []
    for kill_after in (chance.randint(1, 8), chance.randint(1, 8), None):
        with start(config, tmp_path / "trainer.json") as process:
            assert process.stdout is not None
            steps = 0
            for line in process.stdout:
                word, _, values = line.partition(" ")
                seen += [json.loads(values)] if word == "step" else []
                steps += word == "step"
                if steps == kill_after:
                    time.sleep(chance.uniform(0, 0.05))  # anywhere in the next step
                    process.send_signal(signal.SIGKILL)
            code = process.wait()
        assert code == (0 if kill_after is None else -signal.SIGKILL)
    assert_equal_bits(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    by_step: dict[int, set[float]] = {}
    for figures in seen:
        by_step.setdefault(figures["step"], set()).add(figures["loss"])
    assert all(len(values) == 1 for values in by_step.values()), (
        "a step that was done again is the same step"
    )
    assert pq.read_table(tmp_path / "killed" / "metrics").num_rows == STEPS


def test_sigterm_ends_it_after_the_step_in_hand(
    location: str, model_dir: Path, tmp_path: Path
) -> None:
    config = settings(location, model_dir, tmp_path / "stopped")
    with start(config, tmp_path / "trainer.json") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step"):
                process.send_signal(signal.SIGTERM)
                break
        lines += process.stdout.readlines()
    assert process.returncode == 0
    assert lines[-1].startswith("done")
    path = newest(config.output / "checkpoints")
    assert path is not None
    assert read_progress(path).step == json.loads(lines[-1].partition(" ")[2])["step"] < STEPS
