"""Lineage: which sequences made a checkpoint, and with which weights.

The rows of a step (`prorl.schema.TRAINED`) are written into its checkpoint, so they exist exactly
when its weights do, and are said to the service from there: again after a crash, which adds nothing
since they are known by the checkpoint's name. The trainer's own log is `lineage/step-N.parquet`
beside its metrics.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prorl.errors import ConfigError
from prorl.schema import TRAINED

if TYPE_CHECKING:
    import torch

    from prorl.client import PackedBatch
    from prorl.trainer.checkpoint import TrainingState

ROWS = "trained.parquet"
"""In a checkpoint."""


class Account:
    """What became of each sequence of a batch; `Learner.update` fills it. B sequences, C sampled
    tokens.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._offsets = batch.logprob_offsets
        self.trained_tokens_B = np.zeros(batch.num_sequences, np.int32)
        self.loss_B = np.zeros(batch.num_sequences, np.float32)
        """Shares of the loss of their minibatch."""
        self.logprobs_C = np.zeros(len(batch.logprobs), np.float32)
        """Under the weights that the minibatch began with."""

    def add(
        self,
        rows: range,
        trained_C: torch.Tensor,
        loss_C: torch.Tensor,
        logprobs_C: torch.Tensor,
    ) -> None:
        offsets = self._offsets[rows.start : rows.stop + 1]
        trained, loss = trained_C.cpu().numpy(), loss_C.float().cpu().numpy()
        for row, (start, stop) in zip(
            rows, zip(offsets - offsets[0], offsets[1:] - offsets[0], strict=False), strict=True
        ):
            self.trained_tokens_B[row] = int(trained[start:stop].sum())
            self.loss_B[row] = loss[start:stop].sum()
        self.logprobs_C[offsets[0] : offsets[-1]] = logprobs_C.float().cpu().numpy()


def trained_rows(
    batch: PackedBatch,
    account: Account,
    progress: TrainingState,
    *,
    consumer: str,
    checkpoint: str,
    parent: str,
    logprobs: bool,
) -> pa.Table:
    assert batch.advantages is not None, "stream with advantages"
    count = batch.num_sequences
    values = {
        "run_id": [batch.run] * count,
        "consumer": [consumer] * count,
        "step": np.full(count, progress.step),
        "checkpoint": [checkpoint] * count,
        "parent": [parent] * count,
        "version": np.full(count, progress.version, np.int32),
        "advantage": batch.advantages,
        "trained_tokens": account.trained_tokens_B,
        "loss": account.loss_B,
        "learner_logprobs": _lists(account.logprobs_C, batch) if logprobs else [None] * count,
    }
    taken = {name: batch.arrow.column(name) for name in TRAINED.names if name not in values}
    columns = {
        name: value if isinstance(value, pa.Array) else pa.array(value, TRAINED.field(name).type)
        for name, value in {**values, **taken}.items()
    }
    return pa.Table.from_arrays([columns[name] for name in TRAINED.names], schema=TRAINED)


def _lists(values_C: np.ndarray[tuple[int], np.dtype[np.float32]], batch: PackedBatch) -> pa.Array:
    dtype = TRAINED.field("learner_logprobs").type
    return pa.ListArray.from_arrays(pa.array(batch.logprob_offsets), pa.array(values_C), type=dtype)


def weights_digest(directory: Path) -> str:
    """SHA-256 of the weights in a Hugging Face directory. Of the file when it is one, else of the
    digests of the shards in order of their names. Raises ConfigError where there are none.
    """
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{directory} holds no weights", "a directory with *.safetensors")
    digests = []
    for path in found:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def write_rows(path: Path, rows: pa.Table) -> None:
    """Whole or not at all, for one who dies meanwhile; not fsynced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(".writing")
    pq.write_table(rows, temp, compression="zstd", write_page_checksum=True)
    temp.rename(path)


def read_rows(path: Path) -> pa.Table:
    """Raises ConfigError for what is no file of ours."""
    try:
        return pq.read_table(path).cast(TRAINED)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"lineage {path}: {error}", "a file that the trainer wrote") from None
