"""Checkpoints: whole or absent, loadable by transformers, restored bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prorl.errors import ConfigError, StorageError
from prorl.trainer.checkpoint import TrainingState, newest, read_progress, restore, save
from prorl.trainer.pack import load_model, pack, token_logprobs
from tests.trainer.tiny import batch_of, save_model


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    token_logprobs(model, pack(batch_of(1))).logprobs_C.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def test_restored_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer)
    progress = TrainingState(step=1, version=1, cursor="demo@4")
    path = save(tmp_path / "out", progress, model, optimizer, source=source)
    drawn = torch.rand(1)
    stepped(model, optimizer)

    again = load_model(path)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    restore(path, again, other)
    assert torch.equal(torch.rand(1), drawn)
    stepped(again, other)
    assert newest(tmp_path / "out") == path
    assert read_progress(path) == progress
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_transformers_loads_it_without_us(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "model")
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters())
    path = save(tmp_path / "out", TrainingState(step=3), model, optimizer, source=source)
    plain: Any = AutoModelForCausalLM.from_pretrained(path)
    assert "prorl" not in (path / "config.json").read_text()
    assert (path / "tokenizer.json").exists()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_a_crash_left_is_no_checkpoint(tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "model"), tmp_path / "out"
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters())
    (out / ".saving-00000007").mkdir(parents=True)
    assert newest(out) is None
    for step in (1, 2, 3, 3):
        last = save(out, TrainingState(step=step), model, optimizer, source=source, keep=2)
    assert sorted(path.name for path in out.iterdir()) == ["step-00000002", "step-00000003"]
    (source / "vocab.json").mkdir()
    with pytest.raises(StorageError, match="checkpoint"):
        save(out, TrainingState(step=4), model, optimizer, source=source)
    assert newest(out) == last, "one that fails midway leaves the one before"
    with pytest.raises(ConfigError, match="that the trainer wrote"):
        read_progress(tmp_path)
