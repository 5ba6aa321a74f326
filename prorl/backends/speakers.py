"""What scripted policies say: the reference's calls, something useless, or dice.

A speaker depends on (run seed, task, sample index) and the turn alone, so that a run repeats and a
retry says the same; which turn it is it reads from the prompt's ids, never from state of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from prorl.errors import BackendError, TaskError
from prorl.types import (
    FailureCode,
    GenerateRequest,
    Json,
    Message,
    Task,
)

if TYPE_CHECKING:
    from prorl.protocols import Env, Renderer
    from prorl.types import Float32, Int32


WRONG_ANSWER = "I do not know."


class Speaker(Protocol):
    """Decides the tokens of one turn."""

    def __call__(self, request: GenerateRequest) -> Spoken | Awaitable[Spoken]: ...


class Spoken(NamedTuple):
    """What a speaker says: ids, with logprobs or without any of its own."""

    ids_C: Int32
    logprobs_C: Float32 | None = None


class Oracle:
    """Makes the reference's calls one a turn, then answers.

    Or, where `is_right` says no, gives a useless answer at once.
    """

    def __init__(
        self,
        renderer: Renderer,
        env: Callable[[str], Env],
        is_right: Callable[[GenerateRequest], bool],
    ) -> None:
        self._renderer, self._env, self._is_right = renderer, env, is_right
        self._useless = Useless(renderer)

    async def __call__(self, request: GenerateRequest) -> Spoken:
        task = request.task
        if task is None:
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL,
                "a scripted oracle needs the task, which no wire carries: run it in-process",
            )
        if not self._is_right(request):
            return self._useless(request)
        reference = await self._reference(task)
        if request.turn < len(reference.calls):
            return self._say(
                Message(role="assistant", content="", tool_calls=(reference.calls[request.turn],))
            )
        return self._say(Message(role="assistant", content=reference.answer))

    async def _reference(self, task: Task) -> Any:
        """How calls solve the task. Raises TaskError where its env knows no such solution."""
        reference: Any = self._env(task.env).reference(task)
        if inspect.isawaitable(reference):
            reference = await reference
        if not hasattr(reference, "calls"):
            raise TaskError(
                f"the reference of env {task.env!r} is a {type(reference).__name__}",
                "Solution(calls, answer)",
            )
        return reference

    def _say(self, message: Message) -> Spoken:
        return Spoken(self._renderer.completion(message))


class Useless:
    """Gives the same useless answer to everything."""

    def __init__(self, renderer: Renderer) -> None:
        self._ids_C = renderer.completion(Message(role="assistant", content=WRONG_ANSWER))

    def __call__(self, request: GenerateRequest) -> Spoken:
        return Spoken(self._ids_C)


class Dice:
    """A distribution made from the last id alone.

    Eight likely ids and a stop token, the rest unlikely.
    """

    def __init__(self, renderer: Renderer, *, raw: bool) -> None:
        self._vocab_size, self._raw = renderer.vocab_size, raw

    def __call__(self, request: GenerateRequest) -> Spoken:
        generator = np.random.default_rng(request.seed)
        last = int(request.prompt_ids_L[-1])
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < request.sampling.max_tokens and (
            not ids or last not in request.stop_token_ids
        ):
            logits = self._logits(last, request.stop_token_ids)
            scaled = _log_softmax(logits / max(request.sampling.temperature, 1e-3))
            last = int(np.argmax(scaled + generator.gumbel(size=self._vocab_size)))
            ids.append(last)
            logprobs.append(float((_log_softmax(logits) if self._raw else scaled)[last]))
        return Spoken(
            np.array(ids, dtype=np.int32),
            np.minimum(np.array(logprobs, dtype=np.float32), np.float32(0.0)),
        )

    def _logits(self, last: int, stop_token_ids: tuple[int, ...]) -> Float32:
        logits = np.zeros(self._vocab_size, dtype=np.float32)
        likely = np.random.default_rng(last).integers(0, self._vocab_size, size=8)
        logits[likely] = np.linspace(4.0, 7.0, 8, dtype=np.float32)
        logits[list(stop_token_ids[:1])] = 4.0
        return logits


def _log_softmax(logits: Float32) -> Float32:
    shifted = logits - logits.max()
    result: Float32 = shifted - np.log(np.exp(shifted).sum())
    return result


def is_right(request: GenerateRequest, mean: float) -> bool:
    """Whether flaky solves this sample.

    Each task has its own probability, `mean` on average over tasks.
    """
    task_id = request.task.task_id if request.task else ""
    if mean <= 0.0:
        return False
    # u ** ((1 - m) / m) has mean m for uniform u, and spreads over all of (0, 1).
    probability: float = draw("task", request.run_seed, task_id) ** ((1 - mean) / mean)
    return draw("sample", request.run_seed, task_id, request.sample_index) < probability


def draw(*parts: Json) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / float(1 << 53)
