"""What a RUN worker's last life left, until the gateway has said who goes on with it.

    journals -> sandbox still there? -> claim -> adopted: the row is in hand again, in a new life
                                              -> not: journal and sandbox go

A claim lives until the first welcome. The gateway alone decides: an attempt that is superseded,
decided or in another worker's hands is nobody's to go on with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from prorl.control import Claim
from prorl.errors import RolloutError
from prorl.flight.inlet import Taken
from prorl.flight.queues import wire_bytes
from prorl.journal import Ended, Journals, Recovered
from prorl.protocols import SandboxHost
from prorl.schema.columns import read_sandbox
from prorl.types import AttemptKey

ALIVE_S = 5.0
"""For the sandboxes of the last life to be reached."""

log = logging.getLogger("prorl.stages")


class Adoption:
    """What a new life of one RUN worker takes over from the one before."""

    def __init__(self, journals: Journals, host: SandboxHost) -> None:
        self._journals, self._host = journals, host
        self._found: dict[AttemptKey, Recovered] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read the journals; forget those whose sandbox is gone, since nothing can go on there."""
        found = self._journals.open()
        alive = await asyncio.gather(*(self._alive(recovered) for recovered in found))
        for recovered, reached in zip(found, alive, strict=True):
            if reached:
                self._found[recovered.key] = recovered
            else:
                log.info("%s cannot go on: its sandbox is gone", recovered.key)
                self._journals.refuse(recovered)

    async def _alive(self, recovered: Recovered) -> bool:
        ref = read_sandbox(recovered.row)
        if not ref.sandbox_id or any(isinstance(record, Ended) for record in recovered.records):
            return True
        try:
            async with asyncio.timeout(ALIVE_S), self._host.connect(ref):
                return True
        except (RolloutError, TimeoutError):
            return False

    def claims(self) -> list[Claim]:
        """What the gateway must decide."""
        return [Claim(*recovered.key, recovered.epoch) for recovered in self._found.values()]

    def decided(self, adopted: Iterable[Claim], elsewhere: Iterable[AttemptKey]) -> list[Taken]:
        """Rows that are in hand again; the rest is forgotten.

        Its sandboxes are stopped unless the attempt is in another worker's hands.
        """
        epochs: Mapping[AttemptKey, int] = {claim.key: claim.epoch for claim in adopted}
        others = set(elsewhere)
        found, self._found = self._found, {}
        for key, recovered in found.items():
            if key in epochs:
                self._journals.adopt(recovered, epochs[key])
            else:
                self._journals.refuse(recovered)
                if key not in others:
                    self._stop(recovered)
        if found:
            log.info("of %d attempts of the last life %d go on", len(found), len(epochs))
        return [
            Taken(key, found[key].row, wire_bytes(found[key].row.batch))
            for key in found
            if key in epochs
        ]

    def _stop(self, recovered: Recovered) -> None:
        """EVAL may have a sandbox of the same owner: only RUN's is ended."""
        task = asyncio.ensure_future(self._stop_quietly(recovered))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stop_quietly(self, recovered: Recovered) -> None:
        ref = read_sandbox(recovered.row)
        try:
            if ref.sandbox_id:
                await self._host.stop(ref)
        except RolloutError as error:
            log.warning("cannot stop the sandbox of %s: %s", recovered.key, error)
