"""Policies that are scripts: in-process backends that take and give token ids like any other.

For tests, checks and benches.

Invariants: what they say depends on (run seed, task, sample index) and the turn alone, so that a
run repeats and a retry says the same; which turn it is they read from the prompt's ids, never from
state of their own. Faults are drawn from the request's seed, which differs between attempts, so
that a retry can do better. Logprobs are made up but valid, except where a fault is asked for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from prorl.backends.speakers import Dice, Oracle, Speaker, Spoken, Useless, draw, is_right
from prorl.errors import BackendError, ConfigError
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Json,
    PolicyVersion,
)

if TYPE_CHECKING:
    from prorl.backends.catalogue import BackendContext
    from prorl.protocols import Backend
    from prorl.types import Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a scripted URL asks for; each field is a query parameter.

    Shares are probabilities per model call.
    """

    p: float = 0.5
    """flaky: mean probability of being right; each task has its own."""
    delay_s: float = 0.0
    """Time of every model call."""
    base: str = "oracle"
    """faulty: whose tokens are spoilt."""
    error: float = 0.0
    """faulty: share that fails as an unreachable backend does."""
    hang: float = 0.0
    """faulty: share that never answers."""
    nan: float = 0.0
    """faulty: share with a NaN logprob."""
    positive: float = 0.0
    """faulty: share with a logprob above 0."""
    short: float = 0.0
    """faulty: share with one logprob too few."""
    foreign: float = 0.0
    """faulty: share with an id outside the vocabulary."""
    raw: float = 0.0
    """random: 1 gives logprobs of temperature 1 whatever was asked for, as vLLM's default does."""


_FAULTS = ("error", "hang", "nan", "positive", "short", "foreign")


def open_scripted(url: str, context: BackendContext) -> Backend:
    """A scripted backend from its URL. Raises ConfigError."""
    name, script = _parse(url)
    speakers = _speakers(script, context)
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


def _speakers(script: Script, context: BackendContext) -> dict[str, Callable[[], Speaker]]:
    renderer, env = context.renderer, context.env
    return {
        "oracle": lambda: Oracle(renderer, env, lambda request: True),
        "flaky": lambda: Oracle(renderer, env, lambda request: is_right(request, script.p)),
        "noop": lambda: Useless(renderer),
        "random": lambda: Dice(renderer, raw=script.raw >= 1.0),
    }


def _parse(url: str) -> tuple[str, Script]:
    parts = urlsplit(url)
    kinds = {field.name: str if field.name == "base" else float for field in fields(Script)}
    values: dict[str, Json] = {}
    for key, text in parse_qsl(parts.query, keep_blank_values=True):
        if key not in kinds:
            raise ConfigError(f"{url}: unknown parameter {key!r}", ", ".join(kinds))
        try:
            values[key] = kinds[key](text)
        except ValueError as cause:
            raise ConfigError(f"{url}: {key}={text!r}", "a number") from cause
        if kinds[key] is float and not 0.0 <= values[key] <= (3600.0 if key == "delay_s" else 1.0):
            raise ConfigError(
                f"{url}: {key}={text}",
                "seconds from 0 to 3600" if key == "delay_s" else "a share from 0 to 1",
            )
    return parts.path, Script(**values)


class ScriptedBackend:
    """Implements `prorl.protocols.Backend` around a speaker."""

    def __init__(self, url: str, speaker: Speaker, script: Script) -> None:
        self.name = url
        self.policy_version = PolicyVersion(0)
        self._speaker, self._script = speaker, script

    async def generate(self, request: GenerateRequest) -> Completion:
        """What the speaker says, cut at the requested length, late or spoilt as the script asks."""
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
            versions=(max(self.policy_version, request.min_version, request.known_version),),
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
