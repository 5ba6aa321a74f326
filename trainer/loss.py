"""The DAPO objective over sampled tokens. Pure functions of tensors; every formula names its paper.

Shapes: C sampled tokens of a pass. Masked tokens (sampled but not trained) have weight 0 and enter
no mean. A pass may be a part of a minibatch: losses are divided by the minibatch's number of
trained tokens, so that parts add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""A ratio of e^20 is clipped as one of e^95 is, and its gradient is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Coefficients, DAPO's (arXiv 2503.14476 section 4.1) by default."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction_cap: float = 2.0
    """Of the truncated importance correction; used only with a proximal policy."""
    dual_clip: float = 3.0
    """With a negative advantage no ratio counts for more (arXiv 1912.09729 equation 5)."""


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
) -> Loss:
    """The policy loss of DAPO: clip-higher, averaged over tokens.

        J = 1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   loss = -J

    PPO's clipped objective (arXiv 1707.06347 equation 7) with decoupled clip range and one mean
    over all N trained tokens of the minibatch instead of one per sequence (DAPO, arXiv 2503.14476
    equations 8, 10 and 12). With A < 0 the objective is at least c A (`dual_clip`). No KL penalty.

    Without `proximal_C`: r = pi / mu, where mu is what was recorded while sampling, and w = 1: the
    ratio itself corrects for stale weights and for the sampler's numerics. With it (logprobs under
    the weights at the start of the step): r = pi / proximal, and w =
    `truncated_correction(proximal, mu)`: the decoupled objective (arXiv 2110.00641, AReaL arXiv
    2505.24298 equation 5).
    """
    old_C = recorded_C if proximal_C is None else proximal_C
    ratio_C = torch.exp((logprobs_C - old_C).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_C = ratio_C.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_C = torch.minimum(ratio_C * advantages_C, clipped_C * advantages_C)
    bounded_C = torch.maximum(objective_C, config.dual_clip * advantages_C)
    objective_C = torch.where(advantages_C < 0, bounded_C, objective_C)
    correction_C = torch.ones_like(objective_C)
    if proximal_C is not None:
        correction_C = truncated_correction(proximal_C, recorded_C, config.correction_cap)
    # a token that does not train may hold anything: infinity times 0 is not 0
    trains_C = trained_C > 0
    each_C = torch.where(trains_C, -objective_C * correction_C, 0.0) / max(num_trained, 1)
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
    """KL(mu || pi) per token: r - 1 - log r with r = pi / mu.

    Unbiased, never negative (k3 of joschu.net/blog/kl-approx.html).
    """
    log_ratio_C = logprobs_C - recorded_C
    return torch.exp(log_ratio_C) - 1 - log_ratio_C
