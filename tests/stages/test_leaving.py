"""A node that leaves, and one that goes on: real workers of two nodes and a real gateway in one
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork, Inlet, this_incarnation
from prorl.protocols import Network, Sandbox, SandboxHost
from prorl.schema.rows import Row
from prorl.service.core.candidates import GroupBody
from prorl.stages import chain as chains
from prorl.stages import chained
from prorl.stages.chain import Chain
from prorl.testing import LocalSandbox
from prorl.types import SandboxRef, SandboxSpec, Stage, Task
from tests.service.running_gateway import TOKEN, GatewayHarness, running_gateway
from tests.waiting import until

TURNS = 8
ENV = str(Path(__file__).parents[1] / "integration" / "counting_env.py") + ":Counting"


class Folders:
    """A node's sandboxes: folders, in which commands run as they are."""

    def __init__(self, node_id: str, root: Path) -> None:
        self.node_id, self._root = node_id, root

    async def start(self, owner: str, purpose: str, spec: SandboxSpec) -> SandboxRef:
        folder = self._root / owner.replace("/", "_")
        folder.mkdir(parents=True)
        return SandboxRef(self.node_id, folder.name, str(folder))

    @asynccontextmanager
    async def connect(self, ref: SandboxRef) -> AsyncIterator[Sandbox]:
        yield LocalSandbox(Path(ref.socket_path))

    async def reserve(self, owner: str, purpose: str, spec: SandboxSpec) -> None:
        pass

    async def stop(self, ref: SandboxRef) -> None:
        pass

    async def stop_owner(self, owner: str) -> None:
        pass

    async def keep(self, sandboxes: Mapping[str, str]) -> None:
        pass


@asynccontextmanager
async def node(
    w: GatewayHarness, tmp_path: Path, name: str, network: Network | None = None
) -> AsyncIterator[Chain]:
    """INIT and RUN of a node; on a network of its own it outlives the gateway. EVAL is apart."""
    sockets = tmp_path / name
    sockets.mkdir()
    own = {"node_id": name, "root": sockets, "socket_dir": sockets, "workers": 1}
    own |= {"eval": {"own_processes": 1}}
    config = ServiceConfig.model_validate(
        {**w.config.model_dump(), **own, "gateway": w.config.gateway_flight, "load_code": True}
    )
    host: SandboxHost = Folders(name, sockets / "boxes")  # type: ignore[assignment]
    async with Chain(config, "worker-0", network or w.network, host) as chain:
        yield chain


async def submitted(w: GatewayHarness, turns: int = TURNS) -> None:
    policy, limits = ["scripted:oracle?delay_s=0.05"], {"max_turns": turns + 1}
    await w.run("r", backends=policy, limits=limits)
    data = {"turns": turns, "pause": 0.0}
    task = Task(task_id="c", env=ENV, prompt="Count.", data=data)
    await w.submit(GroupBody(task=task, n=1, key="k"))


async def ran(w: GatewayHarness, tmp_path: Path, name: str) -> Row:
    """Returns the row that RUN of a node gives to EVAL, which receives it."""
    location = f"grpc+unix://{tmp_path / name}/worker-0.sock"
    inlet = Inlet(w.network, "ran", this_incarnation(roles={"eval": 1}, worker="eval-0"), slots=1)
    inlet.set_upstreams([location])
    try:
        async with asyncio.timeout(60):
            (received,) = await inlet.take()
        inlet.ack([received.key])
        return received.row
    finally:
        await inlet.close()


async def test_what_a_leaving_node_cannot_end_begins_anew_elsewhere_charged_to_nobody(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path, load_code=True) as w:
        await submitted(w)
        async with node(w, tmp_path, "n1") as chain:
            await until(lambda: chain.stages[Stage.RUN].stage.stats().tokens)
            chain.leave(0.0)
            stopped = await ran(w, tmp_path, "n1")
            assert stopped.value("failure_code") == "cancelled", "as far as it came, for people"
        async with node(w, tmp_path, "n2"):
            row = await ran(w, tmp_path, "n2")
        assert (row.value("attempt"), row.value("resumes")) == (2, 0)
        assert len(row.value("turns")) == TURNS + 1
        life = w.core.run("r").rollouts[0].life
        assert (life.attempt, life.infra_failures, life.worker_losses) == (2, 0, 0)


async def test_what_ends_within_the_time_of_a_leaving_node_is_kept(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, load_code=True) as w:
        await submitted(w)
        async with node(w, tmp_path, "n1") as chain:
            await until(lambda: chain.stages[Stage.RUN].stage.stats().tokens)
            chain.leave(30.0)
            row = await ran(w, tmp_path, "n1")
        assert (row.value("attempt"), len(row.value("turns"))) == (1, TURNS + 1)


async def test_a_chain_takes_no_new_leases_while_what_it_has_finished_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EVAL is not there: RUN's finished rows wait, and INIT begins no more than its credit."""
    monkeypatch.setattr(chains, "LATE_S", 0.0)
    async with running_gateway(tmp_path, load_code=True, init={"slots": 1}, run={"slots": 2}) as w:
        await w.run("r", backends=["scripted:oracle"])
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"{i}?") for i in range(20)]
        await w.submit(*(GroupBody(task=task, n=1, key=task.task_id) for task in tasks))
        async with node(w, tmp_path, "n1") as chain:
            run = chain.stages[Stage.RUN].stage
            await until(lambda: run.num_finished > run.slots)
            await asyncio.sleep(1.0)
            assert run.num_finished <= 2 * run.slots + 2, "without the rule all 20 would be here"
            for _ in range(20):
                await ran(w, tmp_path, "n1")


@pytest.mark.parametrize("away", [True, False])
async def test_who_leaves_does_not_wait_for_ever_for_a_gateway_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, away: bool
) -> None:
    """The rows that RUN has finished wait for EVAL and the store, as long as there is a gateway."""
    monkeypatch.setattr(chained, "ALONE_S", 0.1)
    monkeypatch.setattr(chained, "LEAVE_S", 0.1)
    caplog.set_level(logging.WARNING, "prorl.stages")
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(FlightNetwork(token=TOKEN))
        service = await stack.enter_async_context(AsyncExitStack())
        w = await service.enter_async_context(running_gateway(tmp_path, "flight", load_code=True))
        await submitted(w, turns=1)
        chain = await stack.enter_async_context(node(w, tmp_path, "n1", network))
        run = chain.stages[Stage.RUN]
        await until(lambda: run.stage.outlet.num_waiting)
        if away:
            await service.aclose()
        run.leave(0.0)
        waiting = asyncio.ensure_future(run.wait())
        await asyncio.wait({waiting}, timeout=10 if away else 0.6)
        assert waiting.done() == away
        assert ("leaving with 1 finished rows" in caplog.text) == away
        waiting.cancel()
