"""The DAPO objective over sampled tokens. Pure functions of tensors; every formula names its paper.

Shapes: C sampled tokens of a pass. Masked tokens (sampled but not trained) have weight 0 and enter
no mean. A pass may be a part of a minibatch: losses are divided by the minibatch's number of
trained tokens, so that parts add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

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
    kl: float = Field(
        default=0.0,
        ge=0,
        description="weight of the distance to the model that training started from, which is"
        " loaded beside it; 0 = none",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """`value` is to be minimised; the others are sums over trained tokens, for metrics."""

    value: torch.Tensor
    clipped: float
    ratio: float
    kl: float
    correction: float
    token_loss_C: torch.Tensor
    """What each token adds to `value`; without a gradient."""


def dapo_loss(
    logprobs_C: torch.Tensor,
    recorded_C: torch.Tensor,
    advantages_C: torch.Tensor,
    trained_C: torch.Tensor,
    *,
    num_trained: int,
    config: LossConfig,
    proximal_C: torch.Tensor | None = None,
    reference_C: torch.Tensor | None = None,
    row_C: torch.Tensor | None = None,
    num_rows: int = 0,
) -> Loss:
    """The policy loss of DAPO: clip-higher, averaged over tokens.

        J = 1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   loss = -J

    PPO's clipped objective (arXiv 1707.06347 equation 7) with decoupled clip range and one mean
    over all N trained tokens of the minibatch instead of one per sequence (DAPO, arXiv 2503.14476
    equations 8, 10 and 12). With A < 0 the objective is at least c A (`dual_clip`).

    With `ratio` "sequence" (GSPO, arXiv 2507.18071 equations 5 to 7): r_t is that of the whole
    sequence i, s_i = exp(mean over its trained tokens of log pi - log mu), and the mean is over
    sequences: each token stands for 1 / (its sequence's trained tokens x `num_rows`), where
    `num_rows` are the minibatch's sequences that train and `row_C` says a token's sequence.

    With `kl` > 0: loss + kl/N sum_t (rho - 1 - log rho), rho = pi_ref / pi (GRPO, arXiv 2402.03300
    equation 4), under the same mean.

    Without `proximal_C`: r = pi / mu, where mu is what was recorded while sampling, and w = 1: the
    ratio itself corrects for stale weights and for the sampler's numerics. With it (logprobs under
    the weights at the start of the step): r = pi / proximal, and w =
    `truncated_correction(proximal, mu)`: the decoupled objective (arXiv 2110.00641, AReaL arXiv
    2505.24298 equation 5).
    """
    old_C = recorded_C if proximal_C is None else proximal_C
    # a token that does not train may hold anything: infinity times 0 is not 0
    trains_C = trained_C > 0
    log_ratio_C = torch.where(trains_C, logprobs_C - old_C, 0.0)
    share_C = trains_C.to(logprobs_C.dtype) / max(num_trained, 1)
    if config.ratio == "sequence":
        assert row_C is not None, "sequences of the tokens"
        zeros_B = logprobs_C.new_zeros(int(row_C.max()) + 1 if len(row_C) else 0)
        count_B = zeros_B.index_add(0, row_C, trains_C.to(logprobs_C.dtype)).clamp(min=1)
        log_ratio_C = (zeros_B.index_add(0, row_C, log_ratio_C) / count_B)[row_C]
        share_C = trains_C / (count_B[row_C] * max(num_rows, 1))
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
    negative (k3 of joschu.net/blog/kl-approx.html).
    """
    log_ratio_C = logprobs_C - recorded_C
    return torch.exp(log_ratio_C) - 1 - log_ratio_C
