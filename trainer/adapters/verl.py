"""verl (V1) learns from a run: groups go into its TransferQueue in the place of its agent loops.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=prorl.trainer.adapters.verl.Manager
    actor_rollout_ref.rollout.calculate_log_probs=True
    algorithm.rollout_correction.bypass_mode=True
    trainer.v1.trainer_mode=sync trainer.val_before_train=False trainer.test_freq=-1
    trainer.logger=[console,file]
    export PRORL_URL=ROOT PRORL_RUN=mine VERL_FILE_LOGGER_PATH=steps.jsonl
    python -m verl.trainer.main_ppo ...

verl draws prompts of its own dataset; each is answered with the next group of the run, whatever its
text. The place of each step's first group is written beside verl's checkpoints, so that a training
that is resumed takes each group once, and is committed when verl's checkpoint of the step before is
on disk. Advantages are verl's own, by group. verl's `grpo` takes the last sequence of a rollout for
its group's mean, and means over tokens (`loss_agg_mode`) count a rollout of several sequences once;
under an estimator or a loss that counts sequences such a rollout is refused, and so is a group of
another temperature than `actor_rollout_ref.rollout.temperature`. verl asks for data in one process.
What verl's file logger wrote of its steps is stored with the run, at each step and at the end.
Ray needs more than two logical CPUs, or `tq.init` waits for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prorl.client.records import Feed, Record
from prorl.errors import ProrlError, UserError
from prorl.trainer.adapters import check_temperature, check_version, metrics_of, num_sequences

STATE = "prorl.json"
LATEST = "latest_checkpointed_iteration.txt"
"""verl's own: the step of its newest whole checkpoint."""

LOG_PATH = "VERL_FILE_LOGGER_PATH"

ESTIMATORS = ("grpo", "gae")
"""verl's advantages that do not count a rollout of several sequences more than once."""


def fields_of(records: Sequence[Record], uid: str) -> Any:
    """A `TensorDict` of jagged int64 and float32 rows, as verl's agent loops put them."""
    import torch
    from tensordict import NonTensorStack, TensorDict

    def jagged(rows: list[Any]) -> Any:
        tensors = [torch.from_numpy(np.ascontiguousarray(row)) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    masks = [record.mask[record.first :].astype(np.int64) for record in records]
    rewards = [np.zeros(len(mask), np.float32) for mask in masks]
    for row, record in zip(rewards, records, strict=True):
        row[-1] = record.reward
    fields = {
        "prompts": jagged([record.ids[: record.first].astype(np.int64) for record in records]),
        "responses": jagged([record.ids[record.first :].astype(np.int64) for record in records]),
        "input_ids": jagged([record.ids.astype(np.int64) for record in records]),
        "position_ids": jagged([np.arange(len(record.ids)) for record in records]),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "rollout_log_probs": jagged([record.logprobs[record.first :] for record in records]),
        "rm_scores": jagged(rewards),
        "uid": NonTensorStack(*[uid] * len(records)),
        "extra_fields": NonTensorStack(*[{"reward_extra_info": {}} for _ in records]),
        "multi_modal_inputs": NonTensorStack(*[{} for _ in records]),
        "num_turns": NonTensorStack(*[2 for _ in records]),
    }
    return TensorDict(fields, batch_size=[len(records)])


def put(records: Sequence[Record], uid: str, step: int, partition: str = "train") -> list[str]:
    """Put a whole group under a prompt's uid; its end is told after all its rows. Returns keys."""
    import transfer_queue as tq

    whole = [record for record in records if len(record.ids) > record.first]
    keys = [f"{uid}_{record.sample}_{record.segment}" for record in whole]
    tags = [
        {
            "status": "success",
            "prompt_len": record.first,
            "response_len": len(record.ids) - record.first,
            "seq_len": len(record.ids),
            "global_steps": step,
            "min_global_steps": int(record.versions[record.versions >= 0].min(initial=2**31 - 1)),
            "max_global_steps": int(record.versions.max(initial=0)),
        }
        for record in whole
    ]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields_of(whole, uid), tags=tags)
    tq.kv_batch_put(keys=[uid], partition_id=partition, tags=[{"status": "finished"}])
    return keys


class StepsFile:
    """Stores with the run what verl's file logger writes: a line of JSON with `step` and `data` for
    each step. Lines of an earlier incarnation, which the file logger cuts off when it starts, are
    not sent again.
    """

    def __init__(self, path: Path, feed: Feed) -> None:
        self._path, self._feed, self._sent = path, feed, 0
        atexit.register(self.send)

    def send(self) -> None:
        """Send the whole lines that were written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._sent)
            whole = file.read().rpartition(b"\n")[0]
        for line in whole.splitlines():
            logged = orjson.loads(line)
            self._feed.log(int(logged["step"]), metrics_of(logged["data"]))
            self._sent += len(line) + 1


class Manager:
    """The class that verl is given as `agent_loop_manager_class`."""

    def __init__(self, config: Any, feed: Feed) -> None:
        self._config = config
        self._feed, self._folder = feed, Path(config.trainer.default_local_dir)
        self._groups: Iterator[list[Record]] | None = None
        self._starts: dict[str, str | None] = {}
        """The cursor before the first group of each step."""
        self._fetching = threading.Lock()  # protects the order of groups: one step after the other
        self.error: BaseException | None = None
        path = os.environ.get(LOG_PATH, "")
        self._steps = StepsFile(Path(path), feed) if path else None

    @classmethod
    def create(cls, config: Any, **_: object) -> Manager:
        check_version("verl")
        consumer = os.environ.get("PRORL_CONSUMER", "primary")
        feed = Feed(os.environ["PRORL_URL"], os.environ["PRORL_RUN"], consumer=consumer)
        return cls(config, feed)

    def generate_sequences(self, prompts: Any) -> None:
        """Answer each prompt with a group, in a thread. Raises UserError for a validation, and the
        stream's error of an earlier call.
        """
        if self.error is not None:
            raise self.error
        if prompts.get("validate", False):
            raise UserError("a validation by verl", "a run of its own: docs/trainer.md")
        uids = [str(uid) for uid in prompts["uid"]]
        steps = prompts["global_steps"]
        step = int(steps if isinstance(steps, int) else next(iter(steps)))
        threading.Thread(
            target=self._answer, args=(uids, step), name="prorl-feed", daemon=True
        ).start()

    def _answer(self, uids: list[str], step: int) -> None:
        waiting = list(uids)
        try:
            with self._fetching:
                if self._steps is not None:
                    self._steps.send()
                self._begin(step)
                assert self._groups is not None
                while waiting:
                    group = next(self._groups, None)
                    if group is None:
                        raise UserError(
                            f"run {self._feed.run} has ended", "more groups or fewer steps"
                        )
                    self._check(group)
                    put(group, waiting[0], step)
                    del waiting[0]
        except ProrlError as error:
            self._fail(waiting, error)
        finally:
            if (other := sys.exception()) is not None:
                self._fail(waiting, other)

    def _fail(self, uids: Sequence[str], error: BaseException) -> None:
        """End verl's wait for these prompts: its buffer raises for a status that it does not know,
        and says it. Without that it waits for ever.
        """
        import transfer_queue as tq

        self.error = error
        tags = [{"is_prompt": True, "status": f"{type(error).__name__}: {error}"} for _ in uids]
        tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)

    def _check(self, group: Sequence[Record]) -> None:
        """Raise UserError for a group that verl would weigh wrongly under these settings."""
        ours = self._config.actor_rollout_ref
        setting = "actor_rollout_ref.rollout.temperature"
        check_temperature(group, ours.rollout.temperature, setting)
        most = max(num_sequences(group).values(), default=1)
        if most == 1:
            return
        mode, loss = ours.actor.loss_agg_mode, ours.actor.policy_loss.loss_mode
        if mode == "seq-mean-token-mean" or loss == "gspo":
            raise UserError(
                f"a rollout of {most} sequences, and a mean over sequences",
                "loss_agg_mode=token-mean and another loss_mode than gspo: it would count"
                f" {most} times",
            )
        if (estimator := str(self._config.algorithm.adv_estimator)) not in ESTIMATORS:
            raise UserError(
                f"a rollout of {most} sequences, and algorithm.adv_estimator={estimator}",
                f"{' or '.join(ESTIMATORS)}: it would count {most} times in its group's mean",
            )

    def _begin(self, step: int) -> None:
        """Find or note where a step begins; commit what verl's newest checkpoint has seen.

        Of an earlier incarnation only steps up to the first one count: later ones begin elsewhere
        now, if the batch has another size.
        """
        path = self._folder / STATE
        if self._groups is None:
            starts = orjson.loads(path.read_bytes()) if path.exists() else {}
            self._starts = {key: start for key, start in starts.items() if int(key) <= step}
            self._feed.cursor = self._starts.get(str(step), self._feed.cursor)
            self._groups = iter(self._feed)
        if str(step) not in self._starts:
            self._starts[str(step)] = self._feed.cursor
            self._folder.mkdir(parents=True, exist_ok=True)
            temp = path.with_suffix(".writing")
            temp.write_bytes(orjson.dumps(self._starts))
            temp.rename(path)
        latest = self._folder / LATEST
        if latest.exists() and (cursor := self._starts.get(str(int(latest.read_text()) + 1))):
            self._feed.commit(cursor)
