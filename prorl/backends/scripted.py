"""Policies that are scripts: in-process backends, for tests, checks and benches.

Invariants: what they say depends on (run seed, task, sample index) and the turn alone, so that a
run repeats and a retry says the same; which turn it is they read from the prompt's ids, never from
state of their own. Faults are drawn from the request's seed, which differs between attempts, so
that a retry can do better. Logprobs are made up but valid, except where a fault is asked for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from prorl.errors import BackendError, ConfigError, TaskError
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Json,
    Message,
    PolicyVersion,
    Task,
)

if TYPE_CHECKING:
    from prorl.backends.catalogue import BackendContext
    from prorl.protocols import Backend, Env, RemoteRenderer, Renderer
    from prorl.types import Float32, Int32


Share = Annotated[float, Meta(ge=0, le=1)]
"""A probability per model call."""


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what a scripted URL asks for; each field is a query parameter."""

    p: Share = 0.5
    """flaky: mean probability of being right; each task has its own."""
    delay_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Time of every model call."""
    base: str = "oracle"
    """faulty: whose tokens are spoilt."""
    error: Share = 0.0
    """faulty: share that fails as an unreachable backend does."""
    hang: Share = 0.0
    """faulty: share that never answers."""
    nan: Share = 0.0
    """faulty: share with a NaN logprob."""
    positive: Share = 0.0
    """faulty: share with a logprob above 0."""
    short: Share = 0.0
    """faulty: share with one logprob too few."""
    foreign: Share = 0.0
    """faulty: share with an id outside the vocabulary."""
    raw: Share = 0.0
    """random: 1 gives logprobs of temperature 1 whatever was asked for, as vLLM's default does."""


_FAULTS = ("error", "hang", "nan", "positive", "short", "foreign")


def open_scripted(url: str, context: BackendContext) -> Backend:
    parts = urlsplit(url)
    try:
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
        script = msgspec.convert(parameters, Script, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(Script.__struct_fields__)
        raise ConfigError(f"{url}: {error}", f"numbers from 0 to 1, of {names}") from None
    name = parts.path
    renderer, env = context.renderer, context.env
    speakers: dict[str, Callable[[], Speaker]] = {
        "oracle": lambda: Oracle(renderer, env, lambda request: True),
        "flaky": lambda: Oracle(renderer, env, lambda request: is_right(request, script.p)),
        "noop": lambda: Useless(renderer),
        "random": lambda: Dice(renderer, raw=script.raw >= 1.0),
    }
    if name == "faulty":
        if script.base not in speakers:
            raise ConfigError(f"{url}: base={script.base}", f"one of {', '.join(speakers)}")
        return ScriptedBackend(url, speakers[script.base](), script)
    if name not in speakers:
        raise ConfigError(
            f"scripted backend {name!r}",
            f"one of {', '.join(speakers)}, faulty",
            "write scripted:oracle",
        )
    if any(getattr(script, fault) for fault in _FAULTS):
        raise ConfigError(
            f"{url} asks for faults", "scripted:faulty", f"write scripted:faulty?base={name}&..."
        )
    return ScriptedBackend(url, speakers[name](), script)


class ScriptedBackend:
    """Implements `prorl.protocols.Backend` around a speaker."""

    def __init__(self, url: str, speaker: Speaker, script: Script) -> None:
        self.name = url
        self.policy_version = PolicyVersion(0)
        self._speaker, self._script = speaker, script

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._script.delay_s:
            await asyncio.sleep(self._script.delay_s)
        fault = self._fault(request)
        if fault == "error":
            raise BackendError(FailureCode.BACKEND_UNAVAILABLE, f"{self.name}: a scripted error")
        if fault == "hang":
            await asyncio.Event().wait()
        spoken = self._speaker(request)
        if inspect.isawaitable(spoken):
            spoken = await spoken
        completion = self._completion(request, spoken)
        ids, logprobs = completion.token_ids_C.copy(), completion.logprobs_C.copy()
        if fault == "nan":
            logprobs[-1] = np.nan
        elif fault == "positive":
            logprobs[0] = 0.5
        elif fault == "short":
            logprobs = logprobs[:-1]
        elif fault == "foreign":
            ids[0] = 2**31 - 1
        else:
            return completion
        return replace(completion, token_ids_C=ids, logprobs_C=logprobs)

    def _completion(self, request: GenerateRequest, spoken: Spoken) -> Completion:
        cut = spoken.ids_C[: request.sampling.max_tokens]
        logprobs = (
            _made_up(request, len(cut))
            if spoken.logprobs_C is None
            else spoken.logprobs_C[: len(cut)]
        )
        stopped = len(cut) > 0 and int(cut[-1]) in request.stop_token_ids
        return Completion(
            token_ids_C=cut,
            logprobs_C=logprobs,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            version_ends=(len(cut),),
            versions=(max(self.policy_version, request.min_version, request.newest_version),),
            llm_s=self._script.delay_s,
            backend=self.name,
        )

    async def close(self) -> None:
        """Nothing to close."""

    def _fault(self, request: GenerateRequest) -> str:
        """The fault of this call, if any: the shares lie one after the other on [0, 1)."""
        point = draw("fault", request.seed)
        for name in _FAULTS:
            point -= getattr(self._script, name)
            if point < 0:
                return name
        return ""


def _made_up(request: GenerateRequest, count: int) -> Float32:
    """Logprobs as of a model, from (run seed, task, sample, prompt length) alone."""
    task_id = request.task.task_id if request.task else ""
    seed = int(
        draw("logprobs", request.run_seed, task_id, request.sample_index, len(request.prompt_ids_L))
        * (1 << 53)
    )
    return -np.random.default_rng(seed).random(count, dtype=np.float32)


# ---- what scripted policies say

WRONG_ANSWER = "I do not know."


class Speaker(Protocol):
    """Decides the tokens of one turn."""

    def __call__(self, request: GenerateRequest) -> Spoken | Awaitable[Spoken]: ...


class Spoken(NamedTuple):
    ids_C: Int32
    logprobs_C: Float32 | None = None


class Oracle:
    """Makes the reference's calls one a turn, then answers, and replies to the env's own turns;
    useless where it is not right.
    """

    def __init__(
        self,
        renderer: Renderer | RemoteRenderer,
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
            return await self._useless(request)
        reference = await self._reference(task)
        if request.turn < len(reference.calls):
            return await self._say(
                Message(role="assistant", content="", tool_calls=(reference.calls[request.turn],))
            )
        answers = (reference.answer, *getattr(reference, "replies", ()))
        place = min(request.turn - len(reference.calls), len(answers) - 1)
        return await self._say(Message(role="assistant", content=answers[place]))

    async def _reference(self, task: Task) -> Any:
        """Returns how calls solve the task. Raises TaskError where its env has no such solution."""
        reference: Any = self._env(task.env).reference(task)
        if inspect.isawaitable(reference):
            reference = await reference
        if not hasattr(reference, "calls"):
            raise TaskError(
                f"the reference of env {task.env!r} is a {type(reference).__name__}",
                "Solution(calls, answer)",
            )
        return reference

    async def _say(self, message: Message) -> Spoken:
        return Spoken(await completion_of(self._renderer, message))


async def completion_of(renderer: Renderer | RemoteRenderer, message: Message) -> Int32:
    """Ids of a message; a user's renderer gives them from a helper."""
    ids = renderer.completion(message)
    return await ids if inspect.isawaitable(ids) else ids


class Useless:
    """Gives the same useless answer to everything."""

    def __init__(self, renderer: Renderer | RemoteRenderer) -> None:
        self._renderer = renderer
        self._ids_C: Int32 | None = None

    async def __call__(self, request: GenerateRequest) -> Spoken:
        if self._ids_C is None:
            answer = Message(role="assistant", content=WRONG_ANSWER)
            self._ids_C = await completion_of(self._renderer, answer)
        return Spoken(self._ids_C)


class Dice:
    """A distribution made from the last id: eight likely ids and a stop token."""

    def __init__(self, renderer: Renderer | RemoteRenderer, *, raw: bool) -> None:
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
    """Returns whether flaky solves this sample; each task has its own probability, `mean` on
    average.
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
