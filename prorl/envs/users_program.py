"""The program in which users' envs, rewards and tools run; see `users.py`."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from prorl.env_state import EnvState, bound, current_state
from prorl.envs import get_env
from prorl.envs.base import BaseEnv, Solution, check_settings
from prorl.envs.settings import record_of
from prorl.envs.tools import user_spec
from prorl.errors import GraderError, ProrlError, RolloutError, TaskError, UserError, placed
from prorl.helper.child import Answer, HelperChannel, place_of, serve, trace_of
from prorl.limits import Deadline
from prorl.protocols import CachedWorkspace, Env
from prorl.sandbox_calls import SandboxProxy
from prorl.types import FailureCode, Json, SandboxRef, Stage, Task

HOOKS = ("prepare", "call", "repeats", "respond", "artifact", "verify")


def prepare(channel: HelperChannel, name: str, *tools: str) -> Answer:
    """Import what a task needs. Raises TaskError."""
    try:
        env = get_env(name)
        for tool in tools:
            if tool not in getattr(env, "own_tools", ()):
                user_spec(tool)
    except TaskError as error:
        place = place_of(error)
        raise TaskError(placed(str(error), place)) from None
    hooks, runner = _hooks(name, env), asyncio.Runner()
    mine = tuple(filter(None, [_code_of(type(env))]))

    def answer(question: tuple[str, Task, tuple[Any, ...], SandboxRef | None]) -> Any:
        hook, task, arguments, ref = question
        sandbox: Any = None if ref is None else SandboxProxy(ref, channel)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who waits may give up
        try:
            return runner.run(_awaited(hooks[hook], task, sandbox, *arguments))
        except TaskError:
            raise
        except UserError as error:
            raise TaskError(str(error)) from None
        except RolloutError as error:
            cause = error.__cause__
            foreign = cause is not None and not isinstance(cause, ProrlError)
            if foreign and (place := place_of(error, lambda file: file.startswith(mine))):
                where = f"{name.rpartition('/')[2]}.{hook}"  # the place has the whole path
                text = placed(f"{where}: {error.message}", place)
                if hook == "score":
                    trace = trace_of(cause or error)
                    raise GraderError(FailureCode.GRADER_ERROR, text, trace) from None
                raise TaskError(text) from None
            if isinstance(error, GraderError):
                trace = error.log or (trace_of(cause) if cause is not None else "")
                raise GraderError(error.code, error.message, trace) from None
            raise RolloutError(error.code, error.message) from None
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return answer


async def _awaited(hook: Callable[..., Any], *arguments: Any) -> Any:
    answer = hook(*arguments)
    return await answer if inspect.isawaitable(answer) else answer


def _code_of(thing: Any) -> str:
    """Returns the path of the files of a user's plugin: its top package, else the file's folder."""
    module = inspect.getmodule(thing)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.startswith("prorl."):
        return ""
    depth = module.__name__.count(".") + (os.path.basename(file) != "__init__.py")
    for _ in range(max(depth, 1)):
        file = os.path.dirname(file)
    return f"{file}{os.sep}"


async def _stateful(name: str, state: EnvState, hook: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a hook gives, and the state as it leaves it. Raises TaskError."""
    with bound(state):
        outcome = await _awaited(hook)
    try:
        return outcome, state.text
    except TaskError as error:
        raise TaskError(f"{name}: {error.problem}", error.expected, error.hint) from None


async def _scored(state: EnvState, score: Callable[[], Any]) -> Any:
    with bound(state):
        return await _awaited(score)


def _hooks(name: str, env: Any) -> Mapping[str, Callable[..., Any]]:
    """Returns the hooks, each by the task and its sandbox; users write hooks plain or `async`."""
    return {
        "plan": lambda task, sandbox: _plan(env, task),
        "settings": lambda task, sandbox, values, where: check_settings(env, values, where),
        "prepare": env.prepare,
        "call": lambda task, sandbox, call, timeout_s, seed, text: _stateful(
            f"{name}.call",
            EnvState(seed=seed, text=text),
            lambda: env.call(task, sandbox, call, timeout_s),
        ),
        "respond": lambda task, sandbox, messages, seed, text: _stateful(
            f"{name}.respond",
            EnvState(seed=seed, text=text),
            lambda: env.respond(task, messages, current_state(), sandbox),
        ),
        "repeats": lambda task, sandbox, call: bool(env.repeats(call)),
        "artifact": lambda task, sandbox, final: env.artifact(task, final, sandbox),
        "score": lambda task, sandbox, artifact, remaining_s, text: _scored(
            EnvState(text=text), lambda: env.score(task, artifact, sandbox, Deadline(remaining_s))
        ),
        "verify": lambda task, sandbox, remaining_s: env.verify(
            task, sandbox, Deadline(remaining_s)
        ),
        "reference": lambda task, sandbox: _reference(env, task),
    }


def _plan(env: Env, task: Task) -> Mapping[str, Json]:
    record_of(env).of(task)
    env.check(task)
    if (respond := getattr(env, "respond", None)) is not None:
        _check_respond(str(env.name), respond)
    hooks = {
        hook
        for hook in HOOKS
        if (own := getattr(type(env), hook, None)) is not None
        and own is not getattr(BaseEnv, hook, None)
    }
    return {
        "name": str(env.name),
        "messages": tuple(env.messages(task)),
        "tools": tuple(env.tools(task)),
        "run": env.sandbox(task, Stage.RUN),
        "eval": env.sandbox(task, Stage.EVAL),
        "preparation": env.preparation(task) if isinstance(env, CachedWorkspace) else None,
        "hooks": sorted(hooks),
        "own_tools": tuple(getattr(env, "own_tools", ())),
        "repeatable": tuple(getattr(env, "repeatable", ())),
        "partial_credit": bool(getattr(env, "partial_credit", False)),
        "reward_range": _reward_range(env),
    }


def _check_respond(name: str, respond: Any) -> None:
    """Raise TaskError for a `respond` that does not take what it is given."""
    try:
        inspect.signature(respond).bind(None, (), EnvState(), None)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{name}.respond: {error}", "def respond(self, task, messages, state, sandbox)"
        ) from None


def _reward_range(env: Env) -> tuple[float, float]:
    """Returns the env's worst and best reward. Raises TaskError."""
    bounds: Json = getattr(env, "reward_range", BaseEnv.reward_range)
    try:
        worst, best = map(float, bounds)
    except (TypeError, ValueError):
        worst = best = math.nan
    if not worst < best:
        raise TaskError(
            f"reward_range of env {env.name!r} is {bounds!r}"[:300],
            "the worst and the best reward, as (0.0, 1.0)",
        )
    return worst, best


async def _reference(env: Env, task: Task) -> Solution:
    solution = env.reference(task)
    if inspect.isawaitable(solution):
        solution = await solution
    if not hasattr(solution, "calls"):
        problem = f"the reference of env {task.env!r} is a {type(solution).__name__}"
        raise TaskError(problem, "Solution(calls, answer)")
    replies = tuple(map(str, getattr(solution, "replies", ())))
    return Solution(tuple(solution.calls), str(solution.answer), replies)


if __name__ == "__main__":
    serve(prepare, with_channel=True)
