"""Preparing a fresh sandbox as its env asks: once a node for siblings of a task where that is worth
it, for INIT and EVAL alike.
"""

from __future__ import annotations

import hashlib

from prorl.errors import RolloutError, SandboxError, boundary
from prorl.protocols import CachedWorkspace, Env, Sandbox, SandboxHost
from prorl.types import FailureCode, SandboxSpec, Task


async def prepare(
    host: SandboxHost, env: Env, task: Task, spec: SandboxSpec, sandbox: Sandbox
) -> None:
    """Put the task's files into a sandbox.

    Raises TaskError, RolloutError; a sandbox that breaks now was not broken by the policy.
    """
    text = env.preparation(task) if isinstance(env, CachedWorkspace) else ""

    async def work() -> None:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{env.name}.prepare"):
            await env.prepare(task, sandbox)

    try:
        if text:
            await host.prepare(sandbox, _key(env.name, spec.image, text), work)
        else:
            await work()
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
