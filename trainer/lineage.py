"""Lineage: which sequences made a checkpoint, and with which weights.

The rows of all steps since the checkpoint before (`prorl.schema.TRAINED`) are written into a
checkpoint, so they exist exactly when its weights do. From there they are recorded in the run:
again after a crash, which adds nothing, since they are identified by the checkpoint's digest. The
trainer's own log is `lineage/step-N.parquet` beside its metrics.
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
from prorl.trainer.untie import HEAD_FILE

if TYPE_CHECKING:
    import torch

    from prorl.client import PackedBatch
    from prorl.trainer.checkpoint import TrainingState
    from prorl.trainer.config import TrainerConfig

ROWS = "trained.parquet"
"""File of a checkpoint that holds its rows of lineage."""


class SequenceOutcomes:
    """Holds what became of each sequence of a batch; `Learner.update` fills it. B sequences, C
    sampled tokens.
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


class LineageLog:
    """The rows of the steps since the last checkpoint; they name the checkpoint that they made."""

    def __init__(self, config: TrainerConfig, parent: str) -> None:
        """`parent`: digest of the weights that training starts or resumes with."""
        self._config, self._parent = config, parent
        self._rows: dict[int, pa.Table] = {}
        """The rows by step."""

    def write(self, checkpoint: Path) -> None:
        """Put the rows beside a checkpoint's weights, and each step's into our own log."""
        digest = weights_digest(checkpoint)
        tables = []
        for step, rows in self._rows.items():
            for name, value in (("checkpoint", digest), ("parent_checkpoint", self._parent)):
                place, column = TRAINED.get_field_index(name), pa.repeat(value, rows.num_rows)
                rows = rows.set_column(place, TRAINED.field(name), column)
            write_rows(self._config.output / "lineage" / f"step-{step:08d}.parquet", rows)
            tables.append(rows)
        write_rows(checkpoint / ROWS, pa.concat_tables(tables))
        self._parent, self._rows = digest, {}

    def add(self, batch: PackedBatch, account: SequenceOutcomes, progress: TrainingState) -> None:
        """Note what a step trained on; `progress` is after it."""
        assert batch.advantages is not None, "stream with advantages"
        count, wants_logprobs = batch.num_sequences, self._config.lineage == "logprobs"
        values = {
            "run_id": [batch.run] * count,
            "consumer": [self._config.consumer] * count,
            "step": np.full(count, progress.step),
            "checkpoint": [""] * count,
            "parent_checkpoint": [""] * count,
            "version": np.full(count, progress.version, np.int32),
            "advantage": batch.advantages,
            "trained_tokens": account.trained_tokens_B,
            "loss": account.loss_B,
            "learner_logprobs": (
                _lists(account.logprobs_C, batch) if wants_logprobs else [None] * count
            ),
        }
        values |= {name: batch.arrow.column(name) for name in TRAINED.names if name not in values}
        columns = [
            value if isinstance(value, pa.Array) else pa.array(value, TRAINED.field(name).type)
            for name, value in ((name, values[name]) for name in TRAINED.names)
        ]
        self._rows[progress.step] = pa.Table.from_arrays(columns, schema=TRAINED)


def _lists(values_C: np.ndarray[tuple[int], np.dtype[np.float32]], batch: PackedBatch) -> pa.Array:
    dtype = TRAINED.field("learner_logprobs").type
    return pa.ListArray.from_arrays(pa.array(batch.logprob_offsets), pa.array(values_C), type=dtype)


def weights_digest(directory: Path) -> str:
    """SHA-256 of the weights in a Hugging Face directory. Of the file when it is one, else of the
    digests of the shards in order of their names; an untied copy has its model's. Raises
    ConfigError where there are none.
    """
    files = sorted(file for file in directory.glob("*.safetensors") if file.name != HEAD_FILE)
    if not files:
        raise ConfigError(f"{directory} holds no weights", "a directory with *.safetensors")
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def write_rows(path: Path, rows: pa.Table) -> None:
    """Writes the file whole or not at all, for one who dies meanwhile; not fsynced."""
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
