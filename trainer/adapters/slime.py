"""slime and miles learn from a run: their rollout function asks the feed instead of engines.

    --rollout-function-path prorl.trainer.adapters.slime.rollout
    --data-source-path prorl.trainer.adapters.slime.FeedGroups
    --custom-reward-post-process-path prorl.trainer.adapters.slime.rewards
    --custom-config-path prorl.yaml      # prorl_url: ROOT or http://..., prorl_run: mine
    --use-tis                            # the sampler's logprobs are then heeded

A call of theirs takes `rollout_batch_size` groups. With `--use-rollout-routing-replay` experts come
along, of a run that keeps them (`run.routed_experts`). The cursor is saved and loaded where slime
saves its data source, beside its checkpoint. `rewards` hands our advantages over: slime's own would
be normalised over the whole batch as soon as one group has a member less. The sequences of one
rollout share its `rollout_id`, so that it counts once. Groups of another temperature than
`--rollout-temperature` are refused. slime asks for data in one process and deals it to its ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from prorl.client.records import Feed, Record
from prorl.errors import UserError
from prorl.trainer.adapters import check_temperature


def sample_of(record: Record, args: Any) -> Any:
    """slime's `Sample`: mask and logprobs are those of the response, from its first token on.

    Raises UserError for a record without the experts that slime would replay.
    """
    from slime.utils.types import Sample

    experts = None
    if _replays(args):
        if record.routed_experts is None or len(record.routed_experts) < len(record.ids) - 1:
            raise UserError(
                f"rollout {record.rollout} without the experts of all its tokens, and"
                " --use-rollout-routing-replay",
                "a run with `routed_experts: true`, over servers that say them",
            )
        shape = (-1, args.num_layers, args.moe_router_topk)
        experts = record.routed_experts.astype("int32").reshape(shape)
    return Sample(
        group_index=record.group,
        index=record.rollout,
        rollout_id=record.rollout,
        tokens=record.ids.tolist(),
        response_length=len(record.ids) - record.first,
        loss_mask=record.mask[record.first :].astype(int).tolist(),
        rollout_log_probs=record.logprobs[record.first :].tolist(),
        reward=record.reward,
        weight_versions=[str(version) for version in sorted({*record.versions.tolist()} - {-1})],
        status=Sample.Status.COMPLETED,
        metadata={"prorl_advantage": record.advantage},
        rollout_routed_experts=experts,
    )


def _replays(args: Any) -> bool:
    return bool(getattr(args, "use_rollout_routing_replay", False))


class FeedGroups:
    """slime's data source: the feed, and its place in slime's checkpoints."""

    def __init__(self, args: Any) -> None:
        consumer = getattr(args, "prorl_consumer", "primary")
        self._args = args
        self._feed = Feed(
            args.prorl_url, args.prorl_run, consumer=consumer, routed_experts=_replays(args)
        )
        self._groups = iter(self._feed)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """The next groups. Raises UserError when the run ends before they came."""
        samples = []
        for group in self._groups:
            temperature = getattr(self._args, "rollout_temperature", 1.0)
            check_temperature(group, temperature, "--rollout-temperature")
            samples.append([sample_of(record, self._args) for record in group])
            if len(samples) == num_samples:
                return samples
        raise UserError(
            f"run {self._feed.run} has ended with {len(samples)} of {num_samples} groups",
            "more groups, or fewer rollouts",
        )

    def add_samples(self, samples: list[list[Any]]) -> None:
        raise UserError("groups given back to a run", "none: the service decides what is repeated")

    def save(self, rollout_id: int) -> None:
        """Saves the cursor beside slime's own state of this step; it is then committed."""
        path = self._path(self._args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_suffix(".writing")
        temp.write_bytes(orjson.dumps(self._feed.state_dict()))
        temp.rename(path)
        self._feed.commit()

    def load(self, rollout_id: int | None = None) -> None:
        """Go on behind a checkpoint; from the consumer's own place where there is none."""
        path = self._path(self._args.load, rollout_id)
        if rollout_id is not None and path.exists():
            self._feed.load_state_dict(orjson.loads(path.read_bytes()))
            self._groups = iter(self._feed)

    def _path(self, folder: str, rollout_id: int | None) -> Path:
        return Path(folder or ".") / "rollout" / f"prorl_{rollout_id}.json"

    def __len__(self) -> int:
        raise UserError("the length of a run's stream", "`--num-rollout`, which ends the training")


def rollout(args: Any, rollout_id: int, data_source: FeedGroups, evaluation: bool = False) -> Any:
    """slime's rollout function."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    if evaluation:
        raise UserError("an evaluation by slime", "a run of its own: docs/trainer.md")
    return RolloutFnTrainOutput(samples=data_source.get_samples(args.rollout_batch_size))


def rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """slime's hook after rollouts: rewards, and what it takes as advantages."""
    return (
        [sample.reward for sample in samples],
        [sample.metadata["prorl_advantage"] for sample in samples],
    )
