"""Checkpoints: whole or absent, loadable by transformers, restored bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from prorl.errors import ConfigError, ConflictError, StorageError
from prorl.trainer import checkpoint
from prorl.trainer.checkpoint import (
    Checkpoints,
    TrainingState,
    newest,
    read_progress,
    restore,
    write_weights,
)
from prorl.trainer.lineage import weights_digest
from prorl.trainer.pack import load_model, pack, token_logprobs
from prorl.trainer.untie import untie
from tests.trainer.tiny_model import batch_of, save_model


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    token_logprobs(model, pack(batch_of(1))).logprobs_C.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def trained_model(source: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer)
    return model, optimizer


def saved(root: Path, progress: TrainingState, *args: Any, keep: int = 3, **kwargs: Any) -> Path:
    checkpoints = Checkpoints(root, keep=keep)
    checkpoints.start(progress, *args, **kwargs)
    path = checkpoints.finish()
    assert path is not None
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [checkpoint.SHARD_BYTES, 1000])
def test_restored_training_goes_on_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the next step changes the tensors while the checkpoint is written."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    source = save_model(tmp_path / "model")
    model, optimizer = trained_model(source)
    progress = TrainingState(step=1, version=1, cursor="demo@4", prompt_ids=(1, 2))
    checkpoints = Checkpoints(tmp_path / "out")
    checkpoints.start(progress, model, optimizer, source=source, dtype=dtype)
    drawn = torch.rand(1)
    stepped(model, optimizer)
    path = checkpoints.finish()
    assert path is not None
    assert len(list(path.glob("optimizer/*"))) == 1 or shard_bytes == 1000

    again = load_model(path)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    restore(path, again, other)
    assert torch.equal(torch.rand(1), drawn)
    stepped(again, other)
    assert newest(tmp_path / "out") == path
    assert (read_progress(path), read_progress(path).prompt_ids) == (progress, (1, 2))
    for parameter, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, two)


def test_a_checkpoint_without_a_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    source = save_model(tmp_path / "model")
    model, optimizer = trained_model(source)
    path = saved(tmp_path / "out", TrainingState(step=1), model, optimizer, source=source)
    sorted(path.glob("optimizer/*"))[1].unlink()
    with pytest.raises(ConfigError, match="files of its optimizer"):
        restore(path, model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_weights_with_tied_parameters_stored_once(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "model")
    model, optimizer = trained_model(source)
    assert model.config.tie_word_embeddings
    weights = write_weights(tmp_path / "weights", 3, model, source=source, dtype=dtype)
    path = saved(
        tmp_path / "out",
        TrainingState(step=3),
        model,
        optimizer,
        source=source,
        weights=weights,
        dtype=dtype,
    )
    file = path / "model.safetensors"
    assert file.samefile(weights / "model.safetensors"), "linked, not written again"
    assert [*path.glob("*.safetensors")] == [file], "vLLM loads all that lie there"
    assert weights_digest(path) == weights_digest(weights)
    with safe_open(file, "pt") as tensors:
        assert "lm_head.weight" not in list(tensors.keys())
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert "prorl" not in (path / "config.json").read_text()
    assert (path / "tokenizer.json").exists()
    for parameter, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.to(dtype), two)


def test_untied_weights_are_the_same_function_and_their_checkpoint_stays_tied(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "model")
    model, optimizer = trained_model(source)
    weights = write_weights(tmp_path / "weights", 3, model, source=source, untied=True)
    untied: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    progress = TrainingState(step=3)
    path = saved(tmp_path / "out", progress, model, optimizer, source=source, weights=weights)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    tied: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert tied.config.tie_word_embeddings
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(untied(ids).logits, tied(ids).logits)
    assert weights_digest(path) == weights_digest(weights)
    untie(path, tmp_path / "copy")
    with pytest.raises(ConfigError, match="the files of a model with tied embeddings"):
        untie(weights, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_weights_of_the_same_step_written_twice_have_two_names(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    model = load_model(source)
    root = tmp_path / "weights"
    first, second = (write_weights(root, 1, model, source=source, keep=2) for _ in range(2))
    assert first != second
    third = write_weights(root, 2, model, source=source, keep=2)
    assert {*root.iterdir()} == {second, third}


def test_a_partial_checkpoint_of_a_crash_is_ignored(tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "model"), tmp_path / "out"
    model = load_model(source)
    optimizer = torch.optim.AdamW(model.parameters())
    (out / ".saving-step-00000007").mkdir(parents=True)
    assert newest(out) is None
    for step in (1, 2, 3, 3):
        last = saved(out, TrainingState(step=step), model, optimizer, source=source, keep=2)
    assert sorted(path.name for path in out.iterdir()) == ["step-00000002", "step-00000003"]
    (source / "vocab.json").mkdir()
    with pytest.raises(StorageError, match="step-00000004"):
        saved(out, TrainingState(step=4), model, optimizer, source=source)
    assert newest(out) == last, "one that fails midway leaves the one before"
    with pytest.raises(ConfigError, match="that the trainer wrote"):
        read_progress(tmp_path)


def test_what_fails_in_the_background_is_raised_by_finish(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    model, optimizer = trained_model(source)
    checkpoints = Checkpoints(tmp_path / "out")

    def refuse(path: Path, progress: TrainingState) -> None:
        raise ConflictError(f"{path.name} at {progress.step}")

    checkpoints.start(TrainingState(step=1), model, optimizer, source=source, when_durable=refuse)
    with pytest.raises(ConflictError, match="step-00000001 at 1"):
        checkpoints.finish()
    assert checkpoints.finish() is None
