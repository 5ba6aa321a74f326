"""The engine as a `Backend`: one asyncio task steps it while there is work.

Invariants: everything happens on one event loop, which is the engine's alone for the length of a
step (milliseconds for the models it is meant for); a cancelled `generate` leaves no request behind;
weights never change in the middle of a step; a request that comes while it is paused waits and is
answered after `resume`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from prorl.backends.embedded.engine import ActiveRequest, Engine, EngineSettings
from prorl.errors import BackendError, boundary
from prorl.types import Completion, FailureCode, FinishReason, PolicyVersion

if TYPE_CHECKING:
    from prorl.types import GenerateRequest

PauseMode = Literal["abort", "keep"]

_OTHERS = 1 << 30
"""Numbers for weights whose own number is taken."""
_LOOK_S = 0.005
"""The seconds between two looks of a drain whether all have ended."""


class EmbeddedBackend:
    """Implements `prorl.protocols.Backend`, and `pause`, `update_weights`, `resume`."""

    def __init__(
        self,
        directory: str | Path,
        *,
        version: int = 0,
        name: str = "embedded",
        settings: EngineSettings | None = None,
    ) -> None:
        self.name = name
        chosen = settings or EngineSettings()
        self.engine = Engine(Path(directory), version=PolicyVersion(version), settings=chosen)
        self._waiters: dict[ActiveRequest, asyncio.Future[None]] = {}
        self._streams: dict[ActiveRequest, int] = {}
        """Tokens of each streamed row that were told."""
        self._labels: dict[PolicyVersion, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._open = asyncio.Event()
        self._open.set()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def version(self) -> PolicyVersion:
        return self.engine.version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises BackendError; cancelling takes the request out of the batch."""
        started = time.monotonic()
        await self._open.wait()
        row = self.engine.add(request)
        if request.on_part is not None:
            self._streams[row] = 0
        waiter = self._waiters[row] = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await waiter
        finally:
            self._waiters.pop(row, None)
            self._streams.pop(row, None)
            self.engine.abort(row)
        assert row.finish is not None
        llm_s = time.monotonic() - started
        return replace(_snapshot(row, self.name), finish_reason=row.finish, llm_s=llm_s)

    def pause(self, mode: PauseMode = "abort") -> None:
        """`abort` ends what runs with its tokens so far, `keep` freezes it until `resume`."""
        self._paused = True
        if mode == "abort":
            for row in self.engine.running_and_waiting():
                self.engine.abort(row)
                self._finish(row)

    async def drain(self) -> None:
        self._open.clear()
        while self.engine.busy and not self._open.is_set():
            await asyncio.sleep(_LOOK_S)
        if not self._open.is_set():
            self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._open.set()
        self._wake()

    def update_weights(self, directory: str | Path, version: int, label: str = "") -> None:
        """`label` is what replies call them (default: the version).

        Raises ConfigError; then the old ones go on serving.
        """
        policy_version = PolicyVersion(version)
        if self._labels.get(policy_version, label) != label:
            # Two runs use one number: what was sampled under it keeps its label.
            policy_version = PolicyVersion(_OTHERS + len(self._labels))
        self.engine.load(Path(directory), policy_version)
        self._labels[policy_version] = label

    def rename(self, label: str) -> None:
        """Call the weights something else from the next token on; earlier ones keep their label."""
        self.engine.version = PolicyVersion(_OTHERS + len(self._labels))
        self._labels[self.engine.version] = label

    def label(self, version: PolicyVersion) -> str:
        """Returns what replies call the weights of a version."""
        return self._labels.get(version) or str(version)

    async def close(self) -> None:
        self.pause("abort")
        if self._task is not None:
            await self._task

    def _wake(self) -> None:
        if not self._paused and self.engine.busy and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """A bug in the engine fails the requests, not the server."""
        while self.engine.busy and not self._paused:
            try:
                with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, "embedded engine"):
                    finished = self.engine.step()
            except BackendError as error:
                for waiter in self._waiters.values():
                    if not waiter.done():
                        waiter.set_exception(error)
                self.engine.reset()
                return
            for row in finished:
                self._finish(row)
            self._tell()
            await asyncio.sleep(0)

    def _tell(self) -> None:
        """Give streams the tokens that they have collected; what is left comes with the end."""
        for row, num_sent in self._streams.items():
            count = len(row.logprobs)
            if row.finish is None and count - num_sent >= row.request.part_tokens:
                self._streams[row] = count
                assert row.request.on_part is not None
                row.request.on_part(_snapshot(row, self.name))

    def _finish(self, row: ActiveRequest) -> None:
        waiter = self._waiters.get(row)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _snapshot(row: ActiveRequest, name: str) -> Completion:
    """Returns what a request has sampled so far, as a completion that was cut."""
    return Completion(
        token_ids_C=row.completion.astype(np.int32),
        logprobs_C=np.array(row.logprobs, dtype=np.float32),
        finish_reason=FinishReason.ABORT,
        version_ends=tuple(row.version_ends),
        versions=tuple(row.versions),
        cached_tokens=row.cached,
        backend=name,
    )
