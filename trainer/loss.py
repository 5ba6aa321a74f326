"""The DAPO objective over sampled tokens. Pure functions of tensors; every formula names its paper.

Shapes: C sampled tokens of a pass. Masked tokens (sampled but not trained) have weight 0 and enter
no mean. A pass may be a part of a minibatch: each token has its share of the whole minibatch's
mean (`token_shares`), so that parts add up exactly. A rollout counts once, however many sequences
it has: no mean is one over sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LOG_RATIO = 20.0
"""A ratio of e^20 is clipped as one of e^95 is, and its gradient is a number."""


class LossConfig(BaseModel):
    """Coefficients, DAPO's (arXiv 2503.14476 section 4.1) by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0)
    proximal: bool = Field(
        default=False,
        description=(
            "ratio against the weights at the step's start, truncated correction for the sampler"
        ),
    )
    correction_cap: float = Field(default=2.0, ge=1)
    dual_clip: float = Field(default=3.0, gt=1, description="bound of a negative advantage's ratio")
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="sequence: GSPO, with clip_low and clip_high of 3e-4 and 4e-4, say",
    )
    constant_length: int = Field(
        default=0,
        ge=0,
        description="Dr. GRPO's constant divisor, its generation budget: losses are summed over"
        " tokens and divided by rollouts times this; 0 = by the trained tokens",
    )
    kl: float = Field(
        default=0.0,
        ge=0,
        description="weight of the distance to the model that training started from, which is"
        " loaded beside it; 0 = none",
    )

    @model_validator(mode="after")
    def _check_single_mean(self) -> Self:
        if self.constant_length and self.ratio == "sequence":
            raise ValueError("`constant_length` divides a sum over tokens; `ratio: token` has one")
        return self


class Shares(NamedTuple):
    """Holds what each sampled token of a minibatch stands for in its mean."""

    share_C: torch.Tensor
    """0 where a token does not train."""
    row_C: torch.Tensor
    """The number of each token's sequence; all tokens of a sequence are in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """`value` is to be minimised; the others are sums over trained tokens, for metrics."""

    value: torch.Tensor
    clipped: float
    ratio: float
    kl: float
    correction: float
    token_loss_C: torch.Tensor
    """The part of `value` that each token adds; without a gradient."""


def token_shares(
    trained_C: torch.Tensor, row_C: torch.Tensor, rollout_B: torch.Tensor, config: LossConfig
) -> Shares:
    """The shares of a whole minibatch's tokens, from `rollout_B`, the rollout of each sequence.

    Sampled tokens of N that train, of R rollouts that have such a token:

        ratio "token"       1/N                    DAPO, arXiv 2503.14476 equation 8
        constant_length L   1/(R L)                Dr. GRPO, arXiv 2503.20783 equation 4
        ratio "sequence"    1/(R S_r |y_i|)        GSPO, arXiv 2507.18071 equation 5

    where sequence i is one of the S_r of its rollout r that train and has |y_i| such tokens. GSPO
    has one sequence a rollout: a rollout of several counts once, as the mean of its sequences.
    """
    trains_C = (trained_C > 0).double()
    count_B = torch.zeros(len(rollout_B), dtype=torch.float64).index_add(0, row_C, trains_C)
    trains_B = (count_B > 0).double()
    rollout_B = torch.from_numpy(np.unique(rollout_B.numpy(), return_inverse=True)[1])
    sequences_R = torch.zeros(len(rollout_B), dtype=torch.float64).index_add(0, rollout_B, trains_B)
    num_rollouts = float((sequences_R > 0).sum().clamp(min=1))
    if config.ratio == "sequence":
        share_B = 1 / (num_rollouts * sequences_R[rollout_B] * count_B).clamp(min=1)
        share_C = trains_C * share_B[row_C]
    elif config.constant_length:
        share_C = trains_C / (num_rollouts * config.constant_length)
    else:
        share_C = trains_C / trains_C.sum().clamp(min=1)
    return Shares(share_C, row_C)


def dapo_loss(
    logprobs_C: torch.Tensor,
    recorded_C: torch.Tensor,
    advantages_C: torch.Tensor,
    shares: Shares,
    *,
    config: LossConfig,
    proximal_C: torch.Tensor | None = None,
    reference_C: torch.Tensor | None = None,
) -> Loss:
    """The policy loss of DAPO: clip-higher, averaged over tokens.

        J = 1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   loss = -J

    PPO's clipped objective (arXiv 1707.06347 equation 7) with decoupled clip range and one mean
    over all N trained tokens of the minibatch instead of one per sequence (DAPO, arXiv 2503.14476
    equations 8, 10 and 12). With A < 0 the objective is at least c A (`dual_clip`).

    With `ratio` "sequence" (GSPO, arXiv 2507.18071 equations 5 to 7): r_t is that of the whole
    sequence i, s_i = exp(mean over its trained tokens of log pi - log mu). `token_shares` has the
    means: 1/N above is one of them.

    With `kl` > 0: loss + kl times the same mean of rho - 1 - log rho, rho = pi_ref / pi (GRPO,
    arXiv 2402.03300 equation 4).

    Without `proximal_C`: r = pi / mu, where mu is what was recorded while sampling, and w = 1: the
    ratio itself corrects for stale weights and for the sampler's numerics. With it (logprobs under
    the weights at the start of the step): r = pi / proximal, and w =
    `truncated_correction(proximal, mu)`: the decoupled objective (arXiv 2110.00641, AReaL arXiv
    2505.24298 equation 5).
    """
    old_C = recorded_C if proximal_C is None else proximal_C
    # a token that does not train may hold anything: infinity times 0 is not 0
    share_C = shares.share_C.to(logprobs_C)
    trains_C = share_C > 0
    log_ratio_C = torch.where(trains_C, logprobs_C - old_C, 0.0)
    if config.ratio == "sequence":
        row_C = shares.row_C
        zeros_B = logprobs_C.new_zeros(int(row_C.max()) + 1 if len(row_C) else 0)
        count_B = zeros_B.index_add(0, row_C, trains_C.to(logprobs_C.dtype)).clamp(min=1)
        log_ratio_C = (zeros_B.index_add(0, row_C, log_ratio_C) / count_B)[row_C]
    ratio_C = torch.exp(log_ratio_C.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_C = ratio_C.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_C = torch.minimum(ratio_C * advantages_C, clipped_C * advantages_C)
    bounded_C = torch.maximum(objective_C, config.dual_clip * advantages_C)
    objective_C = torch.where(advantages_C < 0, bounded_C, objective_C)
    correction_C = torch.ones_like(objective_C)
    if proximal_C is not None:
        correction_C = truncated_correction(proximal_C, recorded_C, config.correction_cap)
    each_C = torch.where(trains_C, -objective_C * correction_C, 0.0) * share_C
    if reference_C is not None:
        gap_C = torch.where(trains_C, reference_C - logprobs_C, 0.0)
        each_C = each_C + config.kl * kl_estimate(gap_C, torch.zeros_like(gap_C)) * share_C
    value = each_C.sum()
    with torch.no_grad():
        active_C = (ratio_C * advantages_C > clipped_C * advantages_C) & trains_C
        return Loss(
            value=value,
            clipped=float(active_C.sum()),
            ratio=float(ratio_C[trains_C].sum()),
            kl=float(kl_estimate(logprobs_C, recorded_C)[trains_C].sum()),
            correction=float(correction_C[trains_C].sum()),
            token_loss_C=each_C.detach(),
        )


def truncated_correction(
    proximal_C: torch.Tensor, recorded_C: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(pi_proximal / mu, cap), no gradient: truncated importance sampling.

    It corrects for mu, the distribution of the sampler.

    Truncation at a constant bounds the variance (IMPALA's rho-bar, arXiv 1802.01561 section 4.1;
    for samplers that differ from the trainer: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training").
    """
    return torch.exp(proximal_C - recorded_C).clamp(max=cap).detach()


def kl_estimate(logprobs_C: torch.Tensor, recorded_C: torch.Tensor) -> torch.Tensor:
    """KL(mu || pi) per token: r - 1 - log r with r = pi / mu, sampled from mu. Unbiased, never
    negative (k3 of joschu.net/blog/kl-approx.html). The exponent is bounded as the ratio's is:
    without that one token that the reference likes and pi does not makes the gradient no number.
    """
    log_ratio_C = (logprobs_C - recorded_C).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_ratio_C) - 1 - log_ratio_C
