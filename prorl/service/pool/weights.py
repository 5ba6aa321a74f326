"""The records of a publication of weights and of its results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple, Self

import pyarrow as pa
from pydantic import Field, model_validator

from prorl.backends.labels import label_of
from prorl.config import StrictModel
from prorl.schema import APPENDED
from prorl.service.log.log_schema import ANNOUNCED
from prorl.storage.files.layout import RunDir


class Expected(StrictModel):
    """Holds what the trainer itself computes of one prompt, to compare with servers' replies."""

    prompt_ids: tuple[int, ...] = Field(min_length=1, max_length=1 << 16)
    ids: tuple[int, ...] = Field(min_length=1, max_length=4096, description="likely next tokens")
    logprobs: tuple[float, ...] = Field(
        min_length=1, max_length=4096, description="theirs, at temperature 1"
    )
    tolerance: float = Field(default=0.1, gt=0, description="limit of the median difference")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} ids with {len(self.logprobs)} logprobs")
        return self

    def problem(self, sampled: Sequence[tuple[int, float]]) -> str:
        """Returns what is wrong with tokens that a server sampled after the prompt, as (id,
        logprob).

        >>> expected = Expected(prompt_ids=(1,), ids=(5, 6), logprobs=(-0.7, -0.7))
        >>> expected.problem([(5, -0.71), (6, -0.69)]), expected.problem([(5, -2.0)])
        ('', 'logprobs are 1.3 from those of the trainer')
        >>> expected.problem([(7, -0.1)] * 32)
        'none of 32 tokens is one that the trainer expects'
        """
        own = dict(zip(self.ids, self.logprobs, strict=True))
        apart = [abs(logprob - own[id]) for id, logprob in sampled if id in own]
        if apart:
            middle = statistics.median(apart)
            is_near = middle <= self.tolerance
            return "" if is_near else f"logprobs are {middle:.2g} from those of the trainer"
        # As unlikely as a wrong verdict in ten thousand: the trainer named the likely ones.
        other = max(0.0, 1.0 - sum(map(math.exp, self.logprobs)))
        if other ** len(sampled) > 1e-4:
            return ""
        return f"none of {len(sampled)} tokens is one that the trainer expects"


class ServedWeights(NamedTuple):
    run_id: str
    tag: str
    version: int
    path: str
    pause: str = "abort"
    expected: Expected | None = None

    @property
    def label(self) -> str:
        """Tells what all loads of them are called; each has a nonce behind it."""
        return label_of(self.tag, self.version, "").rstrip(":")

    @property
    def is_announced(self) -> bool:
        """They come from the trainer: a server that has them not cannot be given them."""
        return self.pause == ANNOUNCED

    def is_named(self, label: str) -> bool:
        return label.startswith(f"{self.label}:")


class Published(NamedTuple):
    version: int
    fresh: bool = False
    """False when it was published before."""
    failed: Mapping[str, str] = MappingProxyType({})
    pending: bool = False
    """Still being given to backends: say it again."""


class VersionRow(NamedTuple):
    """A row of the run's table `versions`, but for its time."""

    run_id: str
    version: int
    label: str
    path: str = ""
    pause: str = ""
    adapter: bool = False
    loaded_servers: Sequence[str] = ()
    failed_servers: Sequence[str] = ()
    load_s: float = 0.0


def keep_version(directory: RunDir, row: VersionRow, at: float) -> bool:
    """Append to the table `versions`; `at` in seconds since 1970. False when it is there. The log
    decides; the table is for readers of the directory, written behind the log and before the
    trainer has its answer. Raises StorageError.
    """
    # Here: Parquet is megabytes that few gateways need.
    from prorl.storage.files.appended import AppendedTable

    values = {**row._asdict(), "published_at": datetime.fromtimestamp(at, UTC)}
    table = pa.Table.from_pylist([values], schema=APPENDED["versions"])
    return AppendedTable(directory, "versions").append(table, str(row.version))
