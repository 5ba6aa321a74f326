"""The program in which users' envs, rewards and tools run; see `users.py`."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prorl.envs import get_env
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.user_tools import user_spec
from prorl.errors import ProrlError, RolloutError, TaskError, UserError
from prorl.helper.child import Answer, Channel, place_of, serve
from prorl.limits import Deadline
from prorl.protocols import CachedWorkspace, Env, Sandbox, Verifies
from prorl.types import Json, SandboxRef, Score, Stage, Task, ToolCall, ToolResult

HOOKS = ("prepare", "call", "repeats", "artefact", "verify")


def prepare(channel: Channel, name: str, *tools: str) -> Answer:
    """Import what a task needs. Raises TaskError."""
    env = get_env(name)
    code = [_code_of(type(env))]
    for tool in tools:
        user_spec(tool)
    hooks, runner = _Hooks(env), asyncio.Runner()
    mine = tuple(filter(None, code))

    def answer(question: tuple[str, Task, tuple[Any, ...], SandboxRef | None]) -> Any:
        hook, task, given, ref = question
        sandbox = None if ref is None else _Sandbox(ref, channel)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who waits may give up
        try:
            return ["gave", runner.run(getattr(hooks, hook)(task, sandbox, *given))]
        except TaskError as error:
            return ["task", error.given, error.expected, error.hint]
        except UserError as error:
            return ["task", str(error), "", ""]
        except RolloutError as error:
            foreign = error.__cause__ is not None and not isinstance(error.__cause__, ProrlError)
            if foreign and (place := place_of(error, lambda file: file.startswith(mine))):
                return ["task", f"{name}.{hook}: {error.message} ({place})", "", ""]
            return ["failed", error.code.value, error.message]
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return answer


def _code_of(thing: Any) -> str:
    """Where the files of a user's part lie: its top package, else the file's folder."""
    module = inspect.getmodule(thing)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.startswith("prorl."):
        return ""
    depth = module.__name__.count(".") + (os.path.basename(file) != "__init__.py")
    for _ in range(max(depth, 1)):
        file = os.path.dirname(file)
    return f"{file}{os.sep}"


class _Hooks:
    def __init__(self, env: Env) -> None:
        self._env = env

    async def plan(self, task: Task, sandbox: Sandbox | None) -> Mapping[str, Json]:
        env, began = self._env, time.monotonic()
        env.check(task)
        hooks = {
            hook
            for hook in HOOKS
            if (found := getattr(type(env), hook, None)) is not None
            and found is not getattr(BaseEnv, hook, None)
        }
        if isinstance(env, Verifies):
            hooks.add("verify")
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
            "slow_s": time.monotonic() - began,
        }

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        await self._env.prepare(task, sandbox)

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        return await self._env.call(task, sandbox, call, timeout_s)

    async def repeats(self, task: Task, sandbox: Sandbox | None, call: ToolCall) -> bool:
        return bool(self._env.repeats(call))  # type: ignore[attr-defined]

    async def artefact(self, task: Task, sandbox: Sandbox | None, final: str) -> bytes:
        return await self._env.artefact(task, final, sandbox)

    async def score(
        self, task: Task, sandbox: Sandbox | None, artefact: bytes, left_s: float
    ) -> Score:
        return await self._env.score(task, artefact, sandbox, Deadline(left_s))

    async def verify(self, task: Task, sandbox: Sandbox | None, left_s: float) -> None:
        assert isinstance(self._env, Verifies)
        assert sandbox is not None
        await self._env.verify(task, sandbox, Deadline(left_s))

    async def reference(self, task: Task, sandbox: Sandbox | None) -> Solution:
        found = self._env.reference(task)
        if inspect.isawaitable(found):
            found = await found
        if not hasattr(found, "calls"):
            given = f"the reference of env {task.env!r} is a {type(found).__name__}"
            raise TaskError(given, "Solution(calls, answer)")
        return Solution(tuple(found.calls), str(found.answer))


class _Sandbox:
    """Implements `prorl.protocols.Sandbox`: whoever asked us does it, on its own connection."""

    def __init__(self, ref: SandboxRef, channel: Channel) -> None:
        self.ref, self._channel, self._number = ref, channel, channel.number

    async def _ask(self, op: str, *arguments: Any) -> Any:
        verdict, found = await asyncio.to_thread(
            self._channel.call_back, self._number, op, arguments
        )
        if verdict == "raised":
            raise found
        if verdict == "cancelled":
            raise asyncio.CancelledError
        return found

    async def call(self, tool: str, arguments: Mapping[str, Json], timeout_s: float) -> ToolResult:
        found: ToolResult = await self._ask("call", tool, dict(arguments), timeout_s)
        return found

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        found: ToolResult = await self._ask("exec", list(argv), timeout_s, stdin)
        return found

    async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        await self._ask("put", path, content, mode)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        found: bytes = await self._ask("get", path, max_bytes)
        return found

    async def snapshot(self, path: str, max_bytes: int) -> int:
        found: int = await self._ask("snapshot", path, max_bytes)
        return found

    async def restore(self, path: str) -> None:
        await self._ask("restore", path)

    async def close(self) -> None:
        """Nothing: the connection is whose who asked us."""


if __name__ == "__main__":
    serve(prepare, with_channel=True)
