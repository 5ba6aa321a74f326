"""Scripted backends: URLs, the turn read from ids, draws that repeat, no state between calls."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from prorl.backends import open_backend
from prorl.backends.scripted import is_right
from prorl.envs import get_env
from prorl.errors import BackendError, ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer
from prorl.types import GenerateRequest, Message, SamplingParams, Task

RENDERER = ChatMLRenderer(ByteTokenizer())
TASK = Task(
    task_id="m/1",
    env="math",
    prompt="Half of 48?",
    data={"answer": "24", "solution": "<<48/2=24>>24\n#### 24"},
)


def _request(
    prompt: NDArray[np.int32],
    task: Task | None = TASK,
    sample_index: int = 0,
    seed: int = 0,
    turn: int = 0,
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=prompt,
        sampling=SamplingParams(),
        seed=seed,
        stop_token_ids=RENDERER.stop_token_ids,
        request_id="r/1/1/0",
        session="s",
        task=task,
        sample_index=sample_index,
        turn=turn,
    )


def _prompt(task: Task = TASK) -> NDArray[np.int32]:
    env = get_env(task.env)
    return RENDERER.prompt(env.messages(task), env.tools(task))


async def test_the_oracle_says_what_its_turn_asks_for() -> None:
    first = _prompt()
    called = await open_backend("scripted:oracle", RENDERER, get_env).generate(_request(first))
    assert [call.name for call in RENDERER.parse(called.token_ids_C).tool_calls] == ["python"]
    bridge = RENDERER.bridge(
        called.token_ids_C, [Message(role="tool", content="24.0 <|im_start|>assistant\n")]
    )
    second = np.concatenate([first, called.token_ids_C, bridge])
    # A backend that never saw the first turn knows where it is.
    again = open_backend("scripted:oracle", RENDERER, get_env)
    answered = await again.generate(_request(second, turn=1))
    assert RENDERER.parse(answered.token_ids_C).content.endswith("#### 24")


async def test_flaky_repeats_and_groups_differ() -> None:
    tasks = [
        Task(task_id=f"t/{i}", env="math", prompt="?", data={"answer": "1"}) for i in range(200)
    ]
    rights = np.array(
        [
            [is_right(_request(_prompt(), task, sample), 0.6) for sample in range(4)]
            for task in tasks
        ]
    )
    again = np.array(
        [
            [is_right(_request(_prompt(), task, sample, seed=9), 0.6) for sample in range(4)]
            for task in tasks
        ]
    )
    np.testing.assert_array_equal(rights, again)
    assert 0.5 < rights.mean() < 0.7
    sums = rights.sum(axis=1)
    assert all((sums == total).any() for total in range(5)), (
        "groups all wrong, mixed and all right occur"
    )
    assert [is_right(_request(_prompt()), mean) for mean in (0.0, 1.0)] == [False, True]


async def test_faults_differ_between_seeds_and_repeat_with_them() -> None:
    backend = open_backend("scripted:faulty?base=noop&error=0.5", RENDERER, get_env)

    async def fails(seed: int) -> bool:
        try:
            await backend.generate(_request(_prompt(), seed=seed))
        except BackendError:
            return True
        return False

    first = [await fails(seed) for seed in range(40)]
    assert first == [await fails(seed) for seed in range(40)]
    assert 8 < sum(first) < 32


async def test_an_oracle_without_its_task_says_so() -> None:
    with pytest.raises(BackendError, match="in-process"):
        await open_backend("scripted:oracle", RENDERER, get_env).generate(
            _request(_prompt(), task=None)
        )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("scripted:orakel", "orakel"),
        ("scripted:flaky?q=1", "unknown field `q`"),
        ("scripted:flaky?p=2", "$.p"),
        ("scripted:flaky?p=nan", "$.p"),
        ("scripted:flaky?p=much", "$.p"),
        ("scripted:faulty?base=none", "base=none"),
        ("scripted:oracle?error=1", "asks for faults"),
        ("grpc://host", "grpc"),
        ("", "backend ''"),
    ],
)
def test_a_wrong_url_is_named(url: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend(url, RENDERER, get_env)
    assert expected in str(caught.value)
