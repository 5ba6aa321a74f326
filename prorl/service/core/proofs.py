"""Runs that are being made: a chat template may take minutes to prove, and no request waits for it.

A request waits `REPLY_S`, then hears that the run is being proved; the same request again goes on
waiting. A proof is not in the log: after a restart that request begins it anew. What nobody has
heard of a proof that failed is kept until somebody asks, or `MOST` others came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from prorl.config import RunConfig
from prorl.errors import ConflictError, QueueFullError
from prorl.limits import Clock
from prorl.service.core.accept import check_same
from prorl.service.core.state import RunLife, RunRecord
from prorl.waits import wait_limit_s

REPLY_S = wait_limit_s("renderer.proof")
MOST = 64
"""Runs whose renderer is being proved, each with a helper in turn; one more is refused."""


@dataclass(frozen=True, slots=True)
class PendingProof:
    config: RunConfig
    since: float
    creation: asyncio.Future[bool]


class Proofs:
    def __init__(self, wall: Clock) -> None:
        self._wall, self._proofs = wall, dict[str, PendingProof]()
        self.reply_s = REPLY_S

    async def make(
        self, config: RunConfig, create: Callable[[], Coroutine[None, None, bool]]
    ) -> bool | None:
        """Returns whether this made the run; None: it is still being proved. Raises what `create`
        does. Raises ConflictError for another config than the one that is being proved.
        """
        name = config.run_id
        proof = self._proofs.get(name)
        if proof is None:
            self._make_room()
            creation = asyncio.ensure_future(create())
            proof = self._proofs[name] = PendingProof(config, self._wall(), creation)
        else:
            check_same(proof.config, config)
        await asyncio.wait({proof.creation}, timeout=self.reply_s)
        if not proof.creation.done():
            return None
        first = self._proofs.get(name) is proof
        if first:  # not a later one of the same name, which others wait for
            del self._proofs[name]
        if proof.creation.cancelled():
            raise ConflictError(f"run {name!r} was cancelled while it was proved")
        return proof.creation.result() and first

    def cancel(self, name: str) -> None:
        self._proofs[name].creation.cancel()

    def find(self, name: str) -> RunRecord | None:
        """A run that is not one yet, as views show it."""
        proof = self._proofs.get(name)
        return _as_run(proof, self._wall()) if proof is not None else None

    def all(self) -> list[RunRecord]:
        return [_as_run(proof, self._wall()) for proof in self._proofs.values()]

    async def close(self) -> None:
        making = [proof.creation for proof in self._proofs.values()]
        for creation in making:
            creation.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    def _make_room(self) -> None:
        """Raises QueueFullError when so many are being proved."""
        if len(self._proofs) >= MOST:
            ended = next(
                (name for name, proof in self._proofs.items() if proof.creation.done()), None
            )
            if ended is None:
                raise QueueFullError(f"{MOST} runs are being proved: make it when some are done")
            del self._proofs[ended]


def _as_run(proof: PendingProof, now: float) -> RunRecord:
    """Returns a proof as a run whose state says it: `proving`, or `refused` with the reason."""
    state = "proving"
    problem = f"its chat template is being proved, for {now - proof.since:.0f} s so far"
    if proof.creation.done():
        error = None if proof.creation.cancelled() else proof.creation.exception()
        state, problem = "refused", str(error or "it was cancelled")
    life = RunLife(state=state, problem=problem)
    return RunRecord(config=proof.config, created_at=proof.since, life=life)
