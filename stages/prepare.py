"""A fresh sandbox is prepared as its env asks, for INIT and EVAL alike.

Once a node for siblings of a task, where that is worth it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from prorl.errors import RolloutError, SandboxError, boundary
from prorl.protocols import CachedWorkspace, Env, Sandbox, SandboxHost
from prorl.types import FailureCode, SandboxSpec, Task


async def prepare(
    host: SandboxHost, env: Env, task: Task, spec: SandboxSpec, sandbox: Sandbox
) -> None:
    """Put the task's files into a sandbox. Raises TaskError, RolloutError."""
    text = env.preparation(task) if isinstance(env, CachedWorkspace) else ""

    async def work() -> None:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{env.name}.prepare"):
            await env.prepare(task, sandbox)

    with _as_start():
        if text:
            await host.prepare(sandbox, _key(env.name, spec.image, text), work)
        else:
            await work()


@contextmanager
def _as_start() -> Iterator[None]:
    """A sandbox that breaks in the block did not start: the policy cannot have broken it."""
    try:
        yield
    except SandboxError as error:
        if error.code is not FailureCode.SANDBOX_BROKEN:
            raise
        raise SandboxError(
            FailureCode.SANDBOX_START, f"broke while it was prepared: {error.message}"
        ) from error


def _key(*parts: str) -> str:
    return hashlib.blake2b(
        "\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()
