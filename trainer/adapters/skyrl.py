"""SkyRL learns from a run: its generator's answers are the next groups of the stream.

    class Exp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return Generator(Feed("ROOT", "mine", consumer="skyrl"))
        def get_tracker(self):
            return SkyRLTracker(super().get_tracker(), Feed("ROOT", "mine", consumer="skyrl"))

SkyRL asks for as many trajectories as it has prompts, n of each; a group of ours answers n of its
rows, whatever their text, and keeps their ids. Its advantages go by `uid`, in blocks of n, so a
group that has lost a member, or has a rollout of several sequences, is refused in one line, and so
is one of another temperature than `generator.sampling_params` has. Keep
`Generator.feed.state_dict()` in the checkpoint (`save_checkpoints` of the trainer) and commit then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from prorl.client.records import Feed, Record
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.trainer.adapters import check_temperature, check_version, metrics_of


def output_of(records: list[Record], trajectory_ids: list[Any] | None) -> dict[str, Any]:
    """SkyRL's `GeneratorOutput`: lists of the response, from its first sampled token on."""
    return {
        "prompt_token_ids": [record.ids[: record.first].tolist() for record in records],
        "response_ids": [record.ids[record.first :].tolist() for record in records],
        "rewards": [record.reward for record in records],
        "loss_masks": [record.mask[record.first :].astype(int).tolist() for record in records],
        "rollout_logprobs": [record.logprobs[record.first :].tolist() for record in records],
        "stop_reasons": ["stop"] * len(records),
        "rollout_metrics": {},
        "trajectory_ids": trajectory_ids,
        "is_last_step": None,
    }


class SkyRLTracker:
    """SkyRL's tracker, which stores with the run what it logs of each step."""

    def __init__(self, tracker: Any, feed: Feed) -> None:
        self._tracker, self._feed = tracker, feed

    def log(self, data: Mapping[str, Any], step: int, **options: Any) -> None:
        self._tracker.log(data, step=step, **options)
        self._feed.log(step, metrics_of(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)


class Generator:
    """SkyRL's `GeneratorInterface`; called with what it calls `GeneratorInput`."""

    def __init__(self, feed: Feed) -> None:
        check_version("skyrl")
        self.feed = feed
        self._groups: Iterator[list[Record]] | None = None

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Groups in the order of the input. Raises UserError for one that its rows cannot hold."""
        if self._groups is None:
            self._groups = iter(self.feed)
        ids = input_batch.get("trajectory_ids")
        keys = (
            [trajectory.instance_id for trajectory in ids]
            if ids
            else [0] * len(input_batch["prompts"])
        )
        sampling = input_batch.get("sampling_params") or {}
        records: list[Record] = []
        for _, rows in groupby(keys):
            num_rows, group = len(list(rows)), next(self._groups, None)
            if group is None:
                raise UserError(f"run {self.feed.run} has ended", "more groups, or fewer steps")
            rollouts = len({record.rollout for record in group})
            if not len(group) == rollouts == num_rows:
                raise UserError(
                    f"group {group[0].group} of {pluralize(rollouts, 'rollout')} in"
                    f" {pluralize(len(group), 'sequence')} for {pluralize(num_rows, 'row')}",
                    "n sequences a group: a filter that drops incomplete ones, one a rollout",
                )
            temperature = float(sampling.get("temperature", 1.0))
            check_temperature(group, temperature, "generator.sampling_params.temperature")
            records += group
        return output_of(records, ids)
