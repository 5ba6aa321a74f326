"""`Worker`: one stage as a member of a service: its Stage, its edges, its control stream.

The same over Flight and inside one loop.

    async with Worker(config, "run", "run-0", network, host) as worker:
        await worker.wait()          # until the gateway said drain and nothing is in hand; raises what broke

Who is upstream comes from the gateway: INIT's is the gateway itself, RUN's are the INIT workers,
EVAL's the RUN workers.
"""

from __future__ import annotations

import asyncio
from functools import cache

from prorl.config import ServiceConfig, StageConfig
from prorl.control import (
    Assigned,
    BackendsTold,
    ControlRow,
    Endpoints,
    Failover,
    Kind,
    Paused,
    Progress,
    Stats,
    VersionPublished,
    Welcome,
)
from prorl.envs import get_env
from prorl.flight import ControlClient, Identity, Inlet
from prorl.protocols import Network, Operator, SandboxHost
from prorl.renderer import make_renderer
from prorl.renderer_spec import RendererSpec
from prorl.stages.eval import EvalOperator
from prorl.stages.host import UPSTREAM, Stage
from prorl.stages.init import InitOperator
from prorl.stages.run import RunOperator
from prorl.types import AttemptKey, PolicyVersion
from prorl.types import Stage as StageName

LEAVE_S = 4.0
"""How long a leaving worker waits for what it stopped to be taken."""


class Worker:
    """Made, used and closed on one event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        stage: StageName,
        name: str,
        network: Network,
        host: SandboxHost,
    ) -> None:
        pool: StageConfig = getattr(config, stage.value)
        self._config, self._network, self._stage_name, self._name = config, network, stage, name
        self._cuts: set[AttemptKey] = set()
        self._run_operator: RunOperator | None = None
        identity = Identity(
            role=stage.value,
            worker=config.worker_name(name),
            node=config.node_id,
            location=config.worker_flight(name),
            slots=pool.slots,
            remote=bool(config.gateway),
        )
        self._control = ControlClient(
            network,
            config.gateway_flight,
            identity,
            held=self._held,
            stats=self._stats,
            on={
                Kind.WELCOME: self._welcome,
                Kind.ENDPOINTS: self._endpoints,
                Kind.CANCEL: self._cancel,
                Kind.DRAIN: self._drain,
                Kind.VERSION: self._version,
                Kind.PAUSED: self._paused,
                Kind.BACKENDS: self._backends,
            },
        )
        self._inlet = Inlet(
            network,
            UPSTREAM[stage],
            identity.hello(),
            slots=pool.slots,
            window_bytes=pool.finished_bytes,
        )
        self.stage = Stage(
            self._operator(host),
            self._inlet,
            self._control.emit,
            slots=pool.slots,
            finished_bytes=pool.finished_bytes,
            cuts=self._cuts,
            tokens=self._num_tokens,
        )
        self._draining = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.location = ""

    def _operator(self, host: SandboxHost) -> Operator:
        find_env = cache(get_env)
        match self._stage_name:
            case StageName.INIT:
                return InitOperator(host, find_env)
            case StageName.RUN:
                self._run_operator = RunOperator(
                    host,
                    find_env,
                    lambda spec: make_renderer(RendererSpec.from_json(spec)),
                    model=self._config.model,
                    api_key=self._config.backend_key,
                    is_cut=self._cuts.__contains__,
                    progress=self._progress,
                    ask=self._failover,
                )
                return self._run_operator
            case StageName.EVAL:
                return EvalOperator(host, find_env, is_cut=self._cuts.__contains__)

    async def __aenter__(self) -> Worker:
        outlet = self.stage.outlet
        self.location = await self._network.listen(
            self._config.worker_flight(self._name), {outlet.path: outlet.route}
        )
        if self._config.gateway and self._stage_name is StageName.EVAL:
            # The store is on another host: what is scored is the only edge that leaves a node.
            outer = f"grpc+tls://{self._config.advertise}:0"
            self._control.announce(await self._network.listen(outer, {outlet.path: outlet.route}))
        self._control.start()
        self._tasks = tuple(
            asyncio.ensure_future(work)
            for work in (self.stage.run(), self._control.wait(), self._drained())
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop what is in hand, give it LEAVE_S to be reported and taken, leave."""
        self.stage.drain()
        self.stage.cancel_all()
        try:
            await asyncio.wait_for(self.stage.wait_empty(), LEAVE_S)
        except TimeoutError:
            pass
        await self._control.close()
        await self._inlet.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._run_operator is not None:
            await self._run_operator.close()

    async def wait(self) -> None:
        """Wait until drained; raises what broke the worker."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _drained(self) -> None:
        await self._draining.wait()
        await self.stage.wait_empty()

    # ---- what the gateway says

    def _welcome(self, row: ControlRow) -> None:
        if self._run_operator is not None:
            self._run_operator.backends.clear_pauses()
        for key in row.read(Welcome).refused:
            self.stage.cancel(key)

    def _endpoints(self, row: ControlRow) -> None:
        locations = row.read(Endpoints).locations
        match self._stage_name:
            case StageName.INIT:
                self._inlet.set_upstreams([self._config.gateway_flight])
            case StageName.RUN:
                self._inlet.set_upstreams(locations.get("init", ()))
            case StageName.EVAL:
                self._inlet.set_upstreams(locations.get("run", ()))

    def _version(self, row: ControlRow) -> None:
        if self._run_operator is not None:
            said = row.read(VersionPublished)
            version = PolicyVersion(said.version)
            self._run_operator.versions[row.run_id] = (version, said.weights)

    def _paused(self, row: ControlRow) -> None:
        if self._run_operator is not None:
            said = row.read(Paused)
            self._run_operator.backends.set_paused(said.backend, said.paused)

    def _backends(self, row: ControlRow) -> None:
        if self._run_operator is not None:
            said = row.read(BackendsTold)
            self._run_operator.backends.told(said.gone, said.keyed)

    def _cancel(self, row: ControlRow) -> None:
        self.stage.cancel(row.key)

    def _drain(self, row: ControlRow) -> None:
        self.stage.drain()
        self._draining.set()

    # ---- what the gateway hears

    async def _failover(self, asked: Failover) -> Assigned:
        return await self._control.request(asked, run_id=asked.attempt.run_id)

    def _held(self) -> list[AttemptKey]:
        return self.stage.held()

    def _stats(self) -> Stats:
        return self.stage.stats()

    def _num_tokens(self) -> int:
        return self._run_operator.num_tokens if self._run_operator is not None else 0

    def _progress(self, key: AttemptKey, turns: int, tokens: int) -> None:
        self._control.emit(Progress(turn=turns, tokens=tokens), key, stage=self._stage_name)
