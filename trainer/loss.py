"""The DAPO objective over sampled tokens. Pure functions of tensors; every formula names its paper.

Shapes: C sampled tokens of a pass. Masked tokens (sampled but not trained) have weight 0 and enter
no mean. A pass may be a part of a minibatch: losses are divided by the minibatch's number of
trained tokens, so that parts add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Coefficients, DAPO's (arXiv 2503.14476 section 4.1) by default."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction_cap: float = 2.0
    """Of the truncated importance correction; used only with a proximal policy."""


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
    equations 8, 10 and 12). No KL penalty.

    Without `proximal_C`: r = pi / mu, where mu is what was recorded while sampling, and w = 1: the
    ratio itself corrects for stale weights and for the sampler's numerics. With it (logprobs under
    the weights at the start of the step): r = pi / proximal, and w =
    `truncated_correction(proximal, mu)`: the decoupled objective (arXiv 2110.00641, AReaL arXiv
    2505.24298 equation 5).
    """
    old_C = recorded_C if proximal_C is None else proximal_C
    ratio_C = torch.exp(logprobs_C - old_C)
    clipped_C = ratio_C.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_C = torch.minimum(ratio_C * advantages_C, clipped_C * advantages_C)
    weight_C = trained_C.to(objective_C.dtype)
    correction_C = torch.ones_like(weight_C)
    if proximal_C is not None:
        correction_C = truncated_correction(proximal_C, recorded_C, config.correction_cap)
    value = -(objective_C * correction_C * weight_C).sum() / max(num_trained, 1)
    with torch.no_grad():
        active_C = (ratio_C * advantages_C > clipped_C * advantages_C) * weight_C
        return Loss(
            value=value,
            clipped=float(active_C.sum()),
            ratio=float((ratio_C * weight_C).sum()),
            kl=float((kl_estimate(logprobs_C, recorded_C) * weight_C).sum()),
            correction=float((correction_C * weight_C).sum()),
            token_loss_C=-(objective_C * correction_C * weight_C) / max(num_trained, 1),
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
