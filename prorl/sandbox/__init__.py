"""Sandboxes: where the agent's code runs.

`open_shell` and `open` are the documented way in for people and scripts.

    async with prorl.sandbox.open_shell(kind="auto") as shell:
        output, exit_code, timed_out = await shell.send("cd /tmp && ls", timeout_s=5)

    async with prorl.sandbox.open(kind="pyns") as sandbox:
        await sandbox.put("hello.py", b"print(6 * 7)")
        print((await sandbox.exec(["python3", "hello.py"], timeout_s=5)).output)

Inside the service, sandboxes come from this node's sandboxd instead:
`prorl.sandbox.host.UnixSandboxHost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl.sandbox.client import ConnectedSandbox
    from prorl.sandbox.shell import Shell
    from prorl.types import SandboxSpec

__all__ = ["open", "open_shell"]


@asynccontextmanager
async def open(
    kind: str = "auto", spec: SandboxSpec | None = None
) -> AsyncIterator[ConnectedSandbox]:
    """A sandbox of its own, and a sandboxd of its own in this process, until the end of the block.

    Kinds: auto, apptainer, pyns, local. Offers `exec(argv, timeout_s, stdin)`, `put(path,
    content)`, `get(path, max_bytes)` and `call(tool, arguments, timeout_s)`. Raises ConfigError,
    SandboxError.
    """
    from prorl.sandbox.shell import opened

    async with opened(kind, spec) as sandbox:
        yield sandbox


@asynccontextmanager
async def open_shell(kind: str = "auto", spec: SandboxSpec | None = None) -> AsyncIterator[Shell]:
    """A persistent interactive bash in a sandbox of its own; see `prorl.sandbox.shell.Shell`."""
    from prorl.sandbox.shell import Shell, opened

    async with opened(kind, spec) as sandbox:
        yield Shell(sandbox)
