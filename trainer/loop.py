"""The training loop: read it top to bottom.

    stream groups -> advantages -> loss -> optimizer step -> checkpoint(weights, cursor) ->
    commit(cursor) -> publish(weights)

A step takes a fixed number of groups wherever the stream's boundaries fall. The order at its end is
what makes training exactly-once: the cursor is durable with the weights that have seen its groups,
before the service may forget them, and weights are durable before anybody samples with them. A
trainer that is killed anywhere goes on from its newest checkpoint, says again what may have been
cut off (both are idempotent), and ends with the parameters that it would have had: bit for bit when
it is fed from a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from prorl.client import Client, PackedBatch
from prorl.flight.ticket import Cursor
from prorl.tasks import load_tasks
from prorl.trainer.checkpoint import Progress, newest, read_figures, read_progress, save
from prorl.trainer.config import TrainerConfig
from prorl.trainer.feed import Feed
from prorl.trainer.learner import Learner
from prorl.trainer.metrics import Hook, StepTimer, has_row, write_row
from prorl.trainer.shuffled import shuffled


def train(
    config: TrainerConfig,
    client: Client,
    *,
    hooks: tuple[Hook, ...] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train until `config.steps` steps are done, the run ends, or `stopped()`; returns where it
    stands.
    """
    torch.set_num_threads(config.threads)
    checkpoints, timer = config.output / "checkpoints", StepTimer()

    found = newest(checkpoints)
    progress = read_progress(found) if found else Progress(cursor=str(Cursor(config.run, 0)))
    learner = Learner(config, found or config.model, resume=found is not None)
    if found:
        if not has_row(config.output / "metrics", progress.step):  # we died between the two
            write_row(config.output / "metrics", progress.step, read_figures(found))
        announce(client, config, progress, found)

    feed = make_feed(config, client)
    feed()
    for batch in timed(
        timer, groups(config, client, progress.cursor, feed), config.steps - progress.step
    ):
        with timer("train"):
            figures = learner.update(batch, step=progress.step, version=progress.version)
        progress = replace(
            progress, step=progress.step + 1, version=progress.version + 1, cursor=batch.cursor
        )
        figures |= {"version": progress.version}
        with timer("checkpoint"):
            path = save(
                checkpoints,
                progress,
                learner.model,
                learner.optimizer,
                source=config.model,
                figures=figures,
                keep=config.keep_checkpoints,
            )
        with timer("publish"):
            announce(client, config, progress, path)
            feed()
        figures |= timer.take()
        write_row(config.output / "metrics", progress.step, figures)
        for hook in hooks:
            hook(progress.step, figures)
        if stopped():
            break
    return progress


def groups(
    config: TrainerConfig, client: Client, cursor: str, feed: Callable[[], None]
) -> Iterator[PackedBatch]:
    """Batches of a step's groups, with advantages, from a cursor on."""
    return client.stream(
        config.run,
        config.consumer,
        cursor,
        groups_per_batch=config.groups_per_step,
        wait_s=config.wait_s,
        advantages=shuffled if config.advantages == "shuffled" else config.advantages,
        on_idle=feed,
    )


def announce(client: Client, config: TrainerConfig, progress: Progress, checkpoint: Path) -> None:
    """Tell the service what a durable checkpoint holds: commit its cursor, publish its weights.

    Both may be said again.
    """
    client.commit(progress.cursor, config.consumer)
    if config.publish:
        client.publish(config.run, progress.version, checkpoint)


def make_feed(config: TrainerConfig, client: Client) -> Callable[[], None]:
    """What submits the next steps' tasks; nothing when others do."""
    if config.tasks is None:
        return lambda: None
    target = config.groups_per_step * (1 + config.steps_ahead)
    return Feed(client, config.run, load_tasks(config.tasks), n=config.n, target_groups=target)


def timed(
    timer: StepTimer, batches: Iterator[PackedBatch], num_steps: int
) -> Iterator[PackedBatch]:
    """At most `num_steps` batches, with the time that each was waited for."""
    for _ in range(num_steps):
        with timer("wait"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
