"""One sandbox for a script or a person, and a bash in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import NamedTuple

from prorl.sandbox.client import ConnectedSandbox, connected
from prorl.sandbox.node.pool import own_pool
from prorl.sandbox.node.probe import choose
from prorl.types import SandboxSpec, ToolResult

OpenSandbox = Callable[[SandboxSpec], AbstractAsyncContextManager[ConnectedSandbox]]


class Sent(NamedTuple):
    """The result of a command.

    Its output (both streams, capped), exit code (124 after a time-out) and whether time ran out.
    """

    output: str
    exit_code: int
    timed_out: bool


class Shell:
    """A persistent bash, whose state lives from one command to the next.

    That is its directory, variables, functions and jobs.
    """

    def __init__(self, sandbox: ConnectedSandbox) -> None:
        self.sandbox = sandbox

    async def send(
        self, command: str, timeout_s: float = 30.0, *, on_timeout: str = "interrupt"
    ) -> Sent:
        """Run a command (several lines are fine) and wait for its end.

        At the time-out the command gets Ctrl-C, then TERM, then KILL, and the shell lives on; with
        `on_timeout="keep"` it is left running and `send_input` types to it. `exit` gives its code;
        the next command has a new shell in the last directory. Cancelled, it ends the command as at
        the time-out; the shell and its state stay for the next `send`.
        """
        arguments = {"command": command, "on_timeout": on_timeout}
        return _sent(await self.sandbox.call("bash", arguments, timeout_s))

    async def send_input(
        self, text: str, timeout_s: float = 30.0, *, on_timeout: str = "keep"
    ) -> Sent:
        """Type to the program that was left running.

        It takes text, `\\x03` for Ctrl-C, `\\x04` for end of file.
        """
        return _sent(
            await self.sandbox.call("bash", {"input": text, "on_timeout": on_timeout}, timeout_s)
        )


def _sent(result: ToolResult) -> Sent:
    return Sent(result.output, result.exit_code, result.timed_out)


@asynccontextmanager
async def node(kind: str) -> AsyncIterator[OpenSandbox]:
    """Opens sandboxes on one node, a sandboxd in this process; they end with their own blocks."""
    async with own_pool(await choose(kind)) as pool:
        numbers = count()

        @asynccontextmanager
        async def on_node(spec: SandboxSpec) -> AsyncIterator[ConnectedSandbox]:
            ref = await pool.start(f"shell {next(numbers)}", "run", spec)
            try:
                async with connected(ref, pool.fate) as sandbox:
                    yield sandbox
            finally:
                await pool.stop(ref.sandbox_id)

        yield on_node


@asynccontextmanager
async def opened(kind: str, spec: SandboxSpec | None) -> AsyncIterator[ConnectedSandbox]:
    async with node(kind) as open_sandbox, open_sandbox(spec or SandboxSpec()) as sandbox:
        yield sandbox
