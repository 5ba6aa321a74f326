"""The embedded engine and transformers read the same files and agree on every logprob, turn by
turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prorl.backends.embedded import TOY
from prorl.backends.embedded.engine import ActiveRequest, Engine, EngineSettings
from prorl.backends.embedded.model import Model
from prorl.backends.embedded.weights import load
from prorl.trainer.untie import untie
from prorl.types import PolicyVersion
from tests.backends.embedded.helpers import RENDERER, engine, prompts, request, run

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `torch` is not installed")

BOUND = 1e-4
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def _reference(
    directory: Path,
) -> Callable[[Ids, float], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Log-softmax at a temperature after each position, from transformers in float32."""
    torch.set_num_threads(1)  # two collapse on busy cores
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(ids: Ids, temperature: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        with torch.no_grad():
            logits = model(torch.from_numpy(ids).long()[None]).logits[0].double() / temperature
        result: np.ndarray[tuple[int, int], np.dtype[np.float64]] = torch.log_softmax(
            logits, -1
        ).numpy()
        return result

    return logprobs


def _gap(
    row: ActiveRequest,
    reference: Callable[[Ids, float], np.ndarray[tuple[int, int], np.dtype[np.float64]]],
) -> float:
    expected = reference(row.ids[: row.length], row.request.sampling.temperature)
    sampled = expected[np.arange(row.prompt_length - 1, row.length - 1), row.completion]
    return float(np.abs(sampled - np.array(row.logprobs)).max())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_agree_turn_by_turn_in_a_full_batch(temperature: float) -> None:
    reference, served = _reference(TOY), engine(rows=16)
    rows = run(
        served,
        [request(prompt, seed, temperature=temperature) for seed, prompt in enumerate(prompts(24))],
    )
    for turn in range(3):
        assert max(_gap(row, reference) for row in rows) < BOUND
        extended = [
            np.concatenate([row.ids[: row.length], RENDERER.bridge(row.completion, [])])
            for row in rows
        ]
        rows = run(
            served,
            [
                request(ids, 100 * turn + seed, temperature=temperature)
                for seed, ids in enumerate(extended)
            ],
        )
    assert sum(row.cached for row in rows) > sum(row.prompt_length for row in rows) / 2


@pytest.mark.parametrize(
    ("tied", "dtype"), [(True, "float32"), (False, "float16"), (False, "bfloat16")]
)
def test_other_shapes_ties_and_types_are_read_as_transformers_reads_them(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    served = Engine(tmp_path, version=PolicyVersion(0), settings=EngineSettings(rows=4, length=128))
    rng = np.random.default_rng(0)
    starts = [rng.integers(0, 97, size=size).astype(np.int32) for size in (3, 30, 17, 60)]
    rows = run(
        served, [request(ids, seed, stops=(), max_tokens=20) for seed, ids in enumerate(starts)]
    )
    reference = _reference(tmp_path)
    assert max(_gap(row, reference) for row in rows) < BOUND
    if tied:  # as trainers publish such a model
        untie(tmp_path, tmp_path / "untied")
        served.load(tmp_path / "untied", PolicyVersion(1))
        (row,) = run(served, [request(starts[0], 7, stops=(), max_tokens=20)])
        assert _gap(row, reference) < BOUND


def test_positions_turn_by_the_angles_that_transformers_rounds_to() -> None:
    """Exact angles are 3e-5 away at 500 tokens, and were most of the distance between sampler and
    trainer.
    """
    length = 512
    ours = Model(load(TOY), length)
    rotary = transformers.AutoModelForCausalLM.from_pretrained(
        TOY, dtype=torch.float32
    ).model.rotary_emb
    cos, sin = (part[0].numpy() for part in rotary(torch.zeros(1, 1), torch.arange(length)[None]))
    # ours carries the sign of the half that it turns
    sign = np.repeat([-1.0, 1.0], cos.shape[1] // 2)
    assert np.abs(ours._cos[:, 0] - cos).max() < 1e-6
    assert np.abs(ours._sin[:, 0] - sign * sin).max() < 1e-6
