"""What a submission goes through before it counts: a run's config, a group's task and its room.

Checks come first and may take long; what they let in is accepted in pieces, so that a long batch
lets others in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from prorl import plugins, storage
from prorl.agents import get_agent
from prorl.backends.catalogue import is_server
from prorl.config import RunConfig
from prorl.envs import get_env
from prorl.errors import ConfigError, TaskError, UserError
from prorl.filters import FILTERS
from prorl.protocols import Env
from prorl.renderer.check import check as check_renderer
from prorl.service.backend_routes import vocabulary_of
from prorl.service.bodies import GroupsBody
from prorl.service.candidates import Candidate, CheckTask
from prorl.service.gateway import Gateway
from prorl.service.manifest import check_there, write_manifest
from prorl.service.servers import valid_url
from prorl.service.state import GroupRecord, RunRecord
from prorl.types import Json, Task

PIECE = 1000
"""Rollouts that are checked or accepted before the loop serves others; one group may have more."""


def known_env(load_code: bool) -> CheckTask:
    """A check that a task's env exists and can read the task; envs are made once."""
    envs: dict[str, Env] = {}

    def check(task: Task) -> None:
        rewards = task.data.get("rewards")
        if not load_code and isinstance(rewards, dict):
            for name in rewards:
                plugins.refuse_places(name, TaskError, "reward")
        env = envs.get(task.env)
        if env is None:
            if not load_code:
                plugins.refuse_places(task.env, TaskError, "env")
            env = envs[task.env] = get_env(task.env)
        env.check(task)

    return check


async def create(gateway: Gateway, config: RunConfig) -> bool:
    """Make a run, durably; False when it is there already, with the same config.

    Raises ConfigError, ConflictError.
    """
    if config.filter not in FILTERS:
        await asyncio.to_thread(lambda: storage.check_filter(config.filter))
    if config.run_id not in gateway.core.state.runs:
        await _prepare(gateway, config)
    else:
        await asyncio.to_thread(check_there, gateway.config, config.run_id)
    created = gateway.core.create_run(config)
    if created:
        run = gateway.core.run(config.run_id)
        gateway.core.start_with(run, await gateway.publisher.labels(run))
    await gateway.durable()
    return created


async def _prepare(gateway: Gateway, config: RunConfig) -> None:
    """Check what a run that is not there yet names, then give it a directory and a manifest.

    Raises ConfigError, ConflictError.
    """
    if not gateway.config.load_code:
        plugins.refuse_places(config.agent, ConfigError, "agent")
        plugins.refuse_places(config.renderer.name, ConfigError, "renderer")
    get_agent(config.agent)
    created_at = gateway.wall()
    renderer = await check_renderer(config.renderer.spec(gateway.config.tokenizer, created_at))
    await _check_backends(gateway, config, renderer)
    # A put to an object store may take seconds; everybody would wait.
    await asyncio.to_thread(write_manifest, gateway.config, config, created_at, renderer)


async def _check_backends(
    gateway: Gateway, config: RunConfig, renderer: Mapping[str, Json]
) -> None:
    """Ask once, here and not by failing rollouts, what backends are and serve.

    Those that only this run names must answer; servers must have the run's vocabulary. Raises
    UserError, ConfigError.
    """
    for name in config.backends:
        if name != valid_url(name):
            raise UserError(f"backend {name!r}", f"{valid_url(name)!r}")
    known = gateway.core.watched.names()
    fresh = [name for name in config.backends if name not in known]
    await asyncio.gather(*(gateway.servers.check(name, ours=False) for name in fresh))
    names = config.backends or tuple(gateway.core.state.balancer.states)
    servers = [name for name in names if is_server(name)]
    wanted = vocabulary_of(config, renderer)
    await asyncio.gather(*(gateway.servers.check_vocabulary(name, wanted) for name in servers))


def pieces(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of at most `PIECE` together, at least one each.

    >>> list(pieces([600, 400, 1, 5000, 3]))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and total + size > PIECE:
            yield slice(first, place)
            first, total = place, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


async def accept(
    gateway: Gateway, run: RunRecord, body: GroupsBody, check: CheckTask
) -> list[tuple[GroupRecord, bool]]:
    """Check all, then accept all, in pieces. Raises as `Acceptance.check` and `check_room` do."""
    acceptance = gateway.core.acceptance
    candidates: list[Candidate] = []
    seen: dict[str, str] = {}
    for part in pieces([group.n for group in body.groups]):
        candidates += acceptance.check(run, body.groups[part], check, seen, part.start)
        await asyncio.sleep(0)
    acceptance.check_room(run, candidates)
    accepted: list[tuple[GroupRecord, bool]] = []
    for part in pieces([candidate.n for candidate in candidates]):
        accepted += acceptance.groups(run, candidates[part])
        await asyncio.sleep(0)
    return accepted
