"""The training loop: read it top to bottom.

    stream groups -> advantages -> loss -> optimizer step -> checkpoint(weights, cursor, lineage) ->
    record(lineage) -> commit(cursor) -> publish(weights)

A step takes a fixed number of groups wherever the stream's boundaries fall. The order at its end is
what makes training exactly-once: the cursor is durable with the weights that have seen its groups,
before the service may forget them, and weights are durable before anybody samples with them. A
trainer that is killed anywhere goes on from its newest checkpoint, says again what may have been
cut off (all are idempotent), and ends with the parameters that it would have had: bit for bit when
it is fed from a replay.

`output/metrics/` gets a row of figures for each step, one Parquet file a step that is replaced
whole; `output/lineage/` the step's sequences. Both are there when the checkpoint appears: a step
that is trained again has one row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from prorl import plugins
from prorl.client import Client, PackedBatch
from prorl.client.advantages import add_advantages, overlong
from prorl.config import WHOLE_DISTRIBUTION
from prorl.errors import ConfigError
from prorl.flight.ticket import Cursor
from prorl.tasks import load_tasks
from prorl.trainer.checkpoint import TrainingState, newest, read_progress, save
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner
from prorl.trainer.lineage import (
    ROWS,
    Account,
    read_rows,
    trained_rows,
    weights_digest,
    write_rows,
)
from prorl.types import Json

Hook = Callable[[int, Mapping[str, float]], None]
"""Called with (step, figures) after each step."""


def train(
    config: TrainerConfig,
    client: Client,
    *,
    hooks: tuple[Hook, ...] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> TrainingState:
    """Train until `config.steps` steps are done, the run ends, or `stopped()`; the last state."""
    torch.set_num_threads(config.threads)
    if config.publish:  # a live run, not a replay
        sampling = client.run(config.run)["config"]["sampling"]
        if sampling["top_p"] < 1.0 or sampling["top_k"] > 0:
            raise ConfigError(f"run {config.run!r} samples with {sampling}", WHOLE_DISTRIBUTION)
    checkpoints, timer = config.output / "checkpoints", StepTimer()

    found = newest(checkpoints)
    progress = read_progress(found) if found else TrainingState(cursor=str(Cursor(config.run, 0)))
    learner = Learner(config, found or config.model, resume=found is not None)
    parent = weights_digest(found or config.model) if config.lineage != "off" else ""
    if found:
        announce(client, config, progress, found)

    if config.tasks is not None:
        client.submit(config.run, load_tasks(config.tasks), config.n, key="tasks", last=True)
    batches = groups(config, client, progress.cursor)
    for batch in timed(timer, batches, config.steps - progress.step):
        account = Account(batch) if config.lineage != "off" else None
        with timer("train"):
            figures = learner.update(
                batch, step=progress.step, version=progress.version, account=account
            )
        progress = replace(
            progress, step=progress.step + 1, version=progress.version + 1, cursor=batch.cursor
        )
        figures |= {"version": progress.version}
        write_figures(config, progress.step, figures)
        with timer("checkpoint"):
            path = save(
                checkpoints,
                progress,
                learner.model,
                learner.optimizer,
                source=config.model,
                keep=config.keep_checkpoints,
                dtype=getattr(torch, config.dtype),
                finish=partial(write_lineage, config, batch, account, progress, parent),
            )
            parent = weights_digest(path) if account else ""
        with timer("publish"):
            announce(client, config, progress, path, learner.expected(batch))
        figures |= timer.take()
        write_figures(config, progress.step, figures)
        for hook in hooks:
            hook(progress.step, figures)
        if stopped():
            break
    return progress


def groups(config: TrainerConfig, client: Client, cursor: str) -> Iterator[PackedBatch]:
    how: Any = config.advantages
    if plugins.is_place(how):
        how = plugins.load("prorl.advantages", how, ConfigError)
    if config.overlong_tokens:
        how = partial(_overlong, config, how)
    return client.stream(
        config.run,
        config.consumer,
        cursor,
        groups_per_batch=config.groups_per_step,
        wait_s=config.wait_s,
        advantages=how,
    )


def _overlong(config: TrainerConfig, how: Any, batch: PackedBatch) -> Any:
    shaped = overlong(batch, config.overlong_tokens, config.overlong_buffer)
    return add_advantages(shaped, how).advantages


def announce(
    client: Client,
    config: TrainerConfig,
    progress: TrainingState,
    checkpoint: Path,
    expected: Mapping[str, Json] | None = None,
) -> None:
    """Tell the service of a durable checkpoint: lineage, cursor, weights, in that order. All may be
    said again.
    """
    if (checkpoint / ROWS).exists():
        client.record(config.run, read_rows(checkpoint / ROWS))
    client.commit(progress.cursor, config.consumer)
    if config.publish:
        client.publish(config.run, progress.version, checkpoint, expected=expected)


def write_lineage(
    config: TrainerConfig,
    batch: PackedBatch,
    account: Account | None,
    progress: TrainingState,
    parent: str,
    checkpoint: Path,
) -> None:
    """Put the lineage of a step beside its weights, and into the trainer's own log."""
    if account is not None:
        rows = trained_rows(
            batch,
            account,
            progress,
            consumer=config.consumer,
            checkpoint=weights_digest(checkpoint),
            parent=parent,
            logprobs=config.lineage == "logprobs",
        )
        write_rows(checkpoint / ROWS, rows)
        write_rows(config.output / "lineage" / f"step-{progress.step:08d}.parquet", rows)


def write_figures(config: TrainerConfig, step: int, figures: Mapping[str, float]) -> None:
    """A row of step (int64) and one float64 a figure."""
    columns = {"step": pa.array([step], pa.int64())} | {
        name: pa.array([float(value)]) for name, value in sorted(figures.items())
    }
    path = config.output / "metrics" / f"step-{step:08d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path.with_suffix(".writing"))
    path.with_suffix(".writing").rename(path)


class StepTimer:
    """Adds up the seconds of a step's phases."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[f"{phase}_s"] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


def timed(
    timer: StepTimer, batches: Iterator[PackedBatch], num_steps: int
) -> Iterator[PackedBatch]:
    """At most `num_steps` batches, each with the seconds that it was waited for."""
    for _ in range(num_steps):
        with timer("wait"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
