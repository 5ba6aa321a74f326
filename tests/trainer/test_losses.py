"""The loss of each trainer over the same rows, beside a reference in float64: rollouts of one and
of three sequences, sampled at temperatures 0.7 and 1; greedy rows are refused. `-s` prints it all.

Ours, TRL's two and verl's are the trainers' own code. Tinker's loss is computed on its servers, and
prime-rl, slime and SkyRL train on GPUs only: theirs are their formulas over the adapter's rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import PackedBatch
from prorl.client.advantages import mean_std
from prorl.client.records import Feed, Record, records
from prorl.errors import UserError
from prorl.schema import MAX_SEGMENTS
from prorl.trainer.adapters.trl import PER_SEQUENCE
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner
from tests.client.replay_process import served
from tests.trainer.tiny_model import save_model

NUM_ROWS, GROUPS, LENGTH = 6, 2, 50
CLIP = 0.2
MOST = 2e-5
"""Losses are about 0.1, computed in float32."""

CASES = [(count, heat) for count in (1, 3) for heat in (0.7, 1.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@cache
def batches(model: Path, sequences: int, temperature: float) -> list[pa.RecordBatch]:
    """Groups of six sequences; with `sequences` 3 those of places 1 to 3 are one rollout. What was
    recorded while sampling is what the model says, and some noise, so that some ratios are clipped.
    """
    shape = SyntheticShape(
        n=NUM_ROWS, num_tokens=24, num_turns=2, vocab_size=64, temperature=temperature
    )
    made = []
    for number in range(GROUPS):
        batch = group(number, shape)
        if sequences == 3:
            sample = np.array([0, 1, 1, 1, 2, 3])
            segment = np.array([0, 0, 1, 2, 0, 0])
            rollout = number * NUM_ROWS + sample
            columns = {
                "sample_index": pa.array(sample, pa.int32()),
                "rollout_id": pa.array(rollout, pa.int64()),
                "segment": pa.array(segment, pa.int32()),
                "parent": pa.array(segment - 1, pa.int32()),
                "sequence_id": pa.array(rollout * MAX_SEGMENTS + segment, pa.int64()),
                "weight": pa.array([1, 1 / 3, 1 / 3, 1 / 3, 1, 1], pa.float32()),
                "reward": pa.array([0, 1, 1, 1, 0, 1], pa.float32()),
            }
            for name, column in columns.items():
                place = batch.schema.get_field_index(name)
                batch = batch.set_column(place, batch.schema.field(name), column)
        made.append(batch)
    rng = np.random.default_rng(1)
    policy = policy_of(model, torch.float64)
    for number, batch in enumerate(made):
        sampled_logprobs = [
            policy.logprobs(record.ids, temperature or 1.0)[1:][record.mask[1:]]
            for record in records(PackedBatch(delivered([batch]), "demo"))
        ]
        place = batch.schema.get_field_index("logprobs")
        field = batch.schema.field("logprobs")
        noisy = np.concatenate(sampled_logprobs) + rng.normal(
            0, 0.15, sum(map(len, sampled_logprobs))
        )
        column = pa.ListArray.from_arrays(
            batch.column("logprobs").offsets, pa.array(noisy, pa.float32()), type=field.type
        )
        made[number] = batch.set_column(place, field, column)
    return made


@cache
def policy_of(model: Path, dtype: torch.dtype) -> Policy:
    return Policy(model, dtype)


class Policy:
    """The tiny model, one sequence at a time, by its own eager attention."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="eager"
        )
        self._model = loaded.eval()

    @torch.no_grad()
    def logprobs(self, ids: Any, temperature: Any) -> Any:
        """[L] of each token after those before it, 0 for the first; `temperature`: one, or [L] by
        which the logits of each position are divided.
        """
        tokens = torch.as_tensor(np.asarray(ids)).long()
        heat = torch.as_tensor(np.broadcast_to(temperature, len(tokens)).copy())[:-1, None]
        logits = self._model(tokens[None], use_cache=False).logits[0, :-1]
        every = (logits / heat.to(logits.dtype)).log_softmax(-1)
        chosen = every.gather(1, tokens[1:, None])[:, 0]
        return np.concatenate([[0.0], chosen.double().numpy()])


def clipped(ratio: Any, advantage: Any) -> Any:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)


def reference(rows: list[Record], model: Path, temperature: float, kind: str) -> float:
    """A rollout counts once. `tokens`: mean over tokens; `constant`: over rollouts of LENGTH
    tokens; `rollouts`: over rollouts of their sequences' means; `gspo`: that, by sequences' ratios;
    `whole rollouts`: over rollouts of the means over all their tokens; `sum`: of tokens, not
    clipped, as Tinker's is.
    """
    policy, by_rollout = policy_of(model, torch.float64), dict[int, list[Any]]()
    for record in rows:
        trained = record.mask
        difference = policy.logprobs(record.ids, temperature) - record.logprobs.astype(float)
        if kind == "gspo":
            value = clipped(np.exp(difference[trained].mean()), record.advantage)
            each = np.full(trained.sum(), value)
        elif kind == "sum":
            each = np.exp(difference[trained]) * record.advantage
        else:
            each = clipped(np.exp(difference[trained]), record.advantage)
        by_rollout.setdefault(record.rollout, []).append(each)
    flat = np.concatenate([each for sequences in by_rollout.values() for each in sequences])
    if kind in ("tokens", "sum"):
        return float(-flat.sum() / (len(flat) if kind == "tokens" else 1))
    if kind == "constant":
        return float(-flat.sum() / (len(by_rollout) * LENGTH))
    if kind == "whole rollouts":
        return float(-np.mean([np.concatenate(each).mean() for each in by_rollout.values()]))
    means = [np.mean([each.mean() for each in parts]) for parts in by_rollout.values()]
    return float(-np.mean(means))


Loss = Callable[[list[Record], list[pa.RecordBatch], Path, float, Path], float]


def ours(**settings: Any) -> Loss:
    def loss(_: Any, made: Any, model: Path, temperature: float, folder: Path) -> float:
        config = TrainerConfig(
            service="unused",
            run="demo",
            model=model,
            output=folder / "ours",
            steps=1,
            clip_high=CLIP,
            dual_clip=1e30,
            tokens_per_pass=40,
            **settings,
        )
        batch = PackedBatch(delivered(made), "demo")
        batch = batch.with_advantages(mean_std(batch))
        return Learner(config, model, resume=False).update(batch, step=0, version=0)["loss"]

    return loss


@contextmanager
def fed(made: list[pa.RecordBatch], folder: Path) -> Iterator[Feed]:
    with served(write_run(folder / "demo", made, "demo")) as location:
        yield Feed(location, "demo", consumer="any")


def trl(loss_type: str, level: str = "token") -> Loss:
    def loss(_: Any, made: Any, model: Path, temperature: float, folder: Path) -> float:
        pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
        from tests.trainer.trl_script import make

        losses: list[float] = []
        with fed(made, folder) as feed:
            trainer = make(
                feed,
                model,
                folder / "out",
                1,
                NUM_ROWS * GROUPS,
                [],
                temperature=temperature,
                loss_type=loss_type,
                importance_sampling_level=level,
                max_completion_length=LENGTH,
            )
            compute = trainer._compute_loss

            def watched(*arguments: Any) -> Any:
                losses.append(float(value := compute(*arguments)))
                return value

            trainer._compute_loss = watched
            trainer.train()
        return losses[0]

    return loss


def trl_async(_: Any, made: Any, model: Path, temperature: float, folder: Path) -> float:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    from tests.trainer.trl_async_script import make

    losses: list[float] = []
    with fed(made, folder) as feed:
        trainer = make(
            feed, model, folder / "out", 1, 1, [], rows=NUM_ROWS * GROUPS, temperature=temperature
        )
        compute = trainer.compute_loss

        def watched(*arguments: Any, **more: Any) -> Any:
            losses.append(float(value := compute(*arguments, **more)))
            return value

        trainer.compute_loss = watched
        trainer.train()
    return losses[0]


def verl(mode: str) -> Loss:
    def loss(rows: list[Record], _: Any, model: Path, temperature: float, folder: Path) -> float:
        pytest.importorskip("verl", reason="verl is not installed (pip install verl==0.9.0)")
        from omegaconf import OmegaConf
        from verl import DataProto
        from verl.trainer.ppo import core_algos
        from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

        from prorl.trainer.adapters.verl import Manager, fields_of

        settings = {
            "trainer": {"default_local_dir": str(folder)},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {
                "rollout": {"temperature": temperature},
                "actor": {"loss_agg_mode": mode, "policy_loss": {"loss_mode": "vanilla"}},
            },
        }
        manager = Manager(OmegaConf.create(settings), Feed("unused", "demo"))
        manager._check(rows)
        keys = [f"u{row.group}_{row.sample}_{row.segment}" for row in rows]
        data = DataProto(batch=fields_of(rows, "u").to_padded_tensor())
        data.batch["token_level_rewards"] = data.batch["rm_scores"]
        data.non_tensor_batch["uid"] = np.array([f"u{row.group}" for row in rows], dtype=object)
        data = compute_advantage_for_multi_trajectories(
            data, keys, core_algos.AdvantageEstimator.GRPO, config=OmegaConf.create({})
        )
        policy, now = policy_of(model, torch.float32), data.batch["rollout_log_probs"].clone()
        for i, row in enumerate(rows):
            row_logprobs = torch.tensor(policy.logprobs(row.ids, temperature)[row.first :])
            now[i, : len(row_logprobs)] = row_logprobs.to(now)

        class Actor(SimpleNamespace):
            def get(self, name: str, default: Any) -> Any:
                return getattr(self, name, default)

        config: Any = Actor(
            clip_ratio=CLIP,
            clip_ratio_low=CLIP,
            clip_ratio_high=CLIP,
            clip_ratio_c=1e30,
            global_batch_info={},
        )
        value, _figures = core_algos.compute_policy_loss_vanilla(
            data.batch["rollout_log_probs"],
            now,
            data.batch["advantages"],
            data.batch["response_mask"],
            loss_agg_mode=mode,
            config=config,
        )
        return float(value)

    return loss


def tinker(rows: list[Record], _: Any, model: Path, temperature: float, folder: Path) -> float:
    """Its `importance_sampling`: the sum over tokens of ratio times advantage."""
    pytest.importorskip("tinker", reason="Tinker is not installed (pip install tinker)")
    from prorl.trainer.adapters.tinker import datum_of

    policy, total = policy_of(model, torch.float32), 0.0
    for row in rows:
        inputs = {name: data.to_numpy() for name, data in datum_of(row).loss_fn_inputs.items()}
        ids = np.append(row.ids[:1], inputs["target_tokens"])
        ratio = np.exp(policy.logprobs(ids, 1.0)[1:] - inputs["logprobs"])
        total += float((ratio * inputs["advantages"] * inputs["mask"]).sum())
    return -total


def prime_rl(rows: list[Record], _: Any, model: Path, temperature: float, folder: Path) -> float:
    """Logits are divided where they stand, one before their token; a mean over all tokens."""
    from prorl.trainer.adapters.prime_rl import aligned

    policy, losses = policy_of(model, torch.float32), []
    for row in rows:
        fields = aligned(row)
        now = policy.logprobs(row.ids, np.array(fields["temperatures"]))
        mask = np.array(fields["mask"])
        ratio = np.exp(now - np.array(fields["logprobs"]))[mask]
        losses.append(clipped(ratio, np.array(fields["advantages"])[mask]))
    return float(-np.concatenate(losses).mean())


def skyrl(rows: list[Record], _: Any, model: Path, temperature: float, folder: Path) -> float:
    """Returns SkyRL's loss by `token_mean`, its default, with advantages of its blocks of n."""
    from prorl.trainer.adapters.skyrl import Generator

    groups = [[row for row in rows if row.group == number] for number in range(GROUPS)]
    feed: Any = SimpleNamespace(run="demo", __iter__=None)
    generator = Generator(feed)
    generator._groups = iter(groups)
    ids = [SimpleNamespace(instance_id=number) for number in range(GROUPS) for _ in range(NUM_ROWS)]
    batch = {"prompts": [[]] * len(ids), "trajectory_ids": ids}
    batch["sampling_params"] = {"temperature": temperature}
    output = asyncio.run(generator.generate(batch))
    rewards = np.array(output["rewards"]).reshape(GROUPS, -1)
    spread = rewards.std(1, ddof=1, keepdims=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).ravel()
    policy, losses = policy_of(model, torch.float32), []
    for i, advantage in enumerate(advantages):
        ids_L = np.array([*output["prompt_token_ids"][i], *output["response_ids"][i]])
        now = policy.logprobs(ids_L, temperature)[len(output["prompt_token_ids"][i]) :]
        mask = np.array(output["loss_masks"][i]).astype(bool)
        ratio = np.exp(now - np.array(output["rollout_logprobs"][i]))[mask]
        losses.append(clipped(ratio, advantage))
    return float(-np.concatenate(losses).mean())


def slime(rows: list[Record], _: Any, model: Path, temperature: float, folder: Path) -> float:
    """A mean over `rollout_id` of the mean over its tokens, as `get_sum_of_sample_mean` has it."""
    pytest.importorskip("slime", reason="slime is not installed (git only: PYTHONPATH=slime)")
    from prorl.trainer.adapters import check_temperature
    from prorl.trainer.adapters.slime import rewards, sample_of

    check_temperature(rows, temperature, "--rollout-temperature")
    args: Any = SimpleNamespace()
    samples = [sample_of(row, args) for row in rows]
    _, advantages = rewards(args, samples)
    policy, by_rollout = policy_of(model, torch.float32), dict[int, list[Any]]()
    for sample, advantage in zip(samples, advantages, strict=True):
        now = policy.logprobs(np.array(sample.tokens), temperature)[-sample.response_length :]
        mask = np.array(sample.loss_mask).astype(bool)
        ratio = np.exp(now - np.array(sample.rollout_log_probs))[mask]
        by_rollout.setdefault(sample.rollout_id, []).append(clipped(ratio, advantage))
    return float(-np.mean([np.concatenate(each).mean() for each in by_rollout.values()]))


LOSSES: dict[str, tuple[Loss, str]] = {
    "ours, token": (ours(), "tokens"),
    "ours, sequence": (ours(ratio="sequence", clip_low=CLIP), "gspo"),
    "ours, constant": (ours(constant_length=LENGTH), "constant"),
    "TRL, dapo": (trl("dapo"), "tokens"),
    "TRL, grpo": (trl("grpo"), "rollouts"),
    "TRL, dr_grpo": (trl("dr_grpo"), "constant"),
    "TRL, grpo by sequence": (trl("grpo", "sequence"), "gspo"),
    "TRL async": (trl_async, "tokens"),
    "verl, token-mean": (verl("token-mean"), "tokens"),
    "verl, seq-mean-token-mean": (verl("seq-mean-token-mean"), "rollouts"),
    "Tinker": (tinker, "sum"),
    "prime-rl": (prime_rl, "tokens"),
    "SkyRL": (skyrl, "tokens"),
    "slime": (slime, "whole rollouts"),
}

REFUSED = {
    ("verl, seq-mean-token-mean", 3): "it would count 3 times",
    ("SkyRL", 3): "4 rollouts in 6 sequences for 6 rows",
}
"""Sequences that a trainer cannot weigh."""


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_a_rollout_counts_once_at_its_own_temperature(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    loss, kind = LOSSES[name]
    line = []
    for place, (count, heat) in enumerate(CASES):
        made = batches(model, count, heat)
        batch = PackedBatch(delivered(made), "demo")
        rows = records(batch.with_advantages(mean_std(batch)))
        folder = tmp_path / str(place)
        refused = REFUSED.get((name, count))
        if name == "Tinker" and heat != 1.0:
            refused = "sampled at temperature 0.7"
        if refused:
            with pytest.raises(UserError, match=refused):
                loss(rows, made, model, heat, folder)
            line.append("refused")
            continue
        value = loss(rows, made, model, heat, folder)
        expected = reference(rows, model, heat, kind)
        line.append(f"{abs(value - expected):.1e}")
        assert value == pytest.approx(expected, abs=MOST * max(1.0, abs(expected)))
    made = batches(model, 1, 0.0)
    batch = PackedBatch(delivered(made), "demo")
    rows = records(batch.with_advantages(mean_std(batch)))
    with pytest.raises(UserError, match="temperature 0"):
        loss(rows, made, model, 1.0, tmp_path / "greedy")
    print(f"| {name} | {' | '.join(line)} | refused |")


def test_the_losses_of_trl_that_divide_by_sequences_are_listed() -> None:
    """A new one of TRL's would count a rollout once a sequence."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    import inspect
    import re

    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    loss_names = {*PER_SEQUENCE, "dapo", "bnpo", "cispo", "vespo"}
    assert set(re.findall(r'"(\w+)"', " ".join(re.findall(r"loss_type (?:in|==) .*", source)))) <= (
        loss_names
    )
