"""Envs, rewards and tools of users: their code never runs on an event loop of ours.

    INIT, RUN, EVAL, gateway, prorl check           a helper (`prorl/helper`) a question at a time
    ------------------------------------            ----------------------------------------------
    env = await open_env(get_env, task) -- plan --> check, messages, tools, sandbox, preparation
    env.messages(task), env.tools(task)             (answered from the plan, without a question)
    await env.score(task, ...)          -- score -> score
        sandbox.exec(...)               <---------- what a hook does with its sandbox is done here

An env runs in this process only if all of its code is ours: the env, its rewards and its tools.
Otherwise the whole env runs in helpers of this process. Methods that a user's env inherits
unchanged from `BaseEnv` still run here.

| hook | may take |
|---|---|
| import | 60 s |
| check, messages, tools, sandbox, preparation, together | HOOK_S |
| settings of a run; reference; repeats | HOOK_S |
| prepare | what is left of `limits.init_s` (in EVAL: `limits.eval_s`), but for LEAD_S |
| call | `limits.tool_s`, and CALL_GRACE_S |
| respond | RESPOND_S, and what is left of `limits.run_s` |
| artifact | ARTIFACT_S |
| score, verify | what is left of `limits.eval_s`, and SCORE_GRACE_S |

If the code raises, takes too long, ends its process, needs too much memory, or returns what the
protocol does not know, that is a failure of the task, with the code's message and line, and is not
tried again. `score` is the exception: whatever keeps it from an answer is a GraderError, and EVAL
calls it again with the same artifact. A returned value that is no score is a failure of the task.

An edited file is another program (`plugins.version_of`): envs that are opened afterwards use
helpers with the new code. Those opened before keep their helpers with the old code, while these
live.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from prorl import plugins
from prorl.env_settings import KEY
from prorl.env_state import EnvState, checked_response, current_state
from prorl.envs import BUILT_IN, ENTRY_POINTS, get_env
from prorl.envs.base import BaseEnv, Solution, check_settings
from prorl.envs.settings import named_tools, record_of
from prorl.errors import (
    GraderError,
    ProrlError,
    RolloutError,
    TaskError,
)
from prorl.helper.pool import pool
from prorl.helper.process import Died, HelperProgram, Late, Raised
from prorl.limits import Deadline
from prorl.protocols import Env, Reference, Sandbox
from prorl.sandbox_calls import call_sandbox
from prorl.task_json import task_to_json
from prorl.timing import now
from prorl.tools.catalogue import CATALOGUE
from prorl.types import (
    FailureCode,
    Json,
    Message,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from prorl.waits import wait_limit_s

HOOK_S = wait_limit_s("env.hook")
CALL_GRACE_S = wait_limit_s("env.call_grace")
RESPOND_S = wait_limit_s("env.respond")
ARTIFACT_S = wait_limit_s("env.artifact")
LEAD_S = wait_limit_s("env.prepare_lead")
SCORE_GRACE_S = wait_limit_s("env.score_grace")

STRICT_HOOKS = frozenset({"prepare", "call", "artifact", "score", "verify"})
"""Hooks that must end before the time-out of their stage, which would blame the sandbox."""

FIRST = frozenset({"plan", "settings"})
"""Questions before a task or a run is accepted: what goes wrong is the sender's to mend."""

GetEnv = Callable[[str], Env]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answers of a user's env about a task, asked before anything is run."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    run: SandboxSpec | None
    eval: SandboxSpec | None
    preparation: str | None
    """None: it has no such hook."""
    hooks: frozenset[str]
    """The hooks that are not `BaseEnv`'s own."""
    own_tools: tuple[str, ...]
    repeatable: tuple[str, ...]
    partial_credit: bool
    reward_range: tuple[float, float]


def users_code(task: Task) -> tuple[str, ...]:
    """Returns the task's parts that are code of users, as the helper gets them; empty where all of
    it is ours.
    """
    tools = task.data.get("tools")
    names = [] if not isinstance(tools, list) else [str(name) for name in tools]
    theirs = sorted({*names, *named_tools(task)} - CATALOGUE.keys())
    if theirs and task.env in BUILT_IN:
        own: Mapping[str, ToolSpec] = getattr(get_env(task.env), "own_tools", {})
        theirs = [name for name in theirs if name not in own]
    if not theirs and task.env in BUILT_IN:
        return ()
    return (task.env, *theirs)


def env_by_name(name: str) -> Env:
    """Returns an env of ours, or one that stands for a user's until a task opens it.

    Imports nothing of users. Raises TaskError for a name that stands for no env.
    """
    if name in BUILT_IN:
        return get_env(name)
    _check_exists(name)
    return _UnopenedEnv(name)


class _UnopenedEnv(BaseEnv):
    """Stands for a user's env until a task opens it: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reference(self, task: Task) -> Any:
        """Returns an awaitable, that of `reference_of`."""
        return self._opened_for_it(task)

    async def _opened_for_it(self, task: Task) -> Reference:
        return await reference_of(await open_env(lambda name: self, task), task)


async def open_env(find: GetEnv, task: Task, within_s: float = HOOK_S) -> Env:
    """Returns the env by which a stage runs a task, which the env has checked: one of ours, or a
    `UsersEnv`, whose hooks run in helpers.

    `prepare` may take `within_s` from now on. Raises TaskError, RolloutError.
    """
    env = find(task.env)
    code = users_code(task)
    if not code or not (isinstance(env, _UnopenedEnv) or task.env in BUILT_IN):
        return env
    helpers = _EnvHelpers(code, task)
    return UsersEnv(helpers, await _plan_of(helpers), now() + within_s)


async def check_settings_of(name: str, values: Mapping[str, Json]) -> None:
    """Raise TaskError for settings that an env does not take, RolloutError where a user's env
    cannot be asked.
    """
    where = f"settings of the env {name!r}"
    task = Task(task_id=where, env=name, prompt="", data={KEY: dict(values)})
    if name in BUILT_IN:
        record_of(get_env(name)).read(values, where)
    if code := users_code(task):
        env_by_name(name)
        await _EnvHelpers(code, task).ask("settings", HOOK_S, None, values, where, again=True)
    else:
        check_settings(get_env(name), values, where)


MAX_PLANS = 512
"""Tasks of a loop whose plan is remembered: siblings open the same one, in each stage."""

_PLANS: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[HelperProgram, bytes], asyncio.Task[Plan]]
] = weakref.WeakKeyDictionary()


async def _plan_of(helpers: _EnvHelpers) -> Plan:
    """Returns the plan of a task, for which siblings ask once; a failure is not remembered. Raises
    TaskError, RolloutError.
    """
    plans = _PLANS.setdefault(asyncio.get_running_loop(), {})
    text = task_to_json(helpers.task).encode()
    key = helpers.program, hashlib.blake2b(text, digest_size=16).digest()
    plan = plans.pop(key, None)
    if plan is None or (plan.done() and (plan.cancelled() or plan.exception() is not None)):
        plan = asyncio.ensure_future(helpers.ask("plan", HOOK_S, Plan, again=True))
    plans[key] = plan  # the last of the dict: the oldest are forgotten first
    while len(plans) > MAX_PLANS:
        del plans[next(iter(plans))]
    return await asyncio.shield(plan)


@cache
def _check_exists(name: str) -> None:
    if not plugins.is_place(name) and name not in BUILT_IN:
        users = plugins.registered(ENTRY_POINTS)
        if name not in users:
            raise plugins.unknown(ENTRY_POINTS, name, [*BUILT_IN, *users], TaskError)


class _EnvHelpers:
    """The helper processes that hold a user's env, asked about one task."""

    def __init__(self, code: tuple[str, ...], task: Task) -> None:
        self.task = task
        # as many as a stage has rows: one that waits keeps its process, others need theirs
        version = plugins.version_of(code)
        self.program = HelperProgram(
            "prorl.envs.users_program", code, wall_s=HOOK_S, most=16, version=version
        )

    async def ask(
        self,
        hook: str,
        wall_s: float,
        kind: Any,
        *arguments: Any,
        sandbox: Sandbox | None = None,
        again: bool = False,
    ) -> Any:
        """Returns what a hook gives, checked. Raises TaskError and RolloutError."""
        name = self.task.env
        label = name if hook in FIRST else f"{name.rpartition('/')[2]}.{hook}"
        try:
            reply = await (await pool(self.program)).ask(
                (hook, self.task, arguments, sandbox.ref if sandbox is not None else None),
                label=label,
                wall_s=max(wall_s, 0.1),
                again=again,
                strict=hook in STRICT_HOOKS,
                call_back=None if sandbox is None else partial(call_sandbox, sandbox),
            )
            return msgspec.convert(reply, kind)
        except TaskError:
            raise
        except RolloutError as error:  # its code has crossed as a text
            if error.code not in FailureCode.__members__.values():
                raise _fault(hook, f"{label}: {error}") from None
            if isinstance(error, GraderError):
                raise GraderError(FailureCode(error.code), error.message, error.log) from None
            raise RolloutError(FailureCode(error.code), error.message) from None
        except Raised as error:
            raise _fault(hook, f"{label}: {error}", error.trace) from None
        except ProrlError as error:
            raise _fault(hook, f"{label}: {error}") from None
        except (Late, Died) as error:
            if (isinstance(error, Died) and error.was_killed) or error.waits_for_us:
                raise RolloutError(FailureCode.STAGE_ERROR, str(error)) from None
            raise _fault(hook, str(error)) from None
        except msgspec.ValidationError as error:
            text = f"{label} gave what it should not: {error}"
            if hook in FIRST:
                raise TaskError(text) from None
            raise RolloutError(FailureCode.BAD_TASK, text) from None


def _fault(hook: str, text: str, trace: str = "") -> RolloutError | TaskError:
    """Returns the error for what users' code did wrong. A grader may do better when it is asked
    again.
    """
    if hook in FIRST:
        return TaskError(text)
    if hook == "score":
        return GraderError(FailureCode.GRADER_ERROR, text, trace)
    return RolloutError(FailureCode.BAD_TASK, text)


class UsersEnv(BaseEnv):
    """A user's env as one task's rollouts see it: the plan here, the rest in helpers.

    Hooks that it takes from `BaseEnv` unchanged run here.
    """

    def __init__(self, helpers: _EnvHelpers, plan: Plan, until: float) -> None:
        self.name, self._helpers, self._until = plan.name, helpers, until
        self.plan = plan
        self.partial_credit, self.reward_range = plan.partial_credit, plan.reward_range
        if (text := plan.preparation) is not None:
            self.preparation = lambda task: text  # a `CachedWorkspace` then
        if "verify" in plan.hooks:
            self.verify = self._verify
        if "respond" in plan.hooks:
            self.respond = self._respond

    def check(self, task: Task) -> None:
        """Nothing: the plan began with it."""

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        return self.plan.run if stage is Stage.RUN else self.plan.eval

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        return self.plan.tools

    def messages(self, task: Task) -> tuple[Message, ...]:
        return self.plan.messages

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        if "prepare" in self.plan.hooks:
            wall_s = self._until - now() - LEAD_S
            await self._helpers.ask("prepare", wall_s, None, sandbox=sandbox)

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        if "call" in self.plan.hooks or (call.name in self.plan.own_tools and not call.error):
            wall_s = timeout_s + CALL_GRACE_S
            state = current_state()
            result: ToolResult
            result, text = await self._helpers.ask(
                "call",
                wall_s,
                tuple[ToolResult, str],
                call,
                timeout_s,
                state.seed,
                state.text,
                sandbox=sandbox,
            )
            state.load(text)
            return result
        return await super().call(task, sandbox, call, timeout_s)

    async def _respond(
        self, task: Task, messages: Sequence[Message], state: EnvState, sandbox: Sandbox | None
    ) -> str | None:
        response: Any
        response, text = await self._helpers.ask(
            "respond",
            RESPOND_S,
            tuple[Any, str],
            messages,
            state.seed,
            state.text,
            sandbox=sandbox,
            again=sandbox is None,
        )
        state.load(text)
        return checked_response(response, self.name)

    async def repeats(self, call: ToolCall) -> bool:  # type: ignore[override]
        if "repeats" in self.plan.hooks:
            return bool(await self._helpers.ask("repeats", HOOK_S, bool, call, again=True))
        if "call" in self.plan.hooks and not self.plan.own_tools:
            return bool(call.error)
        return (
            bool(call.error)
            or call.name not in self.plan.own_tools
            or call.name in self.plan.repeatable
        )

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        if "artifact" not in self.plan.hooks:
            return await super().artifact(task, final, sandbox)
        content: bytes = await self._helpers.ask(
            "artifact", ARTIFACT_S, bytes, final, sandbox=sandbox, again=True
        )
        return content

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        wall_s = deadline.remaining_s
        score: Score = await self._helpers.ask(
            "score",
            wall_s + SCORE_GRACE_S,
            Score,
            artifact,
            wall_s,
            current_state().text,
            sandbox=sandbox,
            again=sandbox is None,
        )
        return score

    async def _verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        wall_s = deadline.remaining_s
        await self._helpers.ask("verify", wall_s + SCORE_GRACE_S, None, wall_s, sandbox=sandbox)

    def reference(self, task: Task) -> Any:
        """To be awaited: `reference_of`."""
        return self._helpers.ask("reference", HOOK_S, Solution, again=True)


async def reference_of(env: Env, task: Task) -> Reference:
    """Returns the reference solution, from wherever the env is. Raises TaskError."""
    pending: Any = env.reference(task)
    reference: Reference = await pending if inspect.isawaitable(pending) else pending
    return reference
