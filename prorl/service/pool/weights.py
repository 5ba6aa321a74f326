"""What a publication of weights is about, and what it comes to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

from prorl.backends.labels import label_of
from prorl.schema import APPENDED
from prorl.service.log.log_schema import ANNOUNCED
from prorl.storage.files.layout import RunDir


class Expected(NamedTuple):
    """The trainer's own logprobs at temperature 1 of tokens that may follow a prompt."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float = 0.1

    def problem(self, sampled: Sequence[tuple[int, float]]) -> str:
        """What is wrong with tokens that a server sampled after the prompt, as (id, logprob).

        >>> expected = Expected((1,), (5, 6), (-0.7, -0.7))
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
    """What a backend should serve."""

    run_id: str
    tag: str
    version: int
    path: str
    pause: str = "abort"
    expected: Expected | None = None

    @property
    def label(self) -> str:
        """What all loads of them are called; each has a nonce behind it."""
        return label_of(self.tag, self.version, "").rstrip(":")

    @property
    def is_announced(self) -> bool:
        """They come from the trainer: a server that has them not cannot be given them."""
        return self.pause == ANNOUNCED

    def is_named(self, label: str) -> bool:
        return label.startswith(f"{self.label}:")


class Record(NamedTuple):
    """A row of the run's table `versions`."""

    run_id: str
    version: int
    label: str
    path: str = ""
    pause: str = ""
    adapter: bool = False
    took: tuple[str, ...] = ()
    failed: Mapping[str, str] = MappingProxyType({})
    load_s: float = 0.0


class Published(NamedTuple):
    version: int
    fresh: bool = False
    """False when it was published before."""
    failed: Mapping[str, str] = MappingProxyType({})
    """Backends that did not take it yet, with the reason."""
    pending: bool = False
    """Still being given to backends: say it again."""


def keep_version(directory: RunDir, record: Record, at: float) -> bool:
    """Append one to the table `versions`; `at` in seconds since 1970. False when it is there.

    The log decides; the table is for readers of the directory, written behind the log and before
    the trainer has its answer. Raises StorageError.
    """
    from prorl.storage.keep.appended import (
        AppendedTable,  # Parquet: megabytes that few gateways need
    )

    schema = APPENDED["versions"]
    row = {
        "run_id": record.run_id,
        "version": record.version,
        "label": record.label,
        "path": record.path,
        "pause": record.pause,
        "adapter": record.adapter,
        "took": list(record.took),
        "failed": [f"{name}: {why}" for name, why in record.failed.items()],
        "load_s": record.load_s,
        "at": datetime.fromtimestamp(at, UTC),
    }
    rows = pa.Table.from_pylist([row], schema=schema)
    return AppendedTable(directory, "versions").append(rows, str(record.version))
