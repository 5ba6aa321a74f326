"""The trainer on a GPU: the same logprobs and the same update as on a CPU.

The variable-length kernel runs here alone. Needs a CUDA device: `python -m pytest -m gpu`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prorl.trainer.checkpoint import Checkpoints, TrainingState
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner
from prorl.trainer.lineage import SequenceOutcomes
from prorl.trainer.pack import load_model, pack, token_logprobs
from tests.trainer.test_learner import learner
from tests.trainer.tiny_model import batch_of, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SAMPLER = {"ratio": "sequence", "kl": 0.1, "clip_low": 3e-4, "clip_high": 4e-4}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def logprobs_of(model_dir: Path, device: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        model, packed = load_model(model_dir, device=device), pack(batch_of(4), device)
        return token_logprobs(model, packed, dtype=dtype).logprobs_C.float().cpu()


def test_float32_gives_the_cpus_logprobs(model_dir: Path) -> None:
    here = logprobs_of(model_dir, "cuda", torch.float32)
    assert (here - logprobs_of(model_dir, "cpu", torch.float32)).abs().max() < 1e-4


def test_the_variable_length_kernel_is_as_near_as_bfloat16_can_be(model_dir: Path) -> None:
    exact_C = logprobs_of(model_dir, "cpu", torch.float32)
    padded_C = logprobs_of(model_dir, "cpu", torch.bfloat16)
    here_C = logprobs_of(model_dir, "cuda", torch.bfloat16)
    bound = 3 * float((padded_C - exact_C).abs().max())
    assert 0 < float((here_C - exact_C).abs().max()) < bound, "bfloat16, and no more than that"


@pytest.mark.parametrize("how", [{}, SAMPLER, {"proximal": True, "minibatches": 2}])
def test_an_update_is_the_cpus(model_dir: Path, how: dict[str, object]) -> None:
    batch = batch_of(4)
    updates, accounts = [], []
    for device in ("cpu", "cuda"):
        device_learner, account = (
            learner(model_dir, device=device, warmup_steps=0, **how),
            SequenceOutcomes(batch),
        )
        for step in range(2):
            figures = device_learner.update(batch, step=step, version=0, account=account)
        updates.append(figures)
        accounts.append(account)
    cpu, cuda = updates
    assert cuda == pytest.approx(cpu, rel=1e-2, abs=1e-4)
    np.testing.assert_allclose(accounts[1].logprobs_C, accounts[0].logprobs_C, atol=1e-3)
    np.testing.assert_allclose(accounts[1].loss_B, accounts[0].loss_B, atol=1e-4)


def test_bfloat16_and_recomputed_layers_learn_too(model_dir: Path) -> None:
    batch = batch_of(4)
    plain = learner(model_dir, device="cuda", warmup_steps=0)
    short = learner(
        model_dir, device="cuda", warmup_steps=0, dtype="bfloat16", gradient_checkpointing=True
    )
    plain_figures, other = (each.update(batch, step=0, version=0) for each in (plain, short))
    assert other["grad_norm"] == pytest.approx(plain_figures["grad_norm"], rel=0.05)
    assert other["compared_tokens"] == plain_figures["compared_tokens"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_a_gpu_goes_on_there(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    batch = batch_of(4)
    first = learner(model_dir, device="cuda", warmup_steps=0, dtype=dtype)
    first.update(batch, step=0, version=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.start(
        TrainingState(step=1, version=1),
        first.model,
        first.optimizer,
        source=model_dir,
        dtype=getattr(torch, dtype),
    )
    path = checkpoints.finish()
    assert path is not None
    config: TrainerConfig = first._config
    second = Learner(config, path, resume=True)
    here, there = (
        device_learner.update(batch, step=1, version=1) for device_learner in (first, second)
    )
    assert there == pytest.approx(here, rel=1e-4, abs=1e-6)
