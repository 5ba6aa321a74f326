"""The objective against plain float64 Python, written from the formulas token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prorl.trainer.loss import LossConfig, dapo_loss, truncated_correction

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
        trained,
        num_trained=num,
        config=CONFIG,
        proximal_C=old if proximal else None,
    )
    assert float(loss.value) == pytest.approx(reference(rows, num, proximal), abs=1e-12)


@given(rows=tokens, cut=st.integers(0, 12))
def test_passes_of_a_minibatch_add_up(
    rows: list[tuple[float, float, float, float, bool]], cut: int
) -> None:
    now, mu, _, advantages, trained = columns(rows)
    num = int(trained.sum())

    def value(part: slice) -> float:
        return float(
            dapo_loss(
                now[part], mu[part], advantages[part], trained[part], num_trained=num, config=CONFIG
            ).value
        )

    assert value(slice(None)) == pytest.approx(
        value(slice(cut)) + value(slice(cut, None)), abs=1e-12
    )


@given(sequences=st.lists(tokens, min_size=1, max_size=4), cut=st.integers(1, 3))
def test_the_ratio_of_whole_sequences_is_gspos_formula(
    sequences: list[list[tuple[float, float, float, float, bool]]], cut: int
) -> None:
    rows = [
        [(now, mu, old, sequence[0][3], trained) for now, mu, old, _, trained in sequence]
        for sequence in sequences
    ]
    total, num_rows = 0.0, 0
    for row in rows:
        trained = [(now, mu) for now, mu, *_, trains in row if trains]
        if trained:
            advantage = row[0][3]
            ratio = math.exp(sum(now - mu for now, mu in trained) / len(trained))
            objective = min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage)
            total += max(objective, 3.0 * advantage) if advantage < 0 else objective
            num_rows += 1
    config = LossConfig(ratio="sequence", clip_low=0.1, clip_high=0.1)

    def value(part: list[list[tuple[float, float, float, float, bool]]]) -> float:
        if not part:
            return 0.0
        now, mu, _, advantages, trained = columns([token for row in part for token in row])
        row_C = torch.cat([torch.full((len(row),), i) for i, row in enumerate(part)])
        loss = dapo_loss(
            *(now, mu, advantages, trained),
            num_trained=int(trained.sum()),
            config=config,
            row_C=row_C,
            num_rows=num_rows,
        )
        return float(loss.value)

    expected = -total / max(num_rows, 1)
    assert value(rows) == pytest.approx(expected, abs=1e-12)
    assert value(rows[:cut]) + value(rows[cut:]) == pytest.approx(expected, abs=1e-12), "in passes"


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
        *(now, mu, advantages, trained),
        num_trained=num,
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
    column = [torch.tensor([value], dtype=torch.float64) for value in (mu, advantage, trained)]
    dapo_loss(leaf, *column, num_trained=1, config=CONFIG, proximal_C=old).value.backward()  # type: ignore[no-untyped-call]
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
    """A masked token of any kind counts for nothing, one that trains for a bounded amount."""
    now = torch.tensor([-0.1, -0.1, -95.0], requires_grad=True)
    recorded = torch.tensor([-95.0, -95.0, -0.1])
    advantages, trained = torch.tensor([-1.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])
    loss = dapo_loss(now, recorded, advantages, trained, num_trained=2, config=CONFIG)
    loss.value.backward()  # type: ignore[no-untyped-call]
    assert float(loss.value.detach()) == pytest.approx((3.0 + 0.8) / 2)
    assert now.grad is not None
    assert bool(now.grad.isfinite().all())
    assert math.isfinite(loss.ratio)
