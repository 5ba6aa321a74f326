"""The toy checkpoint and its making: demonstrations as the service would render them, repeatable
training, a low start.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import numpy as np
import pytest

from configs.toy.demonstrations import ENVS, MEDIOCRE, demonstrate, encode, evaluate
from prorl.agents.context import AttemptContext
from prorl.agents.native import NativeAgent
from prorl.backends.embedded import TOY
from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.backends.embedded.weights import load
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.renderer import ChatMLRenderer
from prorl.tasks.generated import generate
from prorl.tokenizer import HFTokenizer
from prorl.types import (
    AttemptKey,
    Json,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Task,
    ToolResult,
)
from tests.renderer.test_chatml import without_texts

RENDERER = ChatMLRenderer(HFTokenizer(TOY))
MAX_BYTES = 3 << 20
PLAIN = re.compile(r"[0-9+\-*%()/]{1,64}")


class Calculator:
    """A sandbox whose python evaluates plain expressions, since a thousand interpreters would take
    a minute.
    """

    ref = SandboxRef()

    async def call(self, tool: str, arguments: dict[str, Json], timeout_s: float) -> ToolResult:
        code = arguments["code"]
        if not PLAIN.fullmatch(code) or "**" in code:
            return ToolResult(output="NameError: x", exit_code=1)
        output = evaluate(code)
        failed = output.startswith("error: ")
        return ToolResult(
            output=output.removeprefix("error: ") if failed else output, exit_code=int(failed)
        )


async def _reward(backend: EmbeddedBackend, task: Task, sample: int) -> float:
    env = get_env(task.env)
    context = AttemptContext(
        task=task,
        env=env,
        messages=env.messages(task),
        tools=env.tools(task),
        renderer=RENDERER,
        backend=backend,
        sandbox=Calculator(),  # type: ignore[arg-type]
        deadline=Deadline(60.0),
        key=AttemptKey("test", sample, 1),
        session=f"test/{sample}",
        sampling=SamplingParams(max_tokens=48),
        limits=RolloutLimits(max_turns=6, max_tokens=512),
    )
    trajectory = await NativeAgent().run(context)
    return (await env.score(task, trajectory.artefact, None, Deadline(1.0))).reward


@pytest.mark.parametrize("name", ["arith", "shop"])
async def test_the_toy_starts_low_but_not_at_nothing(name: str) -> None:
    """So that there is something to learn and something to learn from."""
    backend = EmbeddedBackend(TOY)
    tasks = generate(name, split="heldout", seed=0, n=96)
    rewards = await asyncio.gather(
        *(_reward(backend, task, index) for index, task in enumerate(tasks))
    )
    await backend.close()
    assert 0.08 < np.mean(rewards) < 0.5


def test_the_toy_is_small_and_says_what_it_is() -> None:
    assert sum(file.stat().st_size for file in TOY.iterdir()) < MAX_BYTES
    assert "toy" in (TOY / "README.md").read_text()
    assert RENDERER.tokenizer.vocab_size <= 576


def test_every_digit_and_operator_is_one_token_and_a_calls_frame_is_two() -> None:
    encode_text = RENDERER.tokenizer.encode
    assert [
        len(encode_text(text))
        for text in ("12*(345+6)", "7//8", '\n{"name":"python","arguments":{"code":"', '"}}\n')
    ] == [10, 4, 1, 1]


@pytest.mark.parametrize("name", ["arith", "shop"])
def test_demonstrations_are_rendered_as_the_service_renders_them(name: str) -> None:
    for task in generate(name, seed=3, n=50):
        said = demonstrate(task, random.Random(task.task_id), MEDIOCRE[name])
        example = encode(RENDERER, task, said)
        env = ENVS[name]
        prompt = RENDERER.prompt(env.messages(task), env.tools(task))
        assert np.array_equal(example.ids_L[: len(prompt)], prompt)
        assert not example.trained_L[: len(prompt)].any()
        assert len(example.ids_L) <= 256
        turns = np.split(example.ids_L, np.flatnonzero(np.diff(example.trained_L)) + 1)[1::2]
        spoken = [message for message in said if message.role == "assistant"]
        assert [without_texts(RENDERER.parse(turn)) for turn in turns] == spoken
        assert all(int(turn[-1]) in RENDERER.stop_token_ids for turn in turns)


def test_making_it_is_repeatable(tmp_path: Path) -> None:
    """One thread and one seed: the same bytes; another seed: another model."""
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    from configs.toy.train import Cycle, SftRecipe, make_checkpoint

    cycles = (Cycle(2, 3e-3), Cycle(1, 1e-3))
    recipe = SftRecipe(cycles=cycles, batch=(("arith", 4), ("shop", 4)), tokenizer_tasks=300)

    def make(seed: int, name: str) -> dict[str, bytes]:
        make_checkpoint(seed, tmp_path / name, recipe)
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    first, again, other = make(1, "a"), make(1, "b"), make(2, "c")
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert load(tmp_path / "a").shape.vocab_size == HFTokenizer(tmp_path / "a").vocab_size
