"""TRL's AsyncGRPOTrainer learns from a run, through its own two protocols.

    feed = Feed("ROOT", "mine", consumer="trl")
    trainer = async_grpo_trainer(feed, model=..., args=AsyncGRPOConfig(...), processing_class=...)
    trainer.train(resume_from_checkpoint=...)

It takes ids, mask, the sampler's logprobs and the advantage of a whole sequence as given, packs
siblings by their common prefix and divides by the tokens that train, as our own trainer does, so
that a rollout of several sequences counts once. Of several processes its first alone has a worker
and deals the rows. Rows that were not sampled at `AsyncGRPOConfig.temperature` are refused. The
cursor lies in its checkpoints (`prorl.json`) and is committed when one is on disk; it is counted by
rows of steps done, since TRL's loader has collated one batch more. For the same reason a live run
needs `max_uncommitted_groups` of two steps at least, or the first never fills.

For TRL 1.16. `weight_transfer` is TRL's protocol: nothing is sent by default; give one that calls
`client.publish`, or `pause_backends`, `announce` and `resume_backends` around NCCL.
"""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prorl.client.records import Feed, Record
from prorl.errors import ProrlError, UserError
from prorl.trainer.adapters import check_temperature, check_version, metrics_callback
from prorl.trainer.adapters.trl import STATE

QUEUE_ROWS = 64


def sample_of(record: Record) -> Any:
    """TRL counts its first weights as version 1, which is our 0."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    versions = record.versions[record.versions >= 0]
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=record.ids,
        completion_mask=record.mask.astype(np.int64),
        old_log_probs=record.logprobs,
        advantage=record.advantage,
        model_version=int(versions.min(initial=2**31 - 2)) + 1,
        group_id=record.group,
        metrics={"reward": record.reward},
    )


class Worker:
    """TRL's `RolloutWorkerProtocol`: a thread moves the feed into a queue of bounded length.

    Behind the end of a run come `rows_per_step` rows that train nothing: TRL trains a step only
    when the next one is collated. It asks for more before it would train those, and hears the end.
    """

    def __init__(self, feed: Feed, rows_per_step: int, temperature: float = 1.0) -> None:
        self.feed, self._rows_per_step, self._temperature = feed, rows_per_step, temperature
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(QUEUE_ROWS)
        self.metrics_queue: queue.Queue[Any] = queue.Queue(1)  # nothing comes into it
        self._ends: list[tuple[int, str]] = []
        """(rows since the start, cursor) after each group, in delivery order."""
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._move, name="prorl-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def update_model_version(self, model_version: int) -> None:
        """Nothing: the service decides what is too old, by groups."""

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() and self.rollout_buffer.empty():
            raise UserError(f"run {self.feed.run} has ended", "more groups, or fewer steps")

    def cursor(self, rows: int) -> str:
        """Returns the cursor behind the groups that lie whole in the first `rows`; else empty."""
        return max(((end, at) for end, at in self._ends if end <= rows), default=(0, ""))[1]

    def _move(self) -> None:
        rows, group = 0, list[Record]()
        try:
            for group in self.feed:
                check_temperature(group, self._temperature, "AsyncGRPOConfig.temperature")
                rows += len(group)
                self._ends.append((rows, self.feed.cursor or ""))
                for record in group:
                    self._put(record)
                if self._stop.is_set():
                    return
        except ProrlError as error:
            self._error = error
        finally:
            self._error = sys.exception() or self._error
        for record in group[:1] * self._rows_per_step:
            self._put(record._replace(mask=np.zeros_like(record.mask)))

    def _put(self, record: Record) -> None:
        sample = sample_of(record)
        while not self._stop.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=0.2)
            except queue.Full:
                continue


class NoTransfer:
    """TRL's `WeightTransferProtocol` for a replay, or for a trainer that publishes elsewhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...


def async_grpo_trainer(feed: Feed, *, weight_transfer: Any = None, **arguments: Any) -> Any:
    """A `trl.experimental.async_grpo.AsyncGRPOTrainer` over the feed; `arguments` are TRL's own.

    Raises UserError for settings under which TRL leaves single rows out.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    check_version("trl")
    args = arguments["args"]
    if args.token_budget != -1 or args.max_staleness < 1 << 20:
        raise UserError(
            f"token_budget {args.token_budget}, max_staleness {args.max_staleness}",
            "token_budget=-1 and max_staleness=1 << 20: the run's own `max_staleness` is the bound",
            "TRL leaves out single rows of a group otherwise, and nobody could count them",
        )
    rows_per_step = (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )
    worker = Worker(feed, rows_per_step, args.temperature)

    class AsyncCursorCallback(TrainerCallback):
        """Keeps the feed's place in TRL's checkpoints; called before the worker starts. Only the
        process that has the worker knows the place.
        """

        begun = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            self.begun = state.global_step
            if self.begun:
                folder = Path(args.output_dir) / f"checkpoint-{self.begun}"
                feed.cursor = orjson.loads((folder / STATE).read_bytes())["cursor"]

        def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if not state.is_world_process_zero:
                return
            cursor = worker.cursor((state.global_step - self.begun) * rows_per_step) or feed.cursor
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / STATE).write_bytes(orjson.dumps({"cursor": cursor}))
            feed.commit(cursor)

    trainer = AsyncGRPOTrainer(
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * 1024),
        rollout_worker=worker,
        weight_transfer=weight_transfer or NoTransfer(),
        **arguments,
    )
    trainer.callback_handler.callbacks.insert(0, AsyncCursorCallback())
    trainer.add_callback(metrics_callback(feed))
    return trainer
