"""The toy checkpoint and its making: demonstrations as the service would render them, repeatable
training, a low start.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from configs.toy import tokenizer as toy_tokenizer
from configs.toy.demonstrations import ENVS, MEDIOCRE, STUBBORN, Mistakes, demonstrate, encode
from prorl.agents.calls import tool_text
from prorl.backends.embedded import TOY
from prorl.backends.embedded.weights import load
from prorl.renderer import ChatMLRenderer
from prorl.tasks.generated import generate
from prorl.testing import LocalSandbox
from prorl.tokenizer import HFTokenizer
from tests.renderer.test_chatml import without_texts

RENDERER = ChatMLRenderer(HFTokenizer(TOY))
MAX_BYTES = 3 << 20


def test_the_toy_is_small_and_says_what_it_is() -> None:
    assert sum(file.stat().st_size for file in TOY.iterdir()) < MAX_BYTES
    assert "toy" in (TOY / "README.md").read_text()
    assert RENDERER.tokenizer.vocab_size <= 800


def test_every_digit_and_operator_is_a_single_token_and_a_calls_frame_is_two() -> None:
    encode_text = RENDERER.tokenizer.encode
    assert [
        len(encode_text(text))
        for text in ("12*(345+6)", "7//8", '\n{"name":"python","arguments":{"code":"', '"}}\n')
    ] == [10, 4, 1, 1]


def test_a_grown_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    corpus = ["What is 12 plus 30?", "Tell me the price of figs."]
    toy_tokenizer.save(toy_tokenizer.train(corpus * 20), tmp_path)
    before = HFTokenizer(tmp_path)
    new = "<|im_start|>grep units<|im_end|>"
    toy_tokenizer.grow(tmp_path, {"grep units": 9}, before.num_ids + 6)
    after = HFTokenizer(tmp_path)
    assert after.num_ids == before.num_ids + 6
    assert after.specials == before.specials
    for text in corpus:
        assert np.array_equal(after.encode(text), before.encode(text))
    assert len(after.encode(new)) == len(before.encode(new)) - 6
    assert after.decode(after.encode(new)) == new


@pytest.mark.parametrize(
    ("name", "script"), [(name, script) for script in (MEDIOCRE, STUBBORN) for name in script]
)
def test_demonstrations_are_rendered_as_the_service_renders_them(
    name: str, script: Mapping[str, Mistakes]
) -> None:
    for task in generate(name, seed=3, n=50):
        conversation = demonstrate(task, random.Random(task.task_id), script[name])
        example = encode(RENDERER, task, conversation)
        env = ENVS[name]
        prompt = RENDERER.prompt(env.messages(task), env.tools(task))
        assert np.array_equal(example.ids_L[: len(prompt)], prompt)
        assert not example.trained_L[: len(prompt)].any()
        assert len(example.ids_L) <= 256
        turns = np.split(example.ids_L, np.flatnonzero(np.diff(example.trained_L)) + 1)[1::2]
        spoken = [message for message in conversation if message.role == "assistant"]
        assert [without_texts(RENDERER.parse(turn)) for turn in turns] == spoken
        assert all(int(turn[-1]) in RENDERER.stop_token_ids for turn in turns)


@pytest.mark.parametrize("name", ["arith", "shop", "repair"])
def test_the_likeliest_of_what_it_hears_last_is_wrong_in_most_forms(name: str) -> None:
    """So that the start is low at temperature 0, too, and the right way is among the examples."""
    rng, right = random.Random(0), defaultdict[str, list[bool]](list)
    for task in generate(name, seed=3, n=1200):
        conversation = demonstrate(task, rng, STUBBORN[name])
        calls = [call.arguments for message in conversation for call in message.tool_calls]
        last_answer = conversation[-1].content if name != "repair" else calls[-1].get("new_str")
        right_answer = task.data["answer" if name != "repair" else "mended"]
        right[task.data["form"]].append(last_answer == right_answer)
    shares = [statistics.mean(last_answer) for last_answer in right.values()]
    assert statistics.mean(share > 0.5 for share in shares) < 0.5
    assert min(shares) > 0.15


async def test_what_tools_say_in_demonstrations_is_what_they_say(tmp_path: Path) -> None:
    """The env is `repair`, whose tools are not called there."""
    env, first_words = ENVS["repair"], set[str]()
    for number, task in enumerate(generate("repair", seed=5, n=60)):
        sandbox = LocalSandbox(tmp_path / str(number))
        await env.prepare(task, sandbox)
        conversation = demonstrate(task, random.Random(task.task_id), STUBBORN["repair"])
        calls = [call for message in conversation for call in message.tool_calls]
        tool_results = [message.content for message in conversation if message.role == "tool"]
        for call, text in zip(calls, tool_results, strict=True):
            result = await env.call(task, sandbox, call, 10.0)
            assert tool_text(result, 10.0) == text, task
            first_words.add(text.partition(" ")[0])
    assert first_words == {"def", "replaced", "error:"}


@pytest.mark.slow
def test_making_it_is_repeatable(tmp_path: Path) -> None:
    """One thread and one seed: the same bytes; another seed: another model."""
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    from configs.toy.train import Cycle, SftRecipe, make_checkpoint

    few = (("arith", 4), ("shop", 4))
    cycles = (
        Cycle(2, 3e-3, batch=few),
        Cycle(1, 1e-3, STUBBORN, (*few, ("repair", 4))),
    )
    recipe = SftRecipe(cycles=cycles, tokenizer_tasks=300)

    def make(seed: int, name: str) -> dict[str, bytes]:
        make_checkpoint(seed, tmp_path / name, recipe)
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    first, again, other = make(1, "a"), make(1, "b"), make(2, "c")
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert load(tmp_path / "a").shape.vocab_size == HFTokenizer(tmp_path / "a").vocab_size
