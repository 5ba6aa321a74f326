"""`/v1/backends`: the pool of model servers, shown and changed.

A backend is checked whole before it is logged (`pool/servers.py`), so that a bad name, another
model or raw logprobs never cost a rollout. The log counts before the config: a backend that was
deleted stays out after a restart until it is added again.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import FastAPI, Response
from pydantic import Field

from prorl.backends.catalogue import is_server, valid_url
from prorl.config import StrictModel
from prorl.errors import NotFoundError
from prorl.service import shapes
from prorl.service.core.manifest import read_renderer
from prorl.service.gateway import Gateway
from prorl.service.http.answers import reply
from prorl.service.pool.servers import vocabulary_of


class BackendBody(StrictModel):
    name: str = Field(
        min_length=1, max_length=500, description="scripted:oracle, http://host:port ..."
    )


class HoldBody(StrictModel):
    names: list[str] = Field(min_length=1, max_length=1000, description="model servers")
    mode: Literal["abort", "wait", "keep"] = Field(
        default="abort", description="what becomes of calls that run: cut, ended first, or frozen"
    )


class PoolBody(StrictModel):
    backends: list[str] = Field(min_length=1, max_length=1000)


def backend_routes(app: FastAPI, gateway: Gateway) -> None:
    core = gateway.core
    replacing = asyncio.Lock()  # protects the pool between what is read of it and what is made

    @app.get("/v1/backends", response_model=shapes.BackendList)
    async def list_backends() -> Response:
        """The pool, and servers that open runs name: state, work in flight, what is wrong."""
        return reply(shapes.BackendList(backends=core.watched.view()))

    @app.post("/v1/backends", status_code=201, response_model=shapes.BackendStateReply)
    async def add_backend(body: BackendBody) -> Response:
        """Ask a backend what it is and put it into the pool, or end its drain. 422 says why not."""
        name = valid_url(body.name)
        if name not in core.state.balancer.states:
            await _check(gateway, name)
        _set(gateway, name, "ready")
        await gateway.durable()
        return reply(
            shapes.BackendStateReply(name=name, state=core.state.balancer.state(name).value), 201
        )

    def servers_of(body: HoldBody) -> list[str]:
        names = list(dict.fromkeys(map(valid_url, body.names)))
        existing = {view["name"] for view in core.watched.view()}
        if others := [name for name in names if not is_server(name) or name not in existing]:
            problem = f"backends {', '.join(others)}"
            raise NotFoundError(f"{problem}: no server of the pool or of an open run")
        return names

    @app.post("/v1/backends/pause", response_model=shapes.FailedBackends)
    async def pause_backends(body: HoldBody) -> Response:
        """Stop servers, for a trainer that gives them weights itself or lets them sleep. They get
        no rollouts, and who waits for them spends no budget, until `resume`; what they sample after
        it trains once a version is announced. Idempotent; `failed` says who did not stop and why.
        """
        names = servers_of(body)
        paused = gateway.publisher.paused
        failures = await asyncio.gather(*(paused.pause(name, body.mode) for name in names))
        return _paused_reply(names, failures)

    @app.post("/v1/backends/resume", response_model=shapes.FailedBackends)
    async def resume_backends(body: HoldBody) -> Response:
        """Let servers sample again. `failed` says who cannot, or gets no rollouts since nobody
        announced what it serves.
        """
        names = servers_of(body)
        failures = await asyncio.gather(*map(gateway.publisher.resume, names))
        return _paused_reply(names, failures)

    @app.put("/v1/backends", response_model=shapes.BackendList)
    async def replace_backends(body: PoolBody) -> Response:
        """Make this the whole pool, at once or not at all."""
        names = list(dict.fromkeys(map(valid_url, body.backends)))
        async with replacing:
            before = set(core.state.balancer.states)
            await asyncio.gather(*(_check(gateway, name) for name in names if name not in before))
            for name in names:
                _set(gateway, name, "ready")
            for name in set(core.state.balancer.states).difference(names):
                _set(gateway, name, "removed")
            await gateway.durable()
        return reply(shapes.BackendList(backends=core.watched.view()))

    @app.delete("/v1/backends", response_model=shapes.BackendStateReply)
    async def remove_backend(name: str, drain: bool = False) -> Response:
        """Take a backend out of the pool, or only drain it; what it serves stays with it."""
        if name not in core.state.balancer.states:
            pool = ", ".join(core.state.balancer.states) or "nothing"
            raise NotFoundError(f"backend {name!r} is not in the pool, which has {pool}")
        _set(gateway, name, "draining" if drain else "removed")
        await gateway.durable()
        return reply(shapes.BackendStateReply(name=name, state="draining" if drain else "removed"))


def _paused_reply(names: list[str], reasons: list[str]) -> Response:
    failed = {name: why for name, why in zip(names, reasons, strict=True) if why}
    return reply(shapes.FailedBackends(failed=failed))


async def _check(gateway: Gateway, name: str) -> None:
    """Everything that a backend must be, for each run that it would serve from now on, too."""
    await gateway.servers.check(name, ours=True)
    if not is_server(name):
        return
    open_runs = [run for run in gateway.core.state.open.values() if not run.config.backends]
    for run in open_runs:
        renderer = await asyncio.to_thread(read_renderer, gateway.config, run.run_id)
        if renderer:
            expected = vocabulary_of(run.config, renderer)
            await gateway.servers.check_vocabulary(name, expected, ours=True)


def _set(gateway: Gateway, name: str, state: str) -> None:
    """Notes it in memory and among the pending changes; what joins gets nothing before it has the
    pool's weights.
    """
    if state == "ready" and name not in gateway.core.state.balancer.states:
        gateway.publisher.joined(name)
    if state == "removed":
        gateway.publisher.removed(name)
    gateway.core.set_backend(name, state)
    gateway.backends_changed()
