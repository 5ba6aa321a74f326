"""Drawing tokens: the right distribution, independent of the batch, and logprobs of what was
sampled from.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prorl.backends.embedded.sampling import draw, uniforms
from prorl.types import SamplingParams


def _logits(
    rows: int = 1, vocab: int = 12, seed: int = 0
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(scale=2.0, size=(rows, vocab)).astype(np.float32)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits, n = _logits(), 40_000
    drawn = draw(
        np.repeat(logits, n, axis=0), uniforms(3, 0, n), [SamplingParams(temperature=0.8)] * n
    )
    expected = np.exp(logits[0] / 0.8) / np.exp(logits[0] / 0.8).sum()
    observed = np.bincount(drawn.ids, minlength=12) / n
    np.testing.assert_allclose(observed, expected, atol=5 * np.sqrt(0.25 / n))


@given(st.floats(0.05, 5.0), st.integers(0, 1000))
def test_logprobs_are_the_log_softmax_at_the_temperature(temperature: float, seed: int) -> None:
    logits = _logits(4, 30, seed)
    drawn = draw(logits, uniforms(seed, 0, 4), [SamplingParams(temperature=temperature)] * 4)
    scaled = logits.astype(np.float64) / temperature
    expected = (
        scaled
        - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
        - scaled.max(1, keepdims=True)
    )
    np.testing.assert_allclose(
        drawn.logprobs, expected[np.arange(4), drawn.ids], rtol=1e-5, atol=1e-6
    )
    assert (drawn.logprobs <= 0).all()


def test_temperature_zero_takes_the_likeliest_at_its_untempered_logprob() -> None:
    logits = _logits(3)
    drawn = draw(logits, uniforms(1, 0, 3), [SamplingParams(temperature=0.0)] * 3)
    assert drawn.ids.tolist() == logits.argmax(1).tolist()
    hot = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(drawn.logprobs, hot.max(1), atol=1e-6)


def test_top_k_and_top_p_restrict_the_choice_and_renormalise() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], dtype=np.float32))
    n = 2000
    for params, allowed in (
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_p=0.79), {0, 1}),
        (SamplingParams(top_p=0.81), {0, 1, 2}),
        (SamplingParams(top_p=1e-9), {0}),
    ):
        drawn = draw(np.repeat(logits, n, axis=0), uniforms(5, 0, n), [params] * n)
        assert set(drawn.ids.tolist()) == allowed
        mass = sum([0.5, 0.3, 0.15, 0.05][index] for index in allowed)
        np.testing.assert_allclose(
            drawn.logprobs, np.log(np.array([0.5, 0.3, 0.15, 0.05]) / mass)[drawn.ids], atol=1e-6
        )


def test_the_ends_of_the_unit_interval_give_tokens_that_have_weight() -> None:
    logits = np.array([[-1e9, 0.0, 0.0, -1e9]] * 2, dtype=np.float32)
    drawn = draw(logits, np.array([0.0, np.nextafter(1.0, 0.0)]), [SamplingParams()] * 2)
    assert drawn.ids.tolist() == [1, 2]


@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(0, 300), st.integers(1, 50))
def test_a_position_has_its_number_however_it_is_reached(
    seed: int, start: int, skip: int, count: int
) -> None:
    assert np.array_equal(
        uniforms(seed, start, skip + count)[skip:], uniforms(seed, start + skip, count)
    )
