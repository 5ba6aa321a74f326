"""All sandboxes of one node: starting, lending, ending.

Owned by sandboxd's loop; nothing here blocks it for long.

A sandbox belongs to (owner = run/rollout/attempt, purpose) and is lent once. `reserve` and the warm
pool start it ahead; a start takes a reserved one, else a warm one, else makes one. A start for a
newer attempt of a rollout ends what older attempts left. What a process that died has left ends
when its next incarnation says what it goes on with (`keep`). Every sandbox ends by `stop`, with its
owner, by `keep`, at its wall time, by itself, or with sandboxd.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prorl.errors import ProrlError, SandboxError
from prorl.network_policy import NetworkPolicy
from prorl.sandbox.blame import Cause, Fate, fate_of
from prorl.sandbox.node.live import NOBODY, Holder, LiveSandbox
from prorl.sandbox.node.maker import Maker
from prorl.sandbox.node.settings import Settings
from prorl.sandbox.wire import WireError
from prorl.types import FailureCode, Json, SandboxRef, SandboxSpec
from prorl.waits import wait_limit_s

MAX_FATES = 4096
"""Ends that are remembered for who asks late, oldest dropped first."""
MAX_WARM_SPECS = 4
"""Specs for which warm sandboxes are kept, those not asked for longest dropped first."""
FATE_S = wait_limit_s("sandbox.fate")
REFILL_S = 0.05
"""The seconds after a start until the next warm one is begun: making it takes a core, which the
first commands of the one just lent need.
"""


@asynccontextmanager
async def own_pool(kind: str) -> AsyncIterator[SandboxPool]:
    """A pool with nothing warm, in this process, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # a sandbox's own uid must pass through to its workspace
        pool = SandboxPool(kind, Path(folder), "local", Settings(warm=0))
        await pool.open()
        try:
            yield pool
        finally:
            await pool.close()


class Reservation(NamedTuple):
    """The owner, purpose and spec by which a reservation of a sandbox is looked up."""

    owner: str
    purpose: str
    spec: SandboxSpec


class _Making(NamedTuple):
    """A reserved sandbox, made or on its way, and the process that will want it."""

    task: asyncio.Task[LiveSandbox]
    holder: Holder


class SandboxPool:
    """The owners of all sandboxes; `Maker` makes and ends them."""

    def __init__(self, kind: str, root: Path, node_id: str, settings: Settings) -> None:
        self._settings = settings
        self._maker = Maker(kind, root, node_id, settings, self._on_end)
        self._reserved: dict[Reservation, _Making] = {}
        self._warm: OrderedDict[SandboxSpec, list[LiveSandbox]] = OrderedDict()
        self._fates: OrderedDict[str, Fate] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def open(self) -> None:
        await self._maker.open()

    async def start(
        self, owner: str, purpose: str, spec: SandboxSpec, holder: Holder = NOBODY
    ) -> SandboxRef:
        """A sandbox for this owner: the one reserved, a warm one, a new one.

        Raises SandboxError.
        """
        self._end_older_attempts(owner)
        reserved = self._reserved.pop(Reservation(owner, purpose, spec), None)
        live = await reserved.task if reserved is not None else self._take_warm(spec)
        if live is None or live.ending is not None or live.exited.done():
            live = await self._maker.make(spec)
        live.owner, live.purpose, live.holder = owner, purpose, holder
        live.wall = asyncio.get_running_loop().call_later(spec.wall_s, self._on_wall_time, live)
        self._refill_soon(spec)
        return live.ref

    def reserve(self, owner: str, purpose: str, spec: SandboxSpec, holder: Holder = NOBODY) -> None:
        """Begin to make one for a later `start` with the same arguments."""
        reservation = Reservation(owner, purpose, spec)
        if reservation not in self._reserved:
            self._end_older_attempts(owner)
            task = self._spawn(self._make_for(owner, purpose, spec))
            self._reserved[reservation] = _Making(task, holder)

    async def stop(self, sandbox_id: str) -> None:
        live = self._maker.sandboxes.get(sandbox_id)
        if live is not None:
            await self._maker.end(live, fate_of(Cause.STOPPED))

    async def stop_owner(self, owner: str) -> None:
        for reservation in [kept for kept in self._reserved if kept.owner == owner]:
            self._unreserve(reservation)
        mine = [
            live.ref.sandbox_id for live in self._maker.sandboxes.values() if live.owner == owner
        ]
        await asyncio.gather(*(self.stop(sandbox_id) for sandbox_id in mine))

    async def keep(self, holder: Holder, sandboxes: Mapping[str, str]) -> None:
        """`sandboxes`, by owner, belong to this incarnation from here on, and so is what is
        reserved for these owners. Whatever else earlier incarnations of the process have left ends.
        """
        abandoned: list[str] = []
        for reservation, making in list(self._reserved.items()):
            if holder.is_after(making.holder):
                if reservation.owner in sandboxes:
                    self._reserved[reservation] = making._replace(holder=holder)
                else:
                    abandoned += self._unreserve(reservation)
        for live in self._maker.sandboxes.values():
            if holder.is_after(live.holder):
                if sandboxes.get(live.owner) == live.ref.sandbox_id:
                    live.holder = holder
                else:
                    abandoned.append(live.ref.sandbox_id)
        await asyncio.gather(*map(self.stop, abandoned))

    def _unreserve(self, reservation: Reservation) -> list[str]:
        """Give a reservation up. Returns the sandbox to stop, where it is made already."""
        task = self._reserved.pop(reservation).task
        if not task.done():
            task.cancel()
            return []
        is_made = not task.cancelled() and task.exception() is None
        return [task.result().ref.sandbox_id] if is_made else []

    async def set_network(self, sandbox_id: str, network: NetworkPolicy) -> None:
        """Give a living sandbox another network, up to the operator's cap. Raises SandboxError."""
        live = self._maker.sandboxes.get(sandbox_id)
        if live is None:
            raise SandboxError(FailureCode.SANDBOX_LOST, f"no sandbox {sandbox_id}")
        try:
            await self._maker.network.set(sandbox_id, live.ref.socket_path, network)
        except (OSError, WireError) as cause:
            fate = await self.fate(live.ref)
            raise SandboxError(fate.code, f"{fate.message}: no port for the network") from cause

    async def refusals(self, sandbox_id: str) -> list[Json]:
        """Returns the connections that the network's proxy refused to a sandbox since the last
        call.
        """
        return await self._maker.network.refusals(sandbox_id)

    def close_targets(self, targets: list[list[Json]]) -> None:
        self._maker.network.close_targets(targets)

    async def fate(self, ref: SandboxRef, seen: Cause = Cause.HUNG_UP) -> Fate:
        """Returns why a sandbox does not answer; `seen` is what its client saw, if it still runs.

        Its end may reach us later than its client, so a living one is given a moment.
        """
        live = self._maker.sandboxes.get(ref.sandbox_id)
        if live is not None:
            try:
                async with asyncio.timeout(FATE_S):
                    return await asyncio.shield(live.fate)
            except TimeoutError:
                return fate_of(self._maker.frozen(live) or seen)
        return self._fates.get(ref.sandbox_id, fate_of(Cause.UNKNOWN))

    def status(self) -> dict[str, Any]:
        return {
            **self._maker.status(),
            "warm": sum(len(warm) for warm in self._warm.values()),
            "reserved": len(self._reserved),
        }

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._maker.close()

    # ---- ahead of time

    async def _make_for(self, owner: str, purpose: str, spec: SandboxSpec) -> LiveSandbox:
        live = self._take_warm(spec) or await self._maker.make(spec)
        live.owner, live.purpose = owner, purpose
        self._refill_soon(spec)
        return live

    def _take_warm(self, spec: SandboxSpec) -> LiveSandbox | None:
        warm = self._warm.get(spec, [])
        while warm:
            live = warm.pop()
            if not live.exited.done() and live.ending is None:
                return live
        return None

    def _refill_soon(self, spec: SandboxSpec) -> None:
        asyncio.get_running_loop().call_later(REFILL_S, self._refill, spec)

    def _refill(self, spec: SandboxSpec) -> None:
        if self._settings.warm == 0 or self._closing:
            return
        self._warm.setdefault(spec, [])
        self._warm.move_to_end(spec)
        while len(self._warm) > MAX_WARM_SPECS:
            _, warm = self._warm.popitem(last=False)
            for live in warm:
                self._spawn(self.stop(live.ref.sandbox_id))
        if len(self._warm[spec]) < self._settings.warm and self._maker.has_room:
            self._spawn(self._make_spare(spec))

    async def _make_spare(self, spec: SandboxSpec) -> None:
        try:
            live = await self._maker.make(spec)
        except SandboxError:
            return  # the next start will meet the same error and report it
        warm = self._warm.get(spec)
        if warm is None or len(warm) >= self._settings.warm:
            await self.stop(live.ref.sandbox_id)
        else:
            warm.append(live)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._raise_bugs)
        return task

    def _raise_bugs(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, ProrlError):
                raise error

    # ---- endings

    def _end_older_attempts(self, owner: str) -> None:
        """Fencing: a newer attempt of a rollout has begun, so what its older ones left is ended."""
        rollout, _, attempt = owner.rpartition("/")
        if not rollout or not attempt.isdigit():
            return
        owners = {live.owner for live in self._maker.sandboxes.values()} | {
            reservation.owner for reservation in self._reserved
        }
        for other in owners:
            other_rollout, _, other_attempt = other.rpartition("/")
            if (
                other_rollout == rollout
                and other_attempt.isdigit()
                and int(other_attempt) < int(attempt)
            ):
                self._spawn(self.stop_owner(other))

    def _on_wall_time(self, live: LiveSandbox) -> None:
        over = fate_of(Cause.OVER_LIMIT, f"its wall time of {live.spec.wall_s:g} s")
        self._spawn(self._maker.end(live, over))

    def _on_end(self, live: LiveSandbox, fate: Fate) -> None:
        if live.wall is not None:
            live.wall.cancel()
        self._fates[live.ref.sandbox_id] = fate
        while len(self._fates) > MAX_FATES:
            self._fates.popitem(last=False)
        for warm in self._warm.values():
            if live in warm:
                warm.remove(live)
