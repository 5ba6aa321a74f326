"""One row of figures per step, as a Parquet file per step, and hooks for trackers.

A step's file is replaced whole, so a step that is trained again after a crash has one row. `SELECT
* FROM 'metrics/*.parquet'` reads the curve while training goes on. The trainer never starts a
tracker: a hook is given (`tensorboard` makes one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Hook = Callable[[int, Mapping[str, float]], None]
"""Called with (step, figures) after each step."""


class StepTimer:
    """Adds up the seconds of a step's phases.

    >>> timer = StepTimer(clock=iter([0.0, 2.0]).__next__)
    >>> with timer("train"): pass
    >>> timer.take()
    {'train_s': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[f"{phase}_s"] = (
                self._seconds.get(f"{phase}_s", 0.0) + self._clock() - start
            )

    def take(self) -> dict[str, float]:
        """What was added up since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def write_row(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    """Write `step-N.parquet` with columns step (int64) and one float64 per figure."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"step": pa.array([step], pa.int64())} | {
        name: pa.array([float(value)]) for name, value in sorted(figures.items())
    }
    final = folder / f"step-{step:08d}.parquet"
    temp = final.with_suffix(".writing")
    pq.write_table(pa.table(columns), temp)
    temp.rename(final)


def has_row(folder: Path, step: int) -> bool:
    """Whether a step's row is there."""
    return (folder / f"step-{step:08d}.parquet").exists()


def tensorboard(folder: Path) -> Hook:
    """A hook that writes TensorBoard scalars below `folder`; needs the package `tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def hook(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return hook
