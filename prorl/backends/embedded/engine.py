"""Continuous batching over the numpy model: requests join and leave between steps.

Knows no event loop, no socket and no clock.

Invariants: running requests occupy rows 0 .. n-1 of the cache without a gap; a request's tokens and
logprobs do not depend on its neighbours (up to float32 rounding); tokens sampled before new weights
keep the version that sampled them. Bounded: running requests by rows, waiting ones by
`max_waiting`, the prefix store by bytes, a step by `STEP_TOKENS` packed tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.backends.embedded.model import Chunk, KVCache, Model
from prorl.backends.embedded.prefix import PrefixStore
from prorl.backends.embedded.sampling import draw, uniforms
from prorl.backends.embedded.weights import load, read_shape
from prorl.completion import num_shared
from prorl.errors import BackendError, ConfigError
from prorl.types import FailureCode, FinishReason, PolicyVersion

if TYPE_CHECKING:
    from prorl.types import Float32, GenerateRequest, Int32

STEP_TOKENS = 1024
_CHUNK_TOKENS = 128
# a sibling's prompt that is being computed now is worth a step's wait from this many tokens on
_WORTH_WAITING = 16


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """`ids[:length]` are prompt and sampled so far; `computed` of them are in the cache."""

    request: GenerateRequest
    ids: Int32
    length: int
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]]
    prompt_length: int
    computed: int = 0
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    version_ends: list[int] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def completion(self) -> Int32:
        return self.ids[self.prompt_length : self.length]

    def take(self, token: int, logprob: float, version: PolicyVersion) -> None:
        self.ids[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1] == version:
            self.version_ends[-1] += 1
        else:
            self.versions.append(version)
            self.version_ends.append(len(self.logprobs))
        if token in self.request.stop_token_ids:
            self.finish = FinishReason.STOP
        elif self.length == len(self.ids):
            self.finish = FinishReason.LENGTH


class EngineSettings(NamedTuple):
    """Bounds what the engine may use."""

    rows: int = 64
    """Requests computed at a time."""
    length: int = 4096
    """Context, at most that of the model."""
    prefix_bytes: int = 64 << 20
    """Keys and values kept for the next turn."""
    max_waiting: int = 4096


class Engine:
    """Serves one checkpoint directory. `step` until `busy` is false."""

    def __init__(
        self,
        directory: Path,
        *,
        version: PolicyVersion,
        settings: EngineSettings,
    ) -> None:
        self.shape = read_shape(directory)
        self.length = min(settings.length, self.shape.max_length)
        self.version = version
        self._model = Model(load(directory), self.length)
        self._cache = KVCache(self.shape, settings.rows, self.length)
        self._prefixes = PrefixStore(settings.prefix_bytes)
        self._running: list[ActiveRequest] = []
        self._waiting: deque[ActiveRequest] = deque()
        self._max_waiting = settings.max_waiting
        self.sampled_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: GenerateRequest) -> ActiveRequest:
        """Queue a request. Raises BackendError for one that cannot be served."""
        self._check(request)
        prompt = request.prompt_ids_L
        count = min(self.length - len(prompt), request.sampling.max_tokens)
        ids = np.concatenate([prompt, np.full(count, -1, dtype=np.int32)])
        row = ActiveRequest(
            request, ids, len(prompt), uniforms(request.seed, len(prompt), count), len(prompt)
        )
        self._waiting.append(row)
        return row

    def _check(self, request: GenerateRequest) -> None:
        """Raises BackendError for a request that finds no room or makes no sense."""
        prompt, code = request.prompt_ids_L, FailureCode.BACKEND_PROTOCOL
        if len(self._waiting) >= self._max_waiting:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE, f"{self._max_waiting} requests are waiting"
            )
        if len(prompt) >= self.length:
            raise BackendError(
                FailureCode.MAX_TOKENS, f"{len(prompt)} tokens fill a context of {self.length}"
            )
        if not len(prompt) or request.sampling.max_tokens < 1:
            raise BackendError(
                code, f"{len(prompt)} prompt tokens, {request.sampling.max_tokens} to sample"
            )
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.shape.vocab_size:
            raise BackendError(code, f"a prompt id outside a vocabulary of {self.shape.vocab_size}")

    def step(self) -> list[ActiveRequest]:
        """Advance every request by one chunk or one token; returns those that finished."""
        self._admit()
        chunks = self._chunks()
        if not chunks:
            return []
        logits = self._model.forward(chunks, self._cache)
        ready = []
        for index, chunk in enumerate(chunks):
            row = self._running[chunk.row]
            row.computed = chunk.start + len(chunk.ids)
            if row.computed == row.length:
                ready.append((index, row))
        self._sample(logits[[index for index, _ in ready]], [row for _, row in ready])
        finished = [row for _, row in ready if row.finish]
        for row in finished:
            self._leave(row)
        return finished

    def abort(self, row: ActiveRequest) -> None:
        """Take a request out, keeping its tokens so far; nothing happens if it has finished."""
        if row.finish is None:
            row.finish = FinishReason.ABORT
            if row in self._waiting:
                self._waiting.remove(row)
            else:
                self._leave(row)

    def reset(self) -> None:
        """Forget every request and every prefix, as after an error in the middle of a step."""
        for row in self.running_and_waiting():
            row.finish = FinishReason.ABORT
        self._running.clear()
        self._waiting.clear()
        self._prefixes.clear()

    def running_and_waiting(self) -> list[ActiveRequest]:
        return [*self._running, *self._waiting]

    def load(self, directory: Path, version: PolicyVersion) -> None:
        """Loads other weights. What runs goes on: its context is computed anew, its tokens stay.

        Raises ConfigError for a directory that is not this model; then nothing has changed.
        """
        shape = read_shape(directory)
        if replace(shape, tied=self.shape.tied) != self.shape:  # an untied copy is the same model
            raise ConfigError(
                f"{directory} holds {shape}",
                f"the shape that is served, {self.shape}",
                "start another backend for it",
            )
        self._model = Model(load(directory), self.length)
        self.version = version
        self._prefixes.clear()
        for row in self._running:
            row.computed = 0

    def _admit(self) -> None:
        """Give free rows to waiting requests in order, each with its longest known prefix."""
        pending: list[Int32] = []
        while self._waiting and len(self._running) < self._cache.rows:
            row = self._waiting[0]
            prompt = row.ids[: row.length]
            reused = self._reuse(row)
            if any(num_shared(prompt, other) >= reused + _WORTH_WAITING for other in pending):
                return
            self._waiting.popleft()
            self._running.append(row)
            row.computed = row.cached = reused
            pending.append(prompt)

    def _reuse(self, row: ActiveRequest) -> int:
        """Fill the next free row from a running row or the store; leave one token to compute."""
        target, prompt, limit = len(self._running), row.ids[: row.length], row.length - 1
        running = [num_shared(other.ids[: other.computed], prompt) for other in self._running]
        longest = max(running, default=0)
        stored = self._prefixes.find(prompt)
        if stored and stored.common >= longest:
            common = min(limit, stored.common)
            self._cache.write(target, stored.saved[:, :, :, :common])
            return common
        common = min(limit, longest)
        if common:
            self._cache.copy(running.index(longest), target, common)
        return common

    def _chunks(self) -> list[Chunk]:
        """Returns what each row computes next; those that sample come first: no prompt delays them
        long.
        """
        budget = STEP_TOKENS - len(self._running)
        chunks = []
        for index, row in enumerate(self._running):
            size = min(row.length - row.computed, _CHUNK_TOKENS, 1 + max(0, budget))
            budget -= size - 1
            chunks.append(Chunk(index, row.computed, row.ids[row.computed : row.computed + size]))
        return chunks

    def _sample(self, logits: Float32, rows: list[ActiveRequest]) -> None:
        if not rows:
            return
        uniform = np.array([row.uniforms[row.length - row.prompt_length] for row in rows])
        draws = draw(logits, uniform, [row.request.sampling for row in rows])
        for row, token, logprob in zip(
            rows, draws.ids.tolist(), draws.logprobs.tolist(), strict=True
        ):
            row.take(token, logprob, self.version)
        self.sampled_tokens += len(rows)

    def _leave(self, row: ActiveRequest) -> None:
        """Keep the row's prefix and close the gap with the last row."""
        place, last = self._running.index(row), len(self._running) - 1
        self._prefixes.add(row.ids[: row.computed].copy(), self._cache.read(place, row.computed))
        moved = self._running.pop()
        if place != last:
            self._running[place] = moved
            self._cache.copy(last, place, moved.computed)
