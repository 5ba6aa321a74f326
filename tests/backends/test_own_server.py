"""The server of docs/extending.md is one that prorl trains from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prorl.backends import open_probed
from prorl.envs import get_env
from prorl.testing import RENDERER
from prorl.types import Completion, GenerateRequest, SamplingParams

PROGRAM = Path(__file__).parents[2] / "configs" / "servers" / "tokens.py"


@pytest.fixture
def url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "0"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
        child.kill()


async def test_the_server_of_the_documentation_is_proved_and_samples(url: str) -> None:
    backend = await open_probed(url, RENDERER, get_env)

    async def sample(seed: int) -> Completion:
        request = GenerateRequest(
            prompt_ids_L=np.arange(5, dtype=np.int32),
            sampling=SamplingParams(max_tokens=30),
            seed=seed,
            stop_token_ids=RENDERER.stop_token_ids,
            request_id="r/1/1/0",
            session="s",
        )
        return await backend.generate(request)

    first, again, other = [await sample(seed) for seed in (5, 5, 6)]
    assert len(first.token_ids_C) == len(first.logprobs_C) > 0
    np.testing.assert_array_equal(first.token_ids_C, again.token_ids_C)
    assert first.token_ids_C.tolist() != other.token_ids_C.tolist()
    await backend.close()
