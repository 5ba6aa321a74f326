"""The checks that a submission passes before it counts: a run's config, a group's task and its
room. Checks come first and may take long; what they let in is accepted in pieces, so that a long
batch lets others in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import cache

from prorl import plugins
from prorl.agents import is_ours, shows_turns
from prorl.agents.programs import program_of
from prorl.agents.users import check as check_agent
from prorl.backends.catalogue import is_server, valid_url
from prorl.config import MAX_CALL_TOKENS, RunConfig
from prorl.config.trackers import check_trackers
from prorl.env_settings import merge
from prorl.envs.users import GetEnv, check_settings_of, env_by_name, open_env, users_code
from prorl.errors import (
    ConfigError,
    ForbiddenError,
    RolloutError,
    TaskError,
    UnavailableError,
    UserError,
)
from prorl.filters import is_named
from prorl.protocols import Env, ProvidesAgent, Responds
from prorl.renderer.apart import check_fits, check_offer, text_bytes
from prorl.renderer.check import check as check_renderer
from prorl.service.core.candidates import (
    Candidate,
    CheckPrompt,
    CheckTask,
    GroupBody,
    GroupsBody,
    check_envs,
)
from prorl.service.core.manifest import check_there, read_renderer, write_manifest
from prorl.service.core.state import GroupRecord, RunRecord
from prorl.service.gateway import Gateway
from prorl.service.pool.servers import vocabulary_of
from prorl.tokenizer import UNBOUNDED_TOKEN_BYTES
from prorl.types import Json, Message, Task, ToolSpec
from prorl.waits import wait_limit_s

ACCEPT_BATCH = 1000
"""Rollouts that are checked or accepted before the loop serves others; one group may have more."""


CHECK_S = wait_limit_s("submit.check")


def check_env_exists(load_code: bool) -> CheckTask:
    find = cache(env_by_name)

    def check(task: Task, fits: CheckPrompt) -> Awaitable[None] | None:
        if not load_code:
            plugins.refuse_places(task.env, TaskError, "env")
        env = find(task.env)
        if not load_code and isinstance(env, ProvidesAgent) and env.runs_code(task):
            raise TaskError(
                f"task {task.task_id!r}: env {task.env!r} runs what it says on this host",
                "a service started with load_code",
            )
        if users_code(task):
            return check_users(find, task, fits)
        env.check(task)
        fits(env, env.messages(task), env.tools(task))
        return None

    return check


async def check_env_settings(config: RunConfig, *, load_code: bool) -> None:
    """Raise ConfigError for settings that an env of the run does not take, UnavailableError where
    a user's env cannot be asked in time.
    """
    for name, values in config.env.items():
        try:
            if not load_code:
                plugins.refuse_places(name, TaskError, "env")
            async with asyncio.timeout(CHECK_S):
                await check_settings_of(name, values)
        except TaskError as error:
            raise ConfigError(error.problem, error.expected, error.hint) from None
        except (RolloutError, TimeoutError) as error:
            text = f"settings of the env {name!r} could not be checked: {error}; send it again"
            raise UnavailableError(text) from None


async def check_users(find: GetEnv, task: Task, fits: CheckPrompt) -> None:
    try:
        async with asyncio.timeout(CHECK_S):
            env = await open_env(find, task)
    except RolloutError as error:
        raise UnavailableError(f"task {task.task_id!r} could not be checked: {error}") from None
    except TimeoutError:
        raise UnavailableError(
            f"env {task.env!r} was not ready to check task {task.task_id!r} within {CHECK_S:g} s;"
            " its import goes on: send it again"
        ) from None
    fits(env, env.messages(task), env.tools(task))


def _check_filter(text: str) -> None:
    """Loads DuckDB, which a gateway that is asked for no SQL does without."""
    from prorl.storage.serve.filter import check_filter

    check_filter(text)


async def create(gateway: Gateway, config: RunConfig, *, new_servers: bool = True) -> bool:
    """Make a run, durably; False when it is there already, with the same config. `new_servers`:
    whether it may name model servers that are not in the pool; whoever may has this host ask any
    URL. Raises ConfigError, ConflictError, ForbiddenError.
    """
    if not is_named(config.filter):
        await asyncio.to_thread(_check_filter, config.filter)
    if gateway.core.find_run(config.run_id) is None:
        check_trackers(config.track)
        _check_names(gateway, config, new_servers)
        config = await _prepare(gateway, config)
    else:
        await asyncio.to_thread(check_there, gateway.config, config.run_id)
        renderer = await asyncio.to_thread(read_renderer, gateway.config, config.run_id)
        config = by_model(config, renderer or {})
    created = gateway.core.create_run(config)
    if created:
        await gateway.publisher.begin(gateway.core.run(config.run_id))
    await gateway.durable()
    return created


LONG_RUN_S = 1800.0
PROGRAM_CALLS = 200
"""A program ends by itself; this only ends one that does not."""


def by_model(config: RunConfig, renderer: Mapping[str, Json]) -> RunConfig:
    """The config, with budgets for a program or a model that thinks, where the user says none. A
    thought may fill the context: half an hour at 10 tokens a second. `renderer` is what was proved
    of it.
    """
    sampling, limits = config.sampling, config.limits
    is_program = program_of(config.agent) is not None
    own: dict[str, float] = {"max_turns": PROGRAM_CALLS} if is_program else {}
    own |= {"run_s": LONG_RUN_S} if is_program or renderer.get("thinks") else {}
    unsaid = {name: most for name, most in own.items() if name not in limits.model_fields_set}
    config = config.model_copy(update={"limits": limits.model_copy(update=unsaid)})
    if is_program:  # no other worker can go on with one
        config = config.model_copy(update={"journal": "off"})
    if not renderer.get("thinks"):
        return config
    if "max_tokens" not in sampling.model_fields_set:
        most = min(limits.max_tokens, MAX_CALL_TOKENS)
        sampling = sampling.model_copy(update={"max_tokens": most})
    return config.model_copy(update={"sampling": sampling})


def check_run_offer(config: RunConfig, renderer: Mapping[str, Json]) -> None:
    """Raise ConfigError where the run's model cannot be shown what its tasks have."""
    try:
        check_offer(
            f"run {config.run_id!r}",
            proved_for(config, renderer),
            config.tools,
            has_system=config.system_message,
        )
    except TaskError as error:
        raise ConfigError(error.problem, error.expected, error.hint) from None


def proved_for(config: RunConfig, renderer: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns what was proved of a renderer, where the native loop shows messages and tools to the
    model; other agents talk to it in their own words.
    """
    return renderer if config.agent == "native" else {}


async def _prepare(gateway: Gateway, config: RunConfig) -> RunConfig:
    """Check what a run that is not there yet names, then give it a directory and a manifest. The
    config as it is from here on. Raises ConfigError, ConflictError.
    """
    if not gateway.config.load_code:
        if program_of(config.agent) is None:
            plugins.refuse_places(config.agent, ConfigError, "agent")
        plugins.refuse_places(config.renderer.name, ConfigError, "renderer")
    if not is_ours(config.agent):
        await check_agent(config.agent)
    await check_env_settings(config, load_code=gateway.config.load_code)
    created_at = gateway.wall()
    renderer = await check_renderer(config.renderer.settled(gateway.config.tokenizer, created_at))
    check_run_offer(config, renderer)
    served = await _check_backends(gateway, config, renderer)
    config = by_model(config, renderer)
    # A put to an object store may take seconds; everybody would wait.
    await asyncio.to_thread(
        write_manifest, gateway.config, config, created_at, renderer, gateway.core.log.owner, served
    )
    return config


def _check_names(gateway: Gateway, config: RunConfig, new_servers: bool) -> None:
    """Raise UserError for a backend that is written otherwise, ForbiddenError for a new server."""
    for name in config.backends:
        if name != valid_url(name):
            raise UserError(f"backend {name!r}", f"{valid_url(name)!r}")
        if is_server(name) and not new_servers and name not in gateway.core.state.balancer.states:
            raise ForbiddenError(
                f"server {name} is not in the pool",
                "servers of the pool, which is the owner's",
                "`prorl backends add` by an operator puts it there",
            )


async def _check_backends(
    gateway: Gateway, config: RunConfig, renderer: Mapping[str, Json]
) -> dict[str, Json]:
    """Ask once, here and not by failing rollouts, what backends are and serve; their answers. Those
    that only this run names must answer; servers must have the run's vocabulary. Raises
    ConfigError.
    """
    existing = gateway.core.watched.names()
    fresh = [name for name in config.backends if name not in existing]
    await asyncio.gather(*(gateway.servers.check(name, ours=False) for name in fresh))
    names = config.backends or tuple(gateway.core.state.balancer.states)
    servers = [name for name in names if is_server(name)]
    expected = vocabulary_of(config, renderer)
    answers = await asyncio.gather(
        *(gateway.servers.check_vocabulary(name, expected) for name in servers)
    )
    return dict(zip(servers, answers, strict=True))


def pieces(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of at most `ACCEPT_BATCH` together, at least one each.

    >>> list(pieces([600, 400, 1, 5000, 3]))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and total + size > ACCEPT_BATCH:
            yield slice(first, place)
            first, total = place, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


async def _check_prompt(gateway: Gateway, config: RunConfig) -> CheckPrompt:
    """Checks a prompt by its bytes alone: one that fits them may still be too long, which INIT
    finds when it renders it. With `skip_invalid` it is INIT's to find, too.
    """
    if config.skip_invalid:
        return lambda env, messages, tools: None
    proved = await asyncio.to_thread(read_renderer, gateway.config, config.run_id) or {}
    most = int(proved.get("max_token_bytes", UNBOUNDED_TOKEN_BYTES))

    facts = proved_for(config, proved)

    def fits(env: Env, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        has_system = any(message.role == "system" for message in messages)
        check_offer("it", facts, [tool.name for tool in tools], has_system=has_system)
        check_fits(text_bytes(messages), most, config.limits.max_tokens)
        if isinstance(env, Responds) and not shows_turns(config.agent):
            raise TaskError(
                f"its env {env.name!r} has turns of its own, which the agent {config.agent!r} shows"
                " to nobody",
                "run.agent native, or an agent of yours that calls `attempt.respond()`",
            )

    return fits


def with_settings(group: GroupBody, config: RunConfig) -> GroupBody:
    """The group whose task has the run's settings of its env. Raises TaskError."""
    if not config.env:
        return group
    return group.model_copy(update={"task": merge(group.task, config.env)})


async def accept(
    gateway: Gateway, run: RunRecord, body: GroupsBody, check: CheckTask
) -> list[tuple[GroupRecord, bool]]:
    """Check all, then accept all, in pieces. Raises as `Acceptance.check` and `check_room` do. No
    groups are made yet of what is a dataset.
    """
    acceptance, fits = gateway.core.acceptance, await _check_prompt(gateway, run.config)
    candidates: list[Candidate] = []
    seen: dict[str, str] = {}
    for part in pieces([group.n for group in body.groups]):
        groups = [with_settings(group, run.config) for group in body.groups[part]]
        await check_envs(groups, check, fits, part.start)
        candidates += acceptance.check(run, groups, seen, part.start)
        await asyncio.sleep(0)
    if run.config.epochs:
        for part in pieces([candidate.n for candidate in candidates]):
            gateway.core.datasets.add(run, candidates[part])
            await asyncio.sleep(0)
        return []
    acceptance.check_room(run, candidates)
    accepted: list[tuple[GroupRecord, bool]] = []
    for part in pieces([candidate.n for candidate in candidates]):
        accepted += acceptance.groups(run, candidates[part])
        await asyncio.sleep(0)
    return accepted
