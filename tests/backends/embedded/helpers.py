"""Requests and runs of the engine, as the tests of the embedded backend need them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prorl.backends.embedded import TOY
from prorl.backends.embedded.engine import ActiveRequest, Engine, EngineSettings
from prorl.renderer import ChatMLRenderer
from prorl.tasks.generated import generate
from prorl.tokenizer import HFTokenizer
from prorl.types import GenerateRequest, Message, PolicyVersion, SamplingParams

RENDERER = ChatMLRenderer(HFTokenizer(TOY))


def engine(*, version: int = 0, length: int = 512, **settings: int) -> Engine:
    chosen = EngineSettings(**{"length": length, "max_waiting": 100, **settings})
    return Engine(TOY, version=PolicyVersion(version), settings=chosen)


def prompts(n: int) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    tasks = [*generate("arith", seed=5, n=(n + 1) // 2), *generate("shop", seed=5, n=n // 2)]
    system = Message(role="system", content="Answer with a number.")
    return [
        RENDERER.prompt([system, Message(role="user", content=task.prompt)], []) for task in tasks
    ]


def request(
    prompt: np.ndarray[tuple[int], np.dtype[np.int32]],
    seed: int = 1,
    *,
    temperature: float = 1.0,
    max_tokens: int = 24,
    stops: tuple[int, ...] = RENDERER.stop_token_ids,
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=prompt,
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
        seed=seed,
        stop_token_ids=stops,
        request_id=f"test/{seed}",
        session=str(seed),
    )


def run(served: Engine, requests: Iterable[GenerateRequest]) -> list[ActiveRequest]:
    """Everything to its end; rows in the order of the requests."""
    rows = [served.add(sample_request) for sample_request in requests]
    while served.busy:
        served.step()
    return rows


def same_tokens(first: ActiveRequest, second: ActiveRequest) -> bool:
    return np.array_equal(first.completion, second.completion)


def logprob_gap(first: ActiveRequest, second: ActiveRequest) -> float:
    """Largest difference of logprobs of two rows with the same ids."""
    return float(np.abs(np.array(first.logprobs) - np.array(second.logprobs)).max(initial=0.0))
