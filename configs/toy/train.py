"""Makes the toy checkpoint: a small Qwen3 trained on mediocre demonstrations.

`make checkpoint` runs it; a few minutes on one core.

    python -m configs.toy.train --seed 0 --out prorl/assets/toy

Two cycles of one schedule, the second from what the first left: copying numbers exactly is what a
toy learns last. Then a short one in which it hears the script's habits. Two more teach it `repair`,
whose words come behind those that it knows, while it goes on hearing the other sets.

Invariants: one torch thread and one seed give the same files again on the same machine; the
directory is a Hugging Face checkpoint in float32 with its tokenizer. It does not promise a good
policy: it must start low (see `configs.toy.demonstrations`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from configs.toy import tokenizer as toy_tokenizer
from configs.toy.demonstrations import MEDIOCRE, STUBBORN, Example, Mistakes, demonstrate, encode
from prorl.renderer import ChatMLRenderer
from prorl.tasks.generated import generate
from prorl.tokenizer import HFTokenizer

_WARM_UP_STEPS = 30
_ROW_TASKS = 256
_SEEDS = 1_000_000
"""Between the seeds of two rows of tasks: users' seeds are below it."""
_ROWS = 1000
"""Between the first rows of two cycles."""


class Cycle(NamedTuple):
    """One optimizer's life: warm-up, constant, down to zero."""

    steps: int
    learning_rate: float
    script: Mapping[str, Mistakes] = MEDIOCRE
    batch: tuple[tuple[str, int], ...] = (("arith", 32), ("shop", 32))
    """Demonstrations of each set a step."""


class SftRecipe(NamedTuple):
    """How much training: cycles, numbers of demonstrations per step and set, AdamW."""

    cycles: tuple[Cycle, ...] = (
        Cycle(800, 3e-3),
        Cycle(500, 2e-3),
        Cycle(150, 1.5e-3, STUBBORN),
        Cycle(200, 2e-3, STUBBORN, (("arith", 20), ("shop", 16), ("repair", 32))),
        Cycle(440, 2.5e-3, STUBBORN, (("arith", 8), ("shop", 6), ("repair", 24))),
    )
    betas: tuple[float, float] = (0.9, 0.98)
    tokenizer_tasks: int = 2000
    """Per set, whose demonstrations the vocabulary is learned from."""


def build_tokenizer(seed: int, directory: Path, num_tasks: int) -> ChatMLRenderer:
    """Learn a tokenizer from demonstrations, write it, and give the renderer over it."""
    recorder = toy_tokenizer.TextRecorder()
    renderer = ChatMLRenderer(recorder)
    for name in MEDIOCRE:
        for _ in _examples(renderer, name, MEDIOCRE, seed, num_tasks):
            pass
    # the renderer encodes it once and keeps it
    recorder.texts["assistant\n"] = recorder.texts.total()
    texts = itertools.chain.from_iterable(
        itertools.repeat(text, count) for text, count in sorted(recorder.texts.items())
    )
    toy_tokenizer.save(toy_tokenizer.train(texts), directory)
    return ChatMLRenderer(HFTokenizer(directory))


def grow(
    model: Qwen3ForCausalLM, seed: int, directory: Path, names: set[str], num_tasks: int
) -> ChatMLRenderer:
    """Words of sets that come later: ids that the model knows stay, new ones start at random."""
    recorder = toy_tokenizer.TextRecorder()
    renderer = ChatMLRenderer(recorder)
    for name in sorted(names):
        for _ in _examples(renderer, name, STUBBORN, seed, num_tasks):
            pass
    toy_tokenizer.grow(directory, recorder.texts, toy_tokenizer.GROWN_SIZE)
    tokenizer = HFTokenizer(directory)
    torch.manual_seed(seed)
    model.resize_token_embeddings(tokenizer.num_ids, mean_resizing=False)
    model.config.vocab_size = tokenizer.num_ids
    return ChatMLRenderer(tokenizer)


def build_model(vocab_size: int, end_id: int, pad_id: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 0.4 million parameters."""
    config = Qwen3Config(
        **_ARCHITECTURE,
        vocab_size=vocab_size,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[end_id, pad_id], pad_token_id=pad_id
    )
    return model


_ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
"""Embeddings are not tied: vLLM reloads tied ones wrongly on CPU."""


def train(
    model: Qwen3ForCausalLM, renderer: ChatMLRenderer, seed: int, recipe: SftRecipe, number: int
) -> Iterator[float]:
    """A cycle, one AdamW step per demonstration batch; yields each step's loss (nats a token)."""
    cycle = recipe.cycles[number]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cycle.learning_rate, betas=recipe.betas, weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, cycle.steps))
    sources = [
        (_examples(renderer, name, cycle.script, seed, cycle.steps * count, number), count)
        for name, count in cycle.batch
    ]
    for _ in range(cycle.steps):
        loss = _backward(model, [list(itertools.islice(*source)) for source in sources])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def _backward(model: Qwen3ForCausalLM, batches: list[list[Example]]) -> float:
    """Gradients of the mean loss over the tokens that the script said; that loss, in nats."""
    num_trained = sum(int(example.trained_L.sum()) for batch in batches for example in batch)
    losses = []
    for batch in batches:
        loss = _loss_sum(model, batch) / num_trained
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    return sum(losses)


def _examples(
    renderer: ChatMLRenderer,
    name: str,
    script: Mapping[str, Mistakes],
    seed: int,
    n: int,
    cycle: int = 0,
) -> Iterator[Example]:
    """Make n demonstrations.

    Tasks differ within a row of `_ROW_TASKS`; over all of them, a form with few prompts would
    hardly ever occur.
    """
    rng = random.Random(f"demonstrations:{name}:{seed}" + (f":{cycle}" if cycle else ""))
    for row, first in enumerate(range(0, n, _ROW_TASKS)):
        task_seed = seed + (row + cycle * _ROWS) * _SEEDS
        for task in generate(name, split="train", seed=task_seed, n=min(_ROW_TASKS, n - first)):
            yield encode(renderer, task, demonstrate(task, rng, script[name]))


def _rate(step: int, steps: int) -> float:
    """Warm-up, constant, then linear to zero over the second half."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS, 2.0 * (steps - step) / steps)


def _loss_sum(model: Qwen3ForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Cross entropy summed over trained tokens.

    Padding is on the right, where causal attention never looks.
    """
    length = max(len(example.ids_L) for example in batch)
    ids_BL = np.zeros((len(batch), length), dtype=np.int64)
    trained_BL = np.zeros((len(batch), length), dtype=bool)
    for row, example in enumerate(batch):
        ids_BL[row, : len(example.ids_L)] = example.ids_L
        trained_BL[row, : len(example.ids_L)] = example.trained_L
    hidden_BLD = model.model(input_ids=torch.from_numpy(ids_BL), use_cache=False).last_hidden_state
    mask_BL = torch.from_numpy(trained_BL[:, 1:])
    logits_CV = model.lm_head(hidden_BLD[:, :-1][mask_BL])
    return functional.cross_entropy(
        logits_CV, torch.from_numpy(ids_BL[:, 1:])[mask_BL], reduction="sum"
    )


def make_checkpoint(seed: int, directory: Path, recipe: SftRecipe) -> None:
    """Tokenizer, model, training, files; progress on stderr."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    renderer = build_tokenizer(seed, directory, recipe.tokenizer_tasks)
    specials = renderer.tokenizer.specials
    model = build_model(
        renderer.vocab_size, specials[toy_tokenizer.END], specials[toy_tokenizer.PAD]
    )
    known = set(MEDIOCRE)
    for number, cycle in enumerate(recipe.cycles):
        if new := {name for name, _ in cycle.batch} - known:
            known |= new
            renderer = grow(model, seed, directory, new, recipe.tokenizer_tasks)
        _report(train(model, renderer, seed, recipe, number), number, cycle.steps)
    model.save_pretrained(directory)


def _report(losses: Iterator[float], cycle: int, steps: int) -> None:
    started = time.monotonic()
    for step, loss in enumerate(losses, start=1):
        if step % 50 == 0 or step == steps:
            print(
                f"cycle {cycle} step {step}/{steps}  loss {loss:.3f} "
                f" {time.monotonic() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the toy checkpoint.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    options = parser.parse_args()
    make_checkpoint(options.seed, options.out, SftRecipe())


if __name__ == "__main__":
    main()
