"""Weights for model servers, and checkpoints to resume from.

A step's weights are a Hugging Face directory that model servers load (`write_weights`). A
checkpoint is what a training resumes from, so it also holds the optimizer (`Checkpoints`):

    OUTPUT/weights/step-00000021-a1b2c3/  config.json model.safetensors tokenizer.json ...
    OUTPUT/checkpoints/step-00000020/     the same files, loadable by transformers and vLLM
                                          optimizer/00001-of-00003.safetensors: both moments and
                                          the random state; float32 weights, where `dtype` rounds.
                                          A folder, since vLLM loads every *.safetensors beside
                                          config.json
                                          trainer.json: step, version, cursor
                                          trained.parquet: which sequences made it (`lineage.py`)

Invariants: a directory with its final name is complete and durable (files are synced, then the
directory is renamed into place). A checkpoint's cursor covers exactly the groups that its weights
were trained on. No name of a weights directory is used twice, so a version id that was given for
one never means other weights. A parameter that two modules share (tied embeddings) is written once.
What a crash leaves has another name and is removed by the next write. Not promised: that older
directories stay; the last `keep` do.

Bytes, for a model of P parameters in bfloat16: 2 P for each step's weights, 12 P more for a
checkpoint, whose weights are hard links. While a checkpoint is written the host holds a copy of
these 12 P.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file, save_file

from prorl.errors import ConfigError, StorageError
from prorl.flight.ticket import Cursor
from prorl.trainer.untie import HEAD_FILE, add_head, link_tied

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

SHARD_BYTES = 4 << 30
"""The limit of the optimizer's files: small enough to be read in parallel and to fit file systems
that refuse very large files, large enough that an 8B model has fewer than thirty.
"""

OPTIMIZER = "optimizer"
"""Folder of a checkpoint."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Holds where a training stands; everything but tensors."""

    step: int = 0
    version: int = 0
    """Id of these weights in the service; 0 is the starting model. Counted apart from steps: a
    resumed training publishes its weights again under the next id.
    """
    cursor: str = ""
    """After the last group that was trained on."""
    prompt_ids: tuple[int, ...] = field(default=(), compare=False)
    """The first prompt of that batch: by what a model server says after it, weights that are
    published again are verified.
    """

    @property
    def num_groups(self) -> int:
        """Delivered groups that were trained on: the number in the cursor."""
        return Cursor.parse(self.cursor).seq if self.cursor else 0


def write_weights(
    root: Path,
    step: int,
    model: Any,
    *,
    source: Path,
    keep: int = 3,
    dtype: torch.dtype = torch.float32,
    untied: bool = False,
) -> Path:
    """Write a step's weights, in `dtype`, with the tokenizer files of `source`, under a new name.

    `untied`: those of a model with tied embeddings as servers of an untied copy load them
    (`untie.py`). Raises StorageError.
    """
    final = root / f"{PREFIX}{step:08d}-{secrets.token_hex(3)}"
    with _storage_errors(final):
        temp = _begin(final)
        _write_model(temp, model, source, dtype)
        if untied and model.config.tie_word_embeddings:
            add_head(temp)
        _appear(temp, final)
        for old in sorted(_complete(root), key=lambda path: path.stat().st_mtime_ns)[:-keep]:
            shutil.rmtree(old)
    return final


class Checkpoints:
    """Writes checkpoints, one at a time, while the training goes on.

    checkpoints = Checkpoints(output / "checkpoints", keep=3)
    checkpoints.start(progress, model, optimizer, source=source, when_durable=commit)
    ...                            # the next step samples and trains
    checkpoints.finish()           # it is on disk, and `commit(path, progress)` has returned
    """

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        self._root, self._keep = root, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def start(
        self,
        progress: TrainingState,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        source: Path,
        weights: Path | None = None,
        dtype: torch.dtype = torch.float32,
        add_files: Callable[[Path], None] = lambda directory: None,
        when_durable: Callable[[Path, TrainingState], None] = lambda path, progress: None,
    ) -> None:
        """Begin to write a checkpoint; `finish` must have returned since the one before.

        `weights`: the directory of `write_weights` that holds these weights, whose files are
        linked, without the second copy of tied ones; without it they are written here. `add_files`
        may add files. `when_durable` is called in the writing thread. Raises StorageError.
        """
        assert self._pending is None, "finish() the checkpoint before"
        final = self._root / f"{PREFIX}{progress.step:08d}"
        with _storage_errors(final):
            temp = _begin(final)
            if weights is None:
                _write_model(temp, model, source, dtype)
            else:
                link = link_tied if (weights / HEAD_FILE).exists() else _link
                link(weights, temp)
            add_files(temp)
        # The optimizer's next step changes these tensors in place, so they are copied here.
        tensors = _training_tensors(model, optimizer, with_weights=dtype != torch.float32)
        self._pending = self._thread.submit(
            self._write, temp, final, tensors, progress, when_durable
        )

    def _write(
        self,
        temp: Path,
        final: Path,
        tensors: dict[str, torch.Tensor],
        progress: TrainingState,
        when_durable: Callable[[Path, TrainingState], None],
    ) -> Path:
        with _storage_errors(final):
            shards = list(_shards(tensors))
            (temp / OPTIMIZER).mkdir()
            for number, shard in enumerate(shards, 1):
                name = f"{number:05d}-of-{len(shards):05d}.safetensors"
                save_file(shard, temp / OPTIMIZER / name)
            (temp / "trainer.json").write_bytes(orjson.dumps(asdict(progress)))
            _appear(temp, final)
            for old in _complete(self._root)[: -self._keep]:
                shutil.rmtree(old)
        when_durable(final, progress)
        return final

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written; None where none is.

        Raises StorageError, and what `when_durable` raised.
        """
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None


def newest(root: Path) -> Path | None:
    complete = _complete(root)
    return complete[-1] if complete else None


def read_progress(path: Path) -> TrainingState:
    """Returns where the training stood at a checkpoint. Raises ConfigError."""
    try:
        values = orjson.loads((path / "trainer.json").read_bytes())
        return TrainingState(**{**values, "prompt_ids": tuple(values["prompt_ids"])})
    except (OSError, TypeError, KeyError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"checkpoint {path}: {error}", "a directory that the trainer wrote"
        ) from None


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put back optimizer, random state and, where samplers got rounded ones, the weights.

    Settings of the optimizer (rates, decay) are those of today's configuration. Raises ConfigError.
    """
    files = sorted((path / OPTIMIZER).glob("*.safetensors"))
    expected = int(files[0].stem.rpartition("-")[2]) if files else 1
    if len(files) != expected:
        raise ConfigError(
            f"checkpoint {path} with {len(files)} of {expected} files of its optimizer",
            "a directory that the trainer wrote, copied whole",
        )
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (weights := tensors.get(f"weights.{name}")) is not None:
                parameter.copy_(weights)
            moments = {m: tensors[f"{m}.{name}"] for m in _MOMENTS if f"{m}.{name}" in tensors}
            if moments:
                optimizer.state[parameter] = {
                    m: moments[m] if m == "step" else moments[m].to(parameter.device)
                    for m in moments
                }
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available() and "random.cuda.0" in tensors:
        states = (tensors[name] for name in sorted(tensors) if name.startswith("random.cuda."))
        torch.cuda.set_rng_state_all(list(states))


def _training_tensors(
    model: Any, optimizer: torch.optim.Optimizer, *, with_weights: bool
) -> dict[str, torch.Tensor]:
    """Copies in host memory of all that `restore` puts back, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if with_weights:
            tensors[f"weights.{name}"] = parameter
        for moment in _MOMENTS:
            if moment in (state := optimizer.state.get(parameter, {})):
                tensors[f"{moment}.{name}"] = state[moment]
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        for number, random in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"random.cuda.{number}"] = random
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def _shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard


def _write_model(directory: Path, model: Any, source: Path, dtype: torch.dtype) -> None:
    # `state_dict` names a tied parameter twice; rounding would make two tensors of it.
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    rounded = {
        name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in shared
    }
    model.save_pretrained(directory, state_dict=rounded)
    config = orjson.loads((directory / "config.json").read_bytes())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and not (directory / name).exists():
            shutil.copyfile(source / name, directory / name)


def _link(weights: Path, directory: Path) -> None:
    for file in weights.iterdir():
        os.link(file, directory / file.name)


def _begin(final: Path) -> Path:
    """An empty directory that `_appear` renames to `final`; what a crash left beside it goes."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in final.parent.glob(f"{_TEMP}*"):
        shutil.rmtree(unfinished)
    temp = final.parent / f"{_TEMP}{final.name}"
    temp.mkdir()
    return temp


def _appear(temp: Path, final: Path) -> None:
    """Make a directory durable, then visible under its final name."""
    _sync(*temp.rglob("*"), temp)
    replaced = final.parent / f"{_TEMP}replaced"
    if final.exists():
        final.rename(replaced)
    temp.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _complete(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.is_dir())


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}") from error


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
