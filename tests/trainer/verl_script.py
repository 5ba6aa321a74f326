"""verl's sync trainer as far as data goes: its own replay buffer over TransferQueue, on a CPU."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from prorl.trainer.adapters.verl import LATEST, Manager


def trained(folder: Path, *, kill_after: int, steps: int, prompts: int) -> list[tuple[Any, ...]]:
    """(prompt, response, mask, logprobs) of all rows that `steps` steps train.

    The trainer is killed in step `kill_after`, whose checkpoint is not there, and started again.
    """
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder)},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0},
                "actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"}},
            },
        }
    )
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    rows: list[tuple[Any, ...]] = []

    def step(manager: Manager, number: int) -> list[tuple[Any, ...]]:
        uids = [uuid.uuid4().hex for _ in range(prompts)]
        tags = [{"is_prompt": True, "status": "pending", "global_steps": number} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        batch = TensorDict({"uid": NonTensorStack(*uids)}, batch_size=[prompts])
        batch["global_steps"] = NonTensorStack(*[number] * prompts)
        manager.generate_sequences(batch)
        buffer = ReplayBuffer("sync", OmegaConf.create({}), 1, "drop", OmegaConf.create({}), 0.2)
        sampled = buffer.sample(partition_id="train", batch_size=prompts, global_steps=number)
        meta = sampled[0] if isinstance(sampled, tuple) else sampled
        data = tq.kv_batch_get(keys=meta.keys, partition_id="train")
        names = ("prompts", "responses", "response_mask", "rollout_log_probs")
        columns = [[row.numpy() for row in data[name].unbind()] for name in names]
        tq.kv_clear(keys=[*meta.keys, *uids], partition_id="train")
        return list(zip(*columns, strict=True))

    try:
        manager = Manager.create(config)
        for number in range(1, kill_after):
            rows += step(manager, number)
            (folder / LATEST).write_text(str(number))
        step(manager, kill_after)
        again = Manager.create(config)
        for number in range(kill_after, steps + 1):
            rows += step(again, number)
        with pytest.raises(ValueError, match="has ended"):  # in the place of waiting for ever
            step(again, steps + 1)
    finally:
        tq.close()
        ray.shutdown()
    return rows
