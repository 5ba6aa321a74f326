"""The policy that learns: weights, optimizer, and one update from one batch of groups.

Knows no service and no files but the model's.

An update is a function of (weights, optimizer, batch): it draws nothing at random, takes sequences
in delivery order and adds up gradients in a fixed order, so that on a CPU with a fixed number of
threads equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from prorl.client import PackedBatch
from prorl.errors import UserError
from prorl.trainer.checkpoint import restore
from prorl.trainer.config import TrainerConfig
from prorl.trainer.lineage import SequenceOutcomes
from prorl.trainer.loss import Loss, Shares, dapo_loss, token_shares
from prorl.trainer.pack import ATTENTION, load_model, pack, token_logprobs
from prorl.types import Json, SpanKind


class Tokens(NamedTuple):
    """Holds what the loss knows of each sampled token besides its ids, [C]."""

    trained_C: torch.Tensor
    fresh_C: torch.Tensor
    """1.0 where these very weights sampled it: there the trainer's logprobs must equal the
    sampler's.
    """
    proximal_C: torch.Tensor | None

    def rows(self, batch: PackedBatch, rows: range) -> Tokens:
        here = slice(int(batch.logprob_offsets[rows.start]), int(batch.logprob_offsets[rows.stop]))
        return Tokens(
            self.trained_C[here],
            self.fresh_C[here],
            None if self.proximal_C is None else self.proximal_C[here],
        )

    def to(self, device: str) -> Tokens:
        return Tokens(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


def tokens_of(
    batch: PackedBatch, version: int, max_staleness: int, proximal_C: torch.Tensor | None
) -> Tokens:
    """Returns what the loss knows of a batch's tokens; those older than `max_staleness` do not
    train.
    """
    trained = batch.per_sampled(batch.span_kind) == SpanKind.TRAINED
    age = version - batch.per_sampled(batch.span_version)
    if max_staleness >= 0:
        trained &= age <= max_staleness
    return Tokens(
        torch.from_numpy(trained.astype(np.float32)),
        torch.from_numpy((age == 0).astype(np.float32)),
        proximal_C,
    )


Sums = defaultdict[str, float]

_OF_LOSS = ("clipped", "ratio", "kl", "correction")
"""Figures of a `Loss` that are summed over tokens."""

_PER_TOKEN = (*_OF_LOSS, "entropy")
"""Sums that are reported as means over the trained tokens."""


class Learner:
    def __init__(self, config: TrainerConfig, model_dir: Path, *, resume: bool) -> None:
        torch.manual_seed(config.seed)
        self._config = config
        self._reference: Any = load_model(config.model, device=config.device) if config.kl else None
        self.model: Any = load_model(model_dir, device=config.device)
        if config.gradient_checkpointing:
            self.model.activation_checkpointing_enable()
            self.model.train()  # it is heeded in this mode only; there is no dropout to wake
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        if resume:
            restore(model_dir, self.model, self.optimizer)

    def update(
        self,
        batch: PackedBatch,
        *,
        step: int,
        version: int,
        account: SequenceOutcomes | None = None,
    ) -> dict[str, float]:
        """Take one step's optimizer steps; returns figures. `version` is that of the weights before
        it; `account` is filled.
        """
        tokens = tokens_of(
            batch,
            version,
            self._config.max_staleness,
            self._proximal(batch) if self._config.proximal else None,
        )
        sums: Sums = defaultdict(float)
        for rows in _shares(batch, self._config.minibatches):
            self._minibatch(batch, rows, tokens, sums, step, account)
        return _figures(batch, tokens, sums, version)

    def expected(self, prompt_ids: Sequence[int]) -> dict[str, Json]:
        """`expected_of` the model that it trains."""
        self.model.set_attn_implementation("eager")
        try:
            return expected_of(self.model, prompt_ids)
        finally:
            self.model.set_attn_implementation(ATTENTION)

    def _minibatch(
        self,
        batch: PackedBatch,
        rows: range,
        tokens: Tokens,
        sums: Sums,
        step: int,
        account: SequenceOutcomes | None,
    ) -> None:
        minibatch = batch.rows(rows.start, rows.stop)
        trained_C = tokens.rows(batch, rows).trained_C
        rollout_B = torch.from_numpy(minibatch.rollout_ids.copy())
        shares = token_shares(trained_C, _row_C(minibatch), rollout_B, self._config)
        self.optimizer.zero_grad(set_to_none=True)
        first = int(batch.logprob_offsets[rows.start])
        for part in _passes(batch, rows, self._config.tokens_per_pass):
            here = tokens.rows(batch, part)
            borders = batch.logprob_offsets[[part.start, part.stop]] - first
            span = slice(*borders.tolist())
            logprobs_C, loss = self._accumulate(
                batch.rows(part.start, part.stop),
                here,
                Shares(*(column[span].to(self._config.device) for column in shares)),
                sums,
            )
            if account is not None:
                account.add(part, here.trained_C, loss.token_loss_C, logprobs_C)
        sums["minibatches"] += 1
        if bool((trained_C > 0).any()):  # else momentum and decay alone would move the weights
            sums["grad_norm"] += self._descend(step)

    def _descend(self, step: int) -> float:
        """Move the weights by the gradients at this step's rate; the norm before clipping. Raises
        UserError, before anything moves, if it is no number.
        """
        for settings in self.optimizer.param_groups:
            settings["lr"] = self._config.learning_rate * min(
                1.0, (step + 1) / max(self._config.warmup_steps, 1)
            )
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if not math.isfinite(norm):
            raise UserError(
                f"a gradient whose norm is {norm} in step {step}",
                "numbers; the newest checkpoint is as it was",
                "look at the batch's advantages and logprobs (prorl sql) and at the learning rate",
            )
        self.optimizer.step()
        return float(norm)

    def _accumulate(
        self, part: PackedBatch, tokens: Tokens, shares: Shares, sums: Sums
    ) -> tuple[torch.Tensor, Loss]:
        assert part.advantages is not None, "stream with advantages"
        tokens = tokens.to(self._config.device)
        recorded_C = part.torch().logprobs.to(self._config.device)
        advantages_C = torch.from_numpy(
            np.repeat(part.advantages, np.diff(part.logprob_offsets))
        ).to(self._config.device)
        packed = pack(part, self._config.device)
        logprobs_C, entropy_C = token_logprobs(self.model, packed, dtype=self._dtype)
        reference_C: torch.Tensor | None = None
        if self._reference is not None:
            with torch.no_grad():
                reference_C = token_logprobs(self._reference, packed, dtype=self._dtype).logprobs_C
        loss = dapo_loss(
            logprobs_C,
            recorded_C,
            advantages_C,
            shares,
            config=self._config,
            proximal_C=tokens.proximal_C,
            reference_C=reference_C,
        )
        loss.value.backward()  # type: ignore[no-untyped-call]
        for name in _OF_LOSS:
            sums[name] += getattr(loss, name)
        sums["loss"] += float(loss.value.detach())
        sums["entropy"] += float((entropy_C * tokens.trained_C).sum())
        if not sums["minibatches"]:
            difference_C = (logprobs_C.detach() - recorded_C).abs()[tokens.fresh_C > 0]
            sums["compared_tokens"] += len(difference_C)
            sums["logprob_diff_max"] = max(
                sums["logprob_diff_max"], float(difference_C.max()) if len(difference_C) else 0.0
            )
        return logprobs_C.detach(), loss

    def _proximal(self, batch: PackedBatch) -> torch.Tensor:
        parts = [
            batch.rows(p.start, p.stop)
            for p in _passes(batch, range(batch.num_sequences), self._config.tokens_per_pass)
        ]
        with torch.no_grad():
            return torch.cat(
                [
                    token_logprobs(
                        self.model, pack(part, self._config.device), dtype=self._dtype
                    ).logprobs_C
                    for part in parts
                ]
            )


def first_prompt(batch: PackedBatch) -> list[int]:
    """Ids of the batch's first sequence up to its first sampled token."""
    ids: list[int] = batch.token_ids[: int(batch.sampled_index()[0])].tolist()
    return ids


def _shares(batch: PackedBatch, num: int) -> Iterator[range]:
    """Rows of `num` equal shares of the groups (fewer when there are fewer groups)."""
    borders = np.linspace(0, batch.num_groups, min(num, batch.num_groups) + 1).round().astype(int)
    for start, stop in pairwise(borders.tolist()):
        yield range(int(batch.group_starts[start]), int(batch.group_starts[stop]))


def _row_C(batch: PackedBatch) -> torch.Tensor:
    """[C] the sequence of each sampled token."""
    counts = np.diff(batch.logprob_offsets)
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _passes(batch: PackedBatch, rows: range, tokens_per_pass: int) -> Iterator[range]:
    """Rows cut where the next sequence would exceed the budget; a longer sequence goes alone."""
    start = rows.start
    for row in rows:
        if row > start and batch.cu_seqlens[row + 1] - batch.cu_seqlens[start] > tokens_per_pass:
            yield range(start, row)
            start = row
    if rows:
        yield range(start, rows.stop)


def _figures(batch: PackedBatch, tokens: Tokens, sums: Sums, version: int) -> dict[str, float]:
    num_trained, minibatches = float(tokens.trained_C.sum()), max(sums["minibatches"], 1)
    versions = batch.per_sampled(batch.span_version)
    ages = version - versions[versions >= 0]  # -1: sampled by weights that nobody knows, untrained
    _, first = np.unique(batch.rollout_ids, return_index=True)
    return {
        "loss": sums["loss"] / minibatches,
        "grad_norm": sums["grad_norm"] / minibatches,
        "logprob_diff_max": sums["logprob_diff_max"],
        "compared_tokens": sums["compared_tokens"],
        **{name: sums[name] / max(num_trained, 1.0) for name in _PER_TOKEN},
        "reward": float(batch.rewards[first].mean()),
        "groups": batch.num_groups,
        "rollouts": len(first),
        "sequences": batch.num_sequences,
        "tokens": batch.num_tokens,
        "sampled_tokens": len(batch.logprobs),
        "trained_tokens": num_trained,
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max(initial=0)),
    }


def expected_of(model: Any, prompt_ids: Sequence[int] = ()) -> dict[str, Json]:
    """The likeliest next tokens and their logprobs after a prompt, by which a server's weights are
    verified; without a prompt after some tokens of the vocabulary.
    """
    prompt = list(prompt_ids) or list(range(min(16, model.config.vocab_size)))
    ids_L = torch.tensor(prompt, device=model.device)
    with torch.no_grad():
        logits_LV = model(ids_L[None], use_cache=False).logits[0]
    top = logits_LV[-1].float().log_softmax(-1).topk(min(256, logits_LV.shape[-1]))
    return {"prompt_ids": prompt, "ids": top.indices.tolist(), "logprobs": top.values.tolist()}
