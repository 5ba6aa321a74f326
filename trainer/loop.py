"""The training loop: read it top to bottom.

    stream groups -> advantages -> loss -> optimizer step -> weights -> publish(weights)
    every N steps: checkpoint(weights, optimizer, cursor, lineage) -> record(lineage)
                   -> commit(cursor)

A step takes a fixed number of groups wherever the stream's boundaries fall. Training is
exactly-once behind the newest checkpoint, because its cursor is durable with the weights that were
trained on its groups before the service may forget them. Every step's weights are durable before
anybody samples with them. Checkpoints are written in the background while the next step samples.

A trainer that is killed anywhere resumes from its newest checkpoint. It publishes these weights
under the service's next id before it takes a group, since the ids of lost steps are never used
again; it repeats what may have been cut off (all calls are idempotent), and ends with the
parameters that it would have had: bit for bit when it reads a replay.

`output/metrics/` gets a row of figures for each step, one Parquet file a step that is replaced
whole; `output/lineage/` the step's sequences. A step that is trained again has one row. A live run
stores the figures, too (`Client.log`).
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
from prorl.client import Client, PackedBatch, connect
from prorl.client.advantages import add_advantages, overlong
from prorl.config import WHOLE_DISTRIBUTION
from prorl.errors import ConfigError
from prorl.flight.ticket import Cursor
from prorl.tasks import load_tasks
from prorl.trainer.checkpoint import (
    Checkpoints,
    TrainingState,
    newest,
    read_progress,
    write_weights,
)
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner, first_prompt
from prorl.trainer.lineage import ROWS, LineageLog, SequenceOutcomes, read_rows, weights_digest

MOST_STEPS = 10
"""From one checkpoint to the next where nobody says how many: what a crash may cost is trained
again, while a checkpoint of a large model takes as long as several steps.
"""

PHASES = ("wait", "train", "publish", "checkpoint")
"""The phases of a step, as `StepTimer` names them."""

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
    bound = uncommitted_bound(config, client)
    steps_between = checkpoint_steps(config, bound)
    directory, timer = config.output / "checkpoints", StepTimer()
    checkpoints = Checkpoints(directory, keep=config.keep_checkpoints)

    resumed = newest(directory)
    start = resumed or config.model
    progress = (
        read_progress(resumed) if resumed else TrainingState(cursor=str(Cursor(config.run, 0)))
    )
    learner = Learner(config, start, resume=resumed is not None)
    lineage = LineageLog(config, weights_digest(start)) if config.lineage != "off" else None
    progress = publish_start(config, client, progress, start, learner)
    if resumed:
        announce(client, config, resumed, progress)

    if config.tasks is not None:
        client.submit(config.run, load_tasks(config.tasks), config.n, key="tasks", last=True)
    batches = timed(timer, groups(config, client, progress.cursor), config.steps - progress.step)
    saved, saved_at = progress, time.monotonic()
    with connect(config.service) as background:

        def save(weights: Path | None) -> None:
            nonlocal saved, saved_at
            checkpoints.finish()
            checkpoints.start(
                progress,
                learner.model,
                learner.optimizer,
                source=config.model,
                weights=weights,
                dtype=getattr(torch, config.dtype),
                add_files=lineage.write if lineage else lambda checkpoint: None,
                when_durable=partial(announce, background, config),
            )
            saved, saved_at = progress, time.monotonic()

        weights: Path | None = None
        while True:
            if bound and progress.num_groups - saved.num_groups + config.groups_per_step > bound:
                checkpoints.finish()  # until it is committed the service starts nothing more
            batch = next(batches, None)
            if batch is None:
                break
            account = SequenceOutcomes(batch) if lineage else None
            with timer("train"):
                figures = learner.update(
                    batch, step=progress.step, version=progress.version, account=account
                )
            progress = replace(
                progress,
                step=progress.step + 1,
                cursor=batch.cursor,
                prompt_ids=tuple(first_prompt(batch)),
            )
            with timer("publish"):
                weights, version = publish(config, client, progress, learner)
            progress = replace(progress, version=version)
            if lineage and account:
                lineage.add(batch, account, progress)
            figures |= {"version": version}
            write_figures(config, progress.step, figures)
            is_due = progress.step - saved.step >= steps_between
            if is_due or time.monotonic() - saved_at >= config.checkpoint_s:
                with timer("checkpoint"):
                    save(weights)
            figures |= timer.take()
            figures |= {"idle_share": idle_share(figures)}
            write_figures(config, progress.step, figures)
            client.log(
                config.run, progress.step, figures, version=version, consumer=config.consumer
            )
            for hook in hooks:
                hook(progress.step, figures)
            if stopped():
                break
        if progress.step > saved.step:
            save(weights)
        checkpoints.finish()
    return progress


def uncommitted_bound(config: TrainerConfig, client: Client) -> int:
    """Groups that the run may have delivered without a commit; 0 = no bound (a replay)."""
    if not config.publish:
        return 0
    run = client.run(config.run)["config"]
    return int(run["max_uncommitted_groups"]) if run["delivery"] == "stream" else 0


def checkpoint_steps(config: TrainerConfig, bound: int) -> int:
    """Steps from one checkpoint to the next. Raises ConfigError where the run would wait for ever.

    >>> from prorl.trainer.config import TrainerConfig
    >>> config = TrainerConfig(service="s", run="r", model="m", output="o", steps=9)
    >>> checkpoint_steps(config, 0), checkpoint_steps(config, 256), checkpoint_steps(config, 32)
    (10, 4, 1)
    """
    if not config.checkpoint_steps:
        half = bound // (2 * config.groups_per_step) if bound else MOST_STEPS
        return max(1, min(half, MOST_STEPS))
    groups = config.checkpoint_steps * config.groups_per_step
    if bound and groups > bound:
        raise ConfigError(
            f"checkpoint_steps {config.checkpoint_steps} x groups_per_step"
            f" {config.groups_per_step} = {groups} groups without a commit",
            f"at most max_uncommitted_groups of run {config.run!r}, {bound}",
            "write checkpoints more often, or make the run with a larger max_uncommitted_groups",
        )
    return config.checkpoint_steps


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


def publish_start(
    config: TrainerConfig,
    client: Client,
    progress: TrainingState,
    weights: Path,
    learner: Learner,
) -> TrainingState:
    """Publish the weights that training starts with, where the service has newer ones.

    These come from steps that no checkpoint holds: their ids are used, so what the servers get now
    has the next one.
    """
    if not config.publish or client.run(config.run)["allocated_version"] == progress.version:
        return progress
    if config.untie:
        weights = _written(config, progress, learner)
    reply = client.publish(
        config.run,
        0,
        weights,
        expected=learner.expected(progress.prompt_ids),
        trained=progress.cursor,
    )
    return replace(progress, version=int(reply["version"]))


def _written(config: TrainerConfig, progress: TrainingState, learner: Learner) -> Path:
    """A directory of the learner's weights for samplers."""
    return write_weights(
        config.output / "weights",
        progress.step,
        learner.model,
        source=config.model,
        keep=config.keep_checkpoints,
        dtype=getattr(torch, config.dtype),
        untied=config.untie,
    )


def publish(
    config: TrainerConfig, client: Client, progress: TrainingState, learner: Learner
) -> tuple[Path | None, int]:
    """Write a step's weights and have the model servers load them: their directory and their id."""
    if not config.publish:
        return None, progress.version + 1
    weights = _written(config, progress, learner)
    reply = client.publish(
        config.run,
        0,
        weights,
        expected=learner.expected(progress.prompt_ids),
        trained=progress.cursor,
    )
    return weights, int(reply["version"])


def announce(
    client: Client, config: TrainerConfig, checkpoint: Path, progress: TrainingState
) -> None:
    """Record a durable checkpoint's lineage, then commit its cursor. Both are idempotent."""
    if (checkpoint / ROWS).exists():
        client.record(config.run, read_rows(checkpoint / ROWS))
    client.commit(progress.cursor, config.consumer)


def write_figures(config: TrainerConfig, step: int, figures: Mapping[str, float]) -> None:
    """A row of step (int64) and one float64 a figure."""
    columns = {"step": pa.array([step], pa.int64())} | {
        name: pa.array([float(value)]) for name, value in sorted(figures.items())
    }
    path = config.output / "metrics" / f"step-{step:08d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path.with_suffix(".writing"))
    path.with_suffix(".writing").rename(path)


def idle_share(figures: Mapping[str, float]) -> float:
    """The share of a step in which the trainer waited for groups.

    >>> idle_share({"wait_s": 1.0, "train_s": 2.0, "publish_s": 1.0})
    0.25
    """
    total = sum(figures.get(f"{phase}_s", 0.0) for phase in PHASES)
    return figures.get("wait_s", 0.0) / total if total else 0.0


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
    """Yields at most `num_steps` batches, each with the seconds that it was waited for."""
    for _ in range(num_steps):
        with timer("wait"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
