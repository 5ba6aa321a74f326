"""The objective against plain float64 Python, written from the formulas token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prorl.trainer.loss import LossConfig, Shares, dapo_loss, token_shares, truncated_correction

CONFIG = LossConfig()
logprob = st.floats(-4, -0.01)
token = st.tuples(logprob, logprob, logprob, st.floats(-3, 3), st.booleans())
tokens = st.lists(token, min_size=1, max_size=12)


def reference(
    rows: list[tuple[float, float, float, float, bool]], num_trained: int, proximal: bool
) -> float:
    total = 0.0
    for now, mu, old, advantage, trained in rows:
        if not trained:
            continue
        ratio = math.exp(now - (old if proximal else mu))
        clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
        weight = min(math.exp(old - mu), 2.0) if proximal else 1.0
        objective = min(ratio * advantage, clipped * advantage)
        total += weight * (max(objective, 3.0 * advantage) if advantage < 0 else objective)
    return -total / max(num_trained, 1)


def columns(
    rows: list[tuple[float, float, float, float, bool]], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]


def shares(
    trained_C: torch.Tensor,
    config: LossConfig = CONFIG,
    row_C: torch.Tensor | None = None,
    rollouts: list[int] | None = None,
) -> Shares:
    """Returns the shares of one minibatch; without `row_C` it is one sequence, without `rollouts`
    each is its own.
    """
    row_C = torch.zeros(len(trained_C), dtype=torch.long) if row_C is None else row_C
    rollouts = list(range(int(row_C.max()) + 1)) if rollouts is None else rollouts
    return token_shares(trained_C, row_C, torch.tensor(rollouts), config)


def part_of(whole: Shares, part: slice) -> Shares:
    return Shares(*(column[part] for column in whole))


@given(rows=tokens, proximal=st.booleans())
def test_equal_to_the_formula(
    rows: list[tuple[float, float, float, float, bool]], proximal: bool
) -> None:
    now, mu, old, advantages, trained = columns(rows)
    num = int(trained.sum())
    loss = dapo_loss(
        now,
        mu,
        advantages,
        shares(trained),
        config=CONFIG,
        proximal_C=old if proximal else None,
    )
    assert float(loss.value) == pytest.approx(reference(rows, num, proximal), abs=1e-12)


@given(rows=tokens, cut=st.integers(0, 12))
def test_passes_of_a_minibatch_add_up(
    rows: list[tuple[float, float, float, float, bool]], cut: int
) -> None:
    now, mu, _, advantages, trained = columns(rows)
    whole = shares(trained)

    def value(part: slice) -> float:
        here = part_of(whole, part)
        return float(dapo_loss(now[part], mu[part], advantages[part], here, config=CONFIG).value)

    assert value(slice(None)) == pytest.approx(
        value(slice(cut)) + value(slice(cut, None)), abs=1e-12
    )


@given(
    rollouts=st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3),
    cut=st.integers(1, 3),
)
@pytest.mark.parametrize(
    "config",
    [
        LossConfig(ratio="sequence", clip_low=0.1, clip_high=0.1),
        LossConfig(constant_length=40, clip_low=0.1, clip_high=0.1),
    ],
    ids=["gspo", "dr_grpo"],
)
def test_a_rollout_of_several_sequences_counts_once(
    config: LossConfig,
    rollouts: list[list[list[tuple[float, float, float, float, bool]]]],
    cut: int,
) -> None:
    """GSPO's and Dr. GRPO's formulas over rollouts, whose sequences share an advantage."""
    rollouts = [
        [[(*token[:3], rollout[0][0][3], token[4]) for token in row] for row in rollout]
        for rollout in rollouts
    ]

    def objective(ratio: float, advantage: float) -> float:
        least = min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage)
        return max(least, 3.0 * advantage) if advantage < 0 else least

    by_rollout = []
    for rollout in rollouts:
        trained = [[t for t in row if t[4]] for row in rollout]
        trained = [row for row in trained if row]
        if config.ratio == "sequence":
            values = [
                objective(math.exp(sum(t[0] - t[1] for t in row) / len(row)), row[0][3])
                for row in trained
            ]
            value = sum(values) / max(len(values), 1)
        else:
            each = [objective(math.exp(t[0] - t[1]), t[3]) for row in trained for t in row]
            value = sum(each) / config.constant_length
        if trained:
            by_rollout.append(value)
    expected = -sum(by_rollout) / max(len(by_rollout), 1)

    rows = [row for rollout in rollouts for row in rollout]
    now, mu, _, advantages, trained_C = columns([token for row in rows for token in row])
    row_C = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)])
    ids = [i for i, rollout in enumerate(rollouts) for _ in rollout]
    whole = shares(trained_C, config, row_C, ids)
    border = int((row_C < cut).sum())

    def value_of(part: slice) -> float:
        here = part_of(whole, part)
        return float(dapo_loss(now[part], mu[part], advantages[part], here, config=config).value)

    assert value_of(slice(None)) == pytest.approx(expected, abs=1e-12)
    assert value_of(slice(border)) + value_of(slice(border, None)) == pytest.approx(
        expected, abs=1e-12
    ), "in passes"


@given(rows=tokens)
def test_the_distance_to_the_reference_is_added_over_trained_tokens(
    rows: list[tuple[float, float, float, float, bool]],
) -> None:
    now, mu, reference_C, advantages, trained = columns(rows)
    num = int(trained.sum())
    penalty = sum(
        math.exp(ref - pi) - 1 - (ref - pi) for pi, _, ref, _, trains in rows if trains
    ) / max(num, 1)
    loss = dapo_loss(
        *(now, mu, advantages, shares(trained)),
        config=LossConfig(kl=0.3),
        reference_C=reference_C,
    )
    assert float(loss.value) == pytest.approx(
        reference(rows, num, proximal=False) + 0.3 * penalty, abs=1e-12
    )


def gradient(
    now: float, mu: float, advantage: float, trained: float = 1.0, proximal: float | None = None
) -> float:
    leaf = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    old = None if proximal is None else torch.tensor([proximal], dtype=torch.float64)
    recorded_C, advantages_C, trained_C = (
        torch.tensor([value], dtype=torch.float64) for value in (mu, advantage, trained)
    )
    each = shares(trained_C)
    dapo_loss(leaf, recorded_C, advantages_C, each, config=CONFIG, proximal_C=old).value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(leaf.grad)


def test_gradient_at_the_old_policy_is_the_policy_gradient() -> None:
    assert gradient(-1.0, -1.0, 2.0) == pytest.approx(-2.0)
    assert gradient(-1.0, -1.5, 2.0, proximal=-1.0) == pytest.approx(-2.0 * math.exp(0.5)), (
        "the correction weighs, without a gradient"
    )


def test_the_clip_is_higher_above_than_below() -> None:
    up, down = math.log(1.25), math.log(0.75)
    assert gradient(up - 1, -1.0, 1.0) != 0, "1.25 is inside 1 + 0.28"
    assert gradient(math.log(1.29) - 1, -1.0, 1.0) == 0
    assert gradient(down - 1, -1.0, -1.0) == 0, "0.75 is below 1 - 0.2"
    assert gradient(down - 1, -1.0, 1.0) != 0, "what improves is never clipped"


def test_correction_is_truncated_and_detached() -> None:
    proximal = torch.tensor([-1.0, -1.0], requires_grad=True)
    correction = truncated_correction(proximal, torch.tensor([-1.1, -9.0]), 2.0)
    torch.testing.assert_close(correction, torch.tensor([math.exp(0.1), 2.0]))
    assert not correction.requires_grad


def test_extremes_give_numbers() -> None:
    """A masked token of any kind counts for nothing, one that trains for a bounded amount, also
    where the reference likes what pi does not.
    """
    now = torch.tensor([-0.1, -0.1, -95.0], requires_grad=True)
    recorded = torch.tensor([-95.0, -95.0, -0.1])
    advantages, trained = torch.tensor([-1.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])
    loss = dapo_loss(now, recorded, advantages, shares(trained), config=CONFIG)
    loss.value.backward()  # type: ignore[no-untyped-call]
    assert float(loss.value.detach()) == pytest.approx((3.0 + 0.8) / 2)
    assert now.grad is not None
    assert bool(now.grad.isfinite().all())
    assert math.isfinite(loss.ratio)
    assert math.isfinite(loss.kl)
    likes = torch.full((3,), -0.1)
    config = LossConfig(kl=0.1)
    far = dapo_loss(now, recorded, advantages, shares(trained), config=config, reference_C=likes)
    now.grad = None
    far.value.backward()  # type: ignore[no-untyped-call]
    assert bool(torch.as_tensor(now.grad).isfinite().all())


def test_a_sum_over_tokens_has_a_single_divisor() -> None:
    with pytest.raises(ValueError, match="`ratio: token` has one"):
        LossConfig(ratio="sequence", constant_length=8)
