"""A small scripted service around stages: a gateway that leases what it is told, and a store that
acks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prorl.control import Cancel, ControlRow, Endpoints, Hello, Kind, Welcome, from_batch, to_batch
from prorl.flight import Inlet, Outlet, this_life
from prorl.protocols import Channel, Network, Sandbox, SandboxHost
from prorl.schema import CONTROL
from prorl.schema.columns import Lease, leased_batch
from prorl.schema.rows import Row
from prorl.types import AttemptKey, Json, SandboxRef, SandboxSpec


class Gateway:
    """Leases rows while there is credit, knows workers, writes down events."""

    def __init__(self, network: Network, location: str) -> None:
        self._network, self.location = network, location
        self.outlet = Outlet("lease", on_acked=self._taken)
        self.events: list[ControlRow] = []
        self.sessions: dict[str, Channel] = {}
        self.hellos: list[Hello] = []
        self.num_taken = 0
        self._endpoints: dict[str, tuple[str, str]] = {}

    async def listen(self) -> None:
        routes = {self.outlet.path: self.outlet.route, "control": (self.accept, CONTROL, CONTROL)}
        self.location = await self._network.listen(self.location, routes)

    def _taken(self, keys: list[AttemptKey]) -> None:
        self.num_taken += len(keys)

    def lease(self, leases: Iterable[Lease]) -> None:
        self.outlet.send(leased_batch(leases))

    async def accept(self, channel: Channel) -> None:
        name = str(channel.peer["worker"])
        self.sessions[name] = channel
        try:
            while (batch := await channel.receive()) is not None:
                for row in from_batch(batch):
                    self._hear(name, row)
        finally:
            if self.sessions.get(name) is channel:
                del self.sessions[name]
                self._endpoints.pop(name, None)

    def _hear(self, name: str, row: ControlRow) -> None:
        if row.kind is Kind.HELLO:
            hello = row.read_hello(name)
            self.hellos.append(hello)
            self._endpoints[name] = (hello.role, hello.location)
            welcome = Welcome(endpoints=self.endpoints())
            self.tell(name, ControlRow.of(welcome, re=row.seq))
            for other in self.sessions.keys() - {name}:
                self.tell(other, ControlRow.of(Endpoints(locations=self.endpoints())))
        elif row.kind is not Kind.STATS:
            self.events.append(row)

    def endpoints(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {"init": (), "run": (), "eval": ()}
        for role, location in self._endpoints.values():
            found[role] += (location,)
        return found

    def tell(self, worker: str, *rows: ControlRow) -> None:
        self.sessions[worker].send(to_batch(rows))

    def cancel(self, worker: str, key: AttemptKey) -> None:
        self.tell(worker, ControlRow.of(Cancel(), **key._asdict()))

    def said(self, kind: Kind, stage: str) -> list[int]:
        return [row.rollout_id for row in self.events if row.kind is kind and row.stage == stage]


class Store:
    """Takes scored rows; acks them at once unless told to wait."""

    def __init__(self, network: Network, upstream: Iterable[str], slots: int = 256) -> None:
        self.inlet = Inlet(
            network, "scored", this_life(role="store", worker="store-0"), slots=slots
        )
        self.inlet.set_upstreams(upstream)
        self.rows: dict[AttemptKey, Row] = {}
        self.num_received = 0
        self.acking = True
        self.arrived = asyncio.Event()

    async def run(self) -> None:
        while taken := await self.inlet.take():
            self.num_received += len(taken)
            self.rows.update((row.key, row.row) for row in taken)
            if self.acking:
                self.inlet.ack([row.key for row in taken])
            else:
                for row in taken:
                    self.inlet.done(row.key)
            self.arrived.set()

    def ack_all(self) -> None:
        self.acking = True
        self.inlet.ack(list(self.rows))

    async def have(self, count: int, timeout_s: float = 30) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.rows) < count:
                self.arrived.clear()
                await self.arrived.wait()

    def value(self, key: AttemptKey, column: str) -> Json:
        return self.rows[key].value(column)


@dataclass
class RecordingHost:
    """A sandboxd that starts nothing and writes down what it is asked; `trouble(verb, owner)` may
    raise.
    """

    node_id: str = "local"
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    live: dict[str, SandboxRef] = field(default_factory=dict)
    trouble: Callable[[str, str], None] = lambda verb, owner: None

    def _ask(self, verb: str, owner: str, purpose: str = "") -> None:
        self.asked.append((verb, owner, purpose))
        self.trouble(verb, owner)

    async def start(self, owner: str, purpose: str, spec: SandboxSpec) -> SandboxRef:
        self._ask("start", owner, purpose)
        ref = SandboxRef("local", f"{owner}:{purpose}:{len(self.asked)}", "/nowhere")
        self.live[ref.sandbox_id] = ref
        return ref

    async def reserve(self, owner: str, purpose: str, spec: SandboxSpec) -> None:
        self._ask("reserve", owner, purpose)

    async def prepare(
        self, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
    ) -> bool:
        self._ask("prepare", key)
        await work()
        return False

    async def stop(self, ref: SandboxRef) -> None:
        self.asked.append(("stop", ref.sandbox_id.split(":")[0], ""))
        self.live.pop(ref.sandbox_id, None)

    async def stop_owner(self, owner: str) -> None:
        self.asked.append(("stop_owner", owner, ""))
        self.live = {
            name: ref for name, ref in self.live.items() if not name.startswith(f"{owner}:")
        }

    @asynccontextmanager
    async def connect(self, ref: SandboxRef) -> AsyncIterator[object]:
        self._ask("connect", ref.sandbox_id.split(":")[0])
        yield object()


def as_host(host: RecordingHost) -> SandboxHost:
    return host  # type: ignore[return-value]
