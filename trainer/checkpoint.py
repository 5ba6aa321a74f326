"""Checkpoints: one directory each, that appears whole or not at all.

It holds weights, optimizer, random state, cursor and version.

    ROOT/step-00000020/config.json model.safetensors tokenizer.json ...
                                      loadable by transformers, vLLM and the embedded engine
                       trainer.pt     optimizer and random state; float32 weights, where samplers
                                      get others
                       trainer.json   step, version, cursor
                       trained.parquet  which sequences made it (`lineage.py`)

Invariants: a directory named `step-*` is complete and durable (files are synced, then the directory
is renamed into place); its cursor is the one whose groups its weights have seen, no more and no
less. What a crash leaves has another name and is removed by the next save. Not promised: that older
checkpoints stay; the last `keep` do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from prorl.errors import ConfigError, StorageError

PREFIX = "step-"
_TEMP = ".saving-"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a training stands; everything but tensors."""

    step: int = 0
    version: int = 0
    """Of these weights, as published; 0 is the starting model."""
    cursor: str = ""
    """After the last group that was trained on."""


def save(
    root: Path,
    progress: TrainingState,
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    source: Path,
    keep: int = 3,
    dtype: torch.dtype = torch.float32,
    finish: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Write a checkpoint, with tokenizer files of `source` and weights for samplers of `dtype`.
    `finish` may add files before the directory appears. Raises StorageError.
    """
    final = root / f"{PREFIX}{progress.step:08d}"
    temp = root / f"{_TEMP}{progress.step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        state = {"optimizer": optimizer.state_dict(), "random": _random_state()}
        if dtype == torch.float32:
            model.save_pretrained(temp)
        else:
            state["weights"] = model.state_dict()
            rounded = {name: tensor.to(dtype) for name, tensor in state["weights"].items()}
            model.save_pretrained(temp, state_dict=rounded)
            config = orjson.loads((temp / "config.json").read_bytes())
            config["dtype"] = str(dtype).removeprefix("torch.")
            (temp / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        for name in _TOKENIZER_FILES:
            if (source / name).exists() and not (temp / name).exists():
                shutil.copyfile(source / name, temp / name)
        torch.save(state, temp / "trainer.pt")
        (temp / "trainer.json").write_bytes(orjson.dumps(asdict(progress)))
        finish(temp)
        _sync(*temp.iterdir(), temp)
        if final.exists():
            final.rename(root / f"{_TEMP}replaced")
        temp.rename(final)
        _sync(root)
        _sweep(root)
        for old in _complete(root)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        raise StorageError(f"checkpoint {final}: {error.strerror or error}") from error
    return final


def newest(root: Path) -> Path | None:
    found = _complete(root)
    return found[-1] if found else None


def read_progress(path: Path) -> TrainingState:
    """Where the training stood at a checkpoint. Raises ConfigError."""
    try:
        return TrainingState(**orjson.loads((path / "trainer.json").read_bytes()))
    except (OSError, TypeError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"checkpoint {path}: {error}", "a directory that the trainer wrote"
        ) from None


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put back optimizer, random state and, where samplers got rounded ones, the weights."""
    state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    if "weights" in state:
        model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"]["cpu"])
    if torch.cuda.is_available() and state["random"]["cuda"]:
        torch.cuda.set_rng_state_all(state["random"]["cuda"])


def _random_state() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _complete(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.is_dir())


def _sweep(root: Path) -> None:
    for left in root.glob(f"{_TEMP}*"):
        shutil.rmtree(left)


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
