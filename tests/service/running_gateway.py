"""A gateway in this process, and workers that speak the real protocols to it: what the tests of the
service play with.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from prorl.config import RunConfig, ServiceConfig
from prorl.control import (
    CommitPart,
    Committed,
    CommittedRollout,
    ControlRow,
    Decision,
    Handout,
    Hello,
    KeptGroup,
    Kind,
    PartPublished,
    Payload,
    Propose,
    ReplyT,
    Request,
    Reserve,
    Started,
    Stats,
    TrajectorySummary,
    to_batch,
)
from prorl.flight import FlightNetwork
from prorl.flight.control_client import ControlClient, this_incarnation
from prorl.flight.inlet import Inlet
from prorl.graph import GRAPH
from prorl.protocols import Channel, Network
from prorl.schema import CONTROL
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.log.log import ControlLog
from prorl.service.serve import RunningGateway, serving
from prorl.types import AttemptKey, Json, Task
from tests.flight.conftest import Sockets

TOKEN = "secret"


def group(name: str = "t", n: int = 1, key: str = "") -> GroupBody:
    return GroupBody(task=Task(task_id=name, env="noop", prompt=name), n=n, key=key)


def settings(tmp_path: Path, **more: Json) -> ServiceConfig:
    """A service on a root of its own; the socket's path stays short."""
    sockets = tmp_path / "s"
    sockets.mkdir(exist_ok=True)
    fields = {
        "root": tmp_path / "root",
        "socket_dir": sockets,
        "token": TOKEN,
        "backends": ("scripted:oracle",),
        **more,
    }
    return ServiceConfig(**fields)


def handout(groups: Iterable[Iterable[int]]) -> Handout:
    return Handout(groups=tuple(KeptGroup(*group) for group in groups))


CHAIN = "chain"
"""All stages in one process; else a name is that of the one role that a worker has."""


def roles_of(role: str) -> dict[str, int]:
    return dict.fromkeys(GRAPH.names if role == CHAIN else (role,), 8)


class Worker:
    """A worker of any role; INIT also has the lease edge."""

    def __init__(
        self,
        network: Network,
        config: ServiceConfig,
        role: str,
        name: str,
        attempts: Iterable[AttemptKey] = (),
        images: tuple[str, ...] | None = None,
        node: str = "local",
        location: str | None = None,
    ) -> None:
        """`location`: default one of its own, at which nobody listens."""
        self.name = name
        self.stage = "run" if role == CHAIN else role
        """That it speaks of."""
        self.attempts = list(attempts)
        self.received: list[ControlRow] = []
        self._news = asyncio.Event()
        self.stats = Stats()
        identity = this_incarnation(
            roles=roles_of(role),
            worker=name,
            location=f"at-{name}" if location is None else location,
            images=images,
            node=node,
        )
        self.incarnation = identity.incarnation
        self.control = ControlClient(
            network,
            config.gateway_flight,
            identity,
            attempts=lambda: {self.stage: self.attempts},
            stats=lambda: {self.stage: self.stats},
            on=dict.fromkeys(Kind, self._hear),
        )
        self.inlet = (
            Inlet(network, "lease", identity, slots=8) if "init" in roles_of(role) else None
        )
        self._location = config.gateway_flight

    def _hear(self, row: ControlRow) -> None:
        self.received.append(row)
        self._news.set()

    async def __aenter__(self) -> Worker:
        self.control.start()
        await self.control.welcomed.wait()
        if self.inlet is not None:
            self.inlet.set_upstreams([self._location])
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.inlet is not None:
            await self.inlet.close()
        await self.control.close()

    def of(self, kind: Kind) -> list[ControlRow]:
        return [row for row in self.received if row.kind is kind]

    async def hear(self, kind: Kind, count: int = 1) -> list[ControlRow]:
        async with asyncio.timeout(30):
            while len(rows := self.of(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return rows

    async def take(self, count: int = 1) -> list[AttemptKey]:
        """Receive leases, say that INIT has them, free their slots."""
        assert self.inlet is not None
        keys: list[AttemptKey] = []
        async with asyncio.timeout(30):
            while len(keys) < count:
                keys += [row.key for row in await self.inlet.take()]
        for key in keys:
            self.control.emit(Started(), key, stage="init")
            self.inlet.done(key)
        return keys

    def say(self, payload: Payload, key: AttemptKey, code: str = "") -> None:
        self.control.emit(payload, key, stage=self.stage, code=code)

    async def ask(self, request: Request[ReplyT], run_id: str = "") -> ReplyT:
        async with asyncio.timeout(30):
            return await self.control.request(request, run_id=run_id)

    async def commit(
        self,
        run_id: str,
        part: str,
        keys: Iterable[AttemptKey] = (),
        reward: float = 1.0,
        num_sampled: int = 0,
        **more: Json,
    ) -> Committed:
        keys = tuple(keys)
        await self.ask(Reserve(attempts=keys))
        rollouts = tuple(
            CommittedRollout(
                rollout_id=key.rollout_id,
                attempt=key.attempt,
                reward=reward,
                summary=TrajectorySummary(min_version=0, num_sampled=num_sampled),
            )
            for key in keys
        )
        answer = await self.ask(CommitPart(part=part, rollouts=rollouts, **more), run_id)
        await self.ask(PartPublished(commit_seq=answer.commit_seq), run_id)
        return answer

    async def decide(self, run_id: str, *groups: int, kept: bool = True) -> None:
        decisions = tuple(
            Decision(
                group_id=g, kept=kept, reason="test", num_valid=1, mean_reward=1.0, min_version=0
            )
            for g in groups
        )
        await self.ask(Propose(decisions=decisions), run_id)


class GatewayHarness:
    def __init__(
        self,
        config: ServiceConfig,
        network: Network,
        served: RunningGateway,
        session: aiohttp.ClientSession,
    ) -> None:
        self.config, self.network, self.served, self._session = config, network, served, session

    @property
    def core(self):  # type: ignore[no-untyped-def]
        return self.served.gateway.core

    def crash(self) -> None:
        """Write nothing more, as if the process were gone; what its workers hear later is not from
        the log.
        """
        self.served.work.cancel()

    def worker(
        self,
        role: str,
        name: str = "",
        attempts: Iterable[AttemptKey] = (),
        images: tuple[str, ...] | None = None,
        node: str = "local",
        location: str | None = None,
    ) -> Worker:
        name = name or f"{role}-0"
        return Worker(self.network, self.config, role, name, attempts, images, node, location)

    async def dial(self, role: str, worker: str = "", **more: Json) -> Channel:
        """A session of a worker that has said hello and says only what a test has it say."""
        fields = {
            "worker": worker or f"{role}-0",
            "roles": roles_of(role),
            "location": "there",
            **more,
        }
        hello = Hello(schema_version=SCHEMA_VERSION, **fields)
        where = self.config.gateway_flight
        channel = await self.network.dial(where, "control", {}, CONTROL, CONTROL)
        channel.send(to_batch([ControlRow.of(hello, seq=1)]))
        return channel

    async def http(
        self, method: str, path: str, body: Json = None, token: str = TOKEN
    ) -> tuple[int, Json]:
        # The standard library's JSON writes numbers of any size.
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        async with self._session.request(
            method, self.served.http + path, data=data, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def run(self, run_id: str = "r", **config: Json) -> None:
        status, answer = await self.http("POST", "/v1/runs", {"run_id": run_id, **config})
        assert status in (200, 201), answer

    async def submit(self, *groups: GroupBody, run_id: str = "r", last: bool = False) -> list[Json]:
        body = {"groups": [group.model_dump(mode="json") for group in groups], "last": last}
        status, answer = await self.http("POST", f"/v1/runs/{run_id}/groups", body)
        assert status in (200, 202), answer
        return list(answer["groups"])

    async def leased(self, init: Worker, n: int = 1, **config: Json) -> list[AttemptKey]:
        """Make a run with a group whose members INIT has."""
        await self.run(**config)
        await self.submit(group(n=n))
        return await init.take(n)

    async def view(self, run_id: str = "r") -> Json:
        return (await self.http("GET", f"/v1/runs/{run_id}"))[1]

    async def until(self, holds: Callable[[Json], bool], run_id: str = "r") -> Json:
        async with asyncio.timeout(30):
            while not holds(view := await self.view(run_id)):
                await asyncio.sleep(0.02)
        return view


@asynccontextmanager
async def running_gateway(
    tmp_path: Path, kind: str = "local", log: ControlLog | None = None, **more: Json
) -> AsyncIterator[GatewayHarness]:
    """A gateway over a network of a kind, on `tmp_path`; entering it again is a restart."""
    config = settings(tmp_path, **more)
    async with AsyncExitStack() as stack:
        network = (Sockets if kind == "flight" else FlightNetwork)(token=TOKEN)
        stack.push_async_callback(network.close)
        served = await stack.enter_async_context(serving(config, network, log))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield GatewayHarness(config, network, served, session)


def run_config(**fields: Json) -> RunConfig:
    return RunConfig(**{"run_id": "r", **fields})
