"""The engine alone: what a request samples depends on the request, and on nothing that happens
beside it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from prorl.backends.embedded import TOY
from prorl.backends.embedded.weights import load
from prorl.errors import BackendError, ConfigError
from prorl.types import FailureCode, FinishReason, PolicyVersion
from tests.backends.embedded.helpers import (
    RENDERER,
    engine,
    logprob_gap,
    prompts,
    request,
    run,
    same_tokens,
)

BOUND = 1e-4
"""Promise: batch composition moves no logprob by more."""


def _other_weights(directory: Path) -> Path:
    """The toy with louder values: other keys and values in every layer but the first, other
    logprobs, same shape.
    """
    shutil.copytree(TOY, directory)
    tensors = dict(safetensors.numpy.load_file(directory / "model.safetensors"))
    tensors["model.layers.0.self_attn.v_proj.weight"] = tensors[
        "model.layers.0.self_attn.v_proj.weight"
    ] * np.float32(1.5)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def test_alone_or_in_any_batch_a_request_samples_the_same() -> None:
    requests = [request(prompt, seed) for seed, prompt in enumerate(prompts(48))]
    alone = [
        run(engine(rows=1, prefix_bytes=0), [sample_request])[0] for sample_request in requests
    ]
    shuffled = random.Random(0).sample(range(48), 48)
    together = dict(
        zip(shuffled, run(engine(rows=32), [requests[index] for index in shuffled]), strict=True)
    )
    assert all(same_tokens(row, together[index]) for index, row in enumerate(alone))
    assert max(logprob_gap(row, together[index]) for index, row in enumerate(alone)) < BOUND


def test_requests_join_and_leave_between_steps_without_disturbing_others() -> None:
    requests = [request(prompt, seed, max_tokens=30) for seed, prompt in enumerate(prompts(24))]
    alone = run(engine(rows=1, prefix_bytes=0), requests)
    served, rows, rng = engine(rows=8), [], random.Random(1)
    for index, sample_request in enumerate(requests):
        rows.append(served.add(sample_request))
        for _ in range(rng.randrange(4)):
            served.step()
        if index % 5 == 4:
            served.abort(rows[rng.randrange(len(rows))])
    while served.busy:
        served.step()
    for row, reference in zip(rows, alone, strict=True):
        count = len(row.completion)
        assert row.finish is reference.finish or row.finish is FinishReason.ABORT
        assert np.array_equal(row.completion, reference.completion[:count])
        np.testing.assert_allclose(row.logprobs, reference.logprobs[:count], atol=BOUND)


def test_an_aborted_request_continues_as_if_it_had_never_stopped() -> None:
    whole = run(engine(), [request(prompts(1)[0], 11, stops=(), max_tokens=20)])[0]
    for cut in (1, 7, 19):
        served = engine()
        row = served.add(request(prompts(1)[0], 11, stops=(), max_tokens=20))
        while len(row.completion) < cut:
            served.step()
        served.abort(row)
        assert row.finish is FinishReason.ABORT
        rest = run(served, [request(row.ids[: row.length], 11, stops=(), max_tokens=20 - cut)])[0]
        assert np.array_equal(np.concatenate([row.completion, rest.completion]), whole.completion)


def test_a_next_turn_computes_only_what_is_new_and_gives_what_a_fresh_engine_gives() -> None:
    served = engine()
    first = run(served, [request(prompts(1)[0], 4)])[0]
    prompt = np.concatenate([first.ids[: first.length], RENDERER.bridge(first.completion, [])])
    second = run(served, [request(prompt, 5)])[0]
    assert second.cached == first.length - 1  # the last token was sampled, never computed
    fresh = run(engine(prefix_bytes=0), [request(prompt, 5)])[0]
    assert fresh.cached == 0
    assert same_tokens(second, fresh)
    assert logprob_gap(second, fresh) < BOUND


def test_siblings_share_the_work_on_their_prompt() -> None:
    served = engine()
    (prompt,) = prompts(1)
    rows = run(served, [request(prompt, seed) for seed in range(8)])
    assert [row.cached for row in rows] == [0] + [len(prompt) - 1] * 7
    alone = run(engine(rows=1, prefix_bytes=0), [request(prompt, seed) for seed in range(8)])
    assert all(
        same_tokens(*pair) and logprob_gap(*pair) < BOUND for pair in zip(rows, alone, strict=True)
    )


def test_long_prompts_are_computed_in_chunks_beside_running_requests() -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(0, 256, size=450).astype(np.int32)
    requests = [
        request(prompts(1)[0], 1),
        request(long, 2, stops=()),
        request(long[:300], 3, stops=()),
    ]
    served = engine()
    rows = run(served, requests)
    for row, sample_request in zip(rows, requests, strict=True):
        alone = run(engine(rows=1, prefix_bytes=0), [sample_request])[0]
        assert same_tokens(row, alone)
        assert logprob_gap(row, alone) < BOUND


def test_new_weights_split_the_versions_and_nothing_of_the_old_context_is_used(
    tmp_path: Path,
) -> None:
    other = _other_weights(tmp_path / "other")
    served = engine(version=4)
    old_prompt = prompts(3)[-1]
    run(served, [request(old_prompt, 1)])
    row = served.add(request(prompts(1)[0], 8, stops=(), max_tokens=20))
    while len(row.completion) < 9:
        served.step()
    served.load(other, PolicyVersion(6))
    while served.busy:
        served.step()
    assert (row.versions, row.version_ends) == ([4, 6], [9, 20])
    fresh = engine()
    fresh.load(other, PolicyVersion(0))
    again = run(fresh, [request(row.ids[: row.prompt_length + 9], 8, stops=(), max_tokens=11)])[0]
    assert np.array_equal(row.completion[9:], again.completion)
    np.testing.assert_allclose(row.logprobs[9:], again.logprobs, atol=BOUND)
    after, reference = (
        run(served, [request(old_prompt, 9)])[0],
        run(fresh, [request(old_prompt, 9)])[0],
    )
    assert same_tokens(after, reference)
    assert logprob_gap(after, reference) < BOUND


def test_wrong_weights_are_refused_and_the_old_ones_go_on(tmp_path: Path) -> None:
    served = engine()
    before = run(served, [request(prompts(1)[0], 2)])[0]
    bad = _other_weights(tmp_path / "bad")
    tensors = dict(safetensors.numpy.load_file(bad / "model.safetensors"))
    norm = tensors.pop("model.norm.weight")
    for broken in ({}, {"model.norm.weight": norm * np.nan}, {"model.norm.weight": norm[:-1]}):
        safetensors.numpy.save_file(tensors | broken, bad / "model.safetensors")
        with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
            served.load(bad, PolicyVersion(1))
    (bad / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="whole safetensors"):
        served.load(bad, PolicyVersion(1))
    after = run(served, [request(prompts(1)[0], 2)])[0]
    assert (served.version, after.versions) == (0, [0])
    assert same_tokens(before, after)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no JSON object"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2'"),
        ('{"model_type": "qwen3", "hidden_size": "64"}', "no number vocab_size, hidden_size"),
    ],
)
def test_settings_of_another_architecture_are_refused_in_a_single_line(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


def test_stop_length_and_context_end_a_request() -> None:
    (prompt,) = prompts(1)
    stopped = run(engine(), [request(prompt, 1, max_tokens=200)])[0]
    assert stopped.finish is FinishReason.STOP
    assert int(stopped.completion[-1]) in RENDERER.stop_token_ids
    cut = run(engine(), [request(prompt, 1, stops=(), max_tokens=3)])[0]
    assert (cut.finish, len(cut.completion)) == (FinishReason.LENGTH, 3)
    full = run(engine(length=len(prompt) + 5), [request(prompt, 1, stops=(), max_tokens=100)])[0]
    assert (full.finish, len(full.completion)) == (FinishReason.LENGTH, 5)


def test_what_cannot_be_served_is_refused_at_once() -> None:
    served = engine(length=64, max_waiting=2)
    with pytest.raises(BackendError) as caught:
        served.add(request(np.zeros(64, dtype=np.int32)))
    assert caught.value.code is FailureCode.MAX_TOKENS
    for bad in (
        np.zeros(0, dtype=np.int32),
        np.array([served.shape.vocab_size], dtype=np.int32),
        np.array([-1], dtype=np.int32),
    ):
        with pytest.raises(BackendError) as caught:
            served.add(request(bad))
        assert caught.value.code is FailureCode.BACKEND_PROTOCOL
    for _ in range(2):
        served.add(request(np.zeros(3, dtype=np.int32)))
    with pytest.raises(BackendError) as caught:
        served.add(request(np.zeros(3, dtype=np.int32)))
    assert caught.value.code is FailureCode.BACKEND_UNAVAILABLE


def test_a_cache_beyond_reason_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        engine(rows=20_000)
