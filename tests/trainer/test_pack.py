"""Packed forward passes against the same model, one sequence at a time, with transformers' own
attention.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prorl.analysis.synthetic import SyntheticShape
from prorl.client import PackedBatch
from prorl.errors import ConfigError, UserError
from prorl.trainer.pack import load_model, pack, packed_attention, token_logprobs
from tests.trainer.tiny_model import SHAPE, batch_of, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def unpacked_logprobs(
    model_dir: Path, batch: PackedBatch, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Eager attention, no packing: the definition."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager"
    )
    per_sequence = []
    for row in range(batch.num_sequences):
        sequence = batch.rows(row, row + 1)
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence.token_ids.astype(np.int64))[None]).logits[0]
        index = torch.from_numpy(sequence.sampled_index())
        temperature = torch.from_numpy(sequence.per_sampled(sequence.span_temperature)).double()
        logprobs = torch.log_softmax(logits[index - 1] / temperature[:, None], -1)
        per_sequence.append(
            logprobs.gather(
                1, torch.from_numpy(sequence.token_ids.astype(np.int64))[index][:, None]
            )[:, 0]
        )
    return torch.cat(per_sequence)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_equal_those_of_single_sequences(
    model_dir: Path, temperature: float
) -> None:
    batch = batch_of(3, replace(SHAPE, temperature=temperature))
    packed_logprobs = token_logprobs(load_model(model_dir), pack(batch)).logprobs_C
    assert len(packed_logprobs) == len(batch.logprobs)
    torch.testing.assert_close(
        packed_logprobs.double(), unpacked_logprobs(model_dir, batch), atol=2e-6, rtol=0
    )


def test_entropy_is_that_of_the_distribution(model_dir: Path) -> None:
    entropy = token_logprobs(load_model(model_dir), pack(batch_of(1))).entropy_C
    assert bool(((entropy > 0) & (entropy <= np.log(64) + 1e-5)).all())
    assert not entropy.requires_grad


def test_gradients_are_those_of_the_padded_model(model_dir: Path) -> None:
    batch = batch_of(1)
    model = load_model(model_dir)
    token_logprobs(model, pack(batch)).logprobs_C.sum().backward()  # type: ignore[no-untyped-call]
    plain = load_model(model_dir)
    for row in range(batch.num_sequences):
        token_logprobs(plain, pack(batch.rows(row, row + 1))).logprobs_C.sum().backward()  # type: ignore[no-untyped-call]
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=2e-5, rtol=1e-5)


def test_token_ids_are_not_copied_on_a_cpu() -> None:
    batch = batch_of(2)
    assert pack(batch).token_ids_T.data_ptr() == batch.token_ids.ctypes.data


def test_what_cannot_be_trained_on_is_refused(model_dir: Path) -> None:
    with pytest.raises(UserError, match="temperature 0"):
        pack(batch_of(1, replace(SHAPE, temperature=0.0)))
    shifted = PackedBatch(batch_of(1, SyntheticShape(n=1, num_turns=1, num_tokens=3)).arrow, "demo")
    shifted.__dict__["span_kind"] = np.array([1, 0], np.uint8)
    with pytest.raises(UserError, match="begins with a sampled token"):
        pack(shifted)
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UserError, match="sliding window of 2"):
        packed_attention(
            torch.nn.Identity(),
            query,
            query,
            query,
            None,
            pad_index=torch.arange(4),
            cu_seq_lens_q=torch.tensor([0, 4]),
            max_length_q=4,
            sliding_window=2,
        )
    with pytest.raises(ConfigError, match="directory with config"):
        load_model(model_dir / "nothing")


def test_a_missing_device_is_refused_in_a_single_line(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"device cuda:99.*expected cpu, or a GPU"):
        load_model(model_dir, device="cuda:99")


def test_logits_in_chunks_are_the_same_figures_and_gradients(model_dir: Path) -> None:
    batch, gradients, figures = batch_of(2), [], []
    for rows in (None, 7):
        model = load_model(model_dir)
        output = token_logprobs(model, pack(batch), rows_per_chunk=rows)
        output.logprobs_C.sum().backward()  # type: ignore[no-untyped-call]
        figures.append(output)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(figures[0].logprobs_C, figures[1].logprobs_C, atol=2e-6, rtol=0)
    torch.testing.assert_close(figures[0].entropy_C, figures[1].entropy_C, atol=2e-5, rtol=0)
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-5, rtol=1e-4)
