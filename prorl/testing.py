"""For tests of envs, agents and tools, yours and ours.

Real processes in a folder, scripted replies, and a whole rollout in one call.

>>> from prorl.envs import get_env
>>> task = make_task("math", "Half of 48?", answer="24")
>>> run(get_env("math"), task, "#### 24").reward, run(get_env("math"), task, "#### 42").reward
(1.0, 0.0)

`LocalSandbox` isolates nothing: run what you trust. `play(..., boxes=isolated("pyns"))` does the
same in sandboxes that hold. Nothing here is imported by the service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import prorl.sandbox
from prorl.agents import get_agent
from prorl.agents.context import AttemptContext
from prorl.agents.programs import program_of
from prorl.backends import open_backend
from prorl.env_state import EnvState, bound
from prorl.errors import BackendError, RolloutError, UserError
from prorl.limits import Deadline
from prorl.network_policy import sandbox_spec
from prorl.protocols import (
    Backend,
    CachedWorkspace,
    Env,
    ProvidesAgent,
    Sandbox,
    ScoresInPlace,
    SupportsTaskVerification,
)
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer
from prorl.tools.server.children import EXIT_TIMEOUT
from prorl.tools.server.files import Files
from prorl.tools.server.place import Folder
from prorl.types import (
    AttemptKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Json,
    Message,
    PolicyVersion,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
)

if TYPE_CHECKING:
    from prorl.types import Int32

RENDERER = ChatMLRenderer(ByteTokenizer())

Reply = str | ToolCall | Message | Completion | BackendError | None
"""The replies of a scripted model: a text, a call, a whole message, exact tokens; or it fails, or
(None) never answers.
"""

Boxes = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
"""Makes a fresh sandbox."""


def make_task(env: str, prompt: str = "", *, task_id: str = "test/1", **data: Json) -> Task:
    """A task row; `data` is what the env reads."""
    return Task(task_id=task_id, env=env, prompt=prompt, data=data)


class Played(NamedTuple):
    """One rollout from its first prompt to its score."""

    trajectory: Trajectory
    score: Score

    @property
    def reward(self) -> float:
        return self.score.reward

    @property
    def outputs(self) -> list[str]:
        return [message.content for message in self.trajectory.messages if message.role == "tool"]


def run(env: Env, task: Task, *replies: Reply, boxes: Boxes | None = None) -> Played:
    """`play`, for tests without an event loop. `boxes=isolated()` for tools other than bash, python
    and files.
    """
    return asyncio.run(play(env, task, Replies(*replies), boxes=boxes))


async def play(
    env: Env,
    task: Task,
    backend: Backend,
    *,
    boxes: Boxes | None = None,
    limits: RolloutLimits | None = None,
    agent: str = "native",
) -> Played:
    """Check, prepare, act and score as the service does, each side in a fresh sandbox of `boxes`.
    Raises TaskError; RolloutError for a cause that is not the policy's.
    """
    env.check(task)
    boxes, limits = boxes or _local, limits or RolloutLimits()
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(prepared_box(env, task, Stage.RUN, boxes, agent))
        driver = get_agent(env.agent if isinstance(env, ProvidesAgent) else agent)
        trajectory = await driver.run(_context(env, task, backend, sandbox, limits))
        if not trajectory.failure.failure_class.trains:
            raise RolloutError(trajectory.failure.code, trajectory.failure.message)
        if trajectory.rescorable:
            await stack.aclose()
        async with prepared_box(env, task, Stage.EVAL, boxes) as fresh:
            deadline = Deadline(limits.eval_s)
            with bound(EnvState(text=trajectory.env_state)):
                if trajectory.rescorable:
                    score = await env.score(task, trajectory.artifact, fresh, deadline)
                else:
                    assert isinstance(env, ScoresInPlace)
                    assert sandbox is not None
                    assert fresh is not None
                    score = await env.score_in_place(task, sandbox, fresh, deadline)
    return Played(trajectory, score)


def _context(
    env: Env, task: Task, backend: Backend, sandbox: Sandbox | None, limits: RolloutLimits
) -> AttemptContext:
    """Returns what RUN would tell the agent of a first attempt."""
    return AttemptContext(
        task=task,
        env=env,
        messages=env.messages(task),
        tools=env.tools(task),
        renderer=RENDERER,
        backend=backend,
        sandbox=sandbox,
        deadline=Deadline(limits.run_s),
        key=AttemptKey("test", 1, 1),
        session="test",
        limits=limits,
        sampling=SamplingParams(max_tokens=limits.max_tokens),
    )


async def verify(env: Env, task: Task, *, boxes: Boxes | None = None, limit_s: float = 600) -> None:
    """Try the task itself, where its env can do that (`prorl.protocols.SupportsTaskVerification`).
    Raises TaskError, RolloutError.
    """
    env.check(task)
    if isinstance(env, SupportsTaskVerification):
        async with prepared_box(env, task, Stage.EVAL, boxes or _local) as sandbox:
            assert sandbox is not None
            await env.verify(task, sandbox, Deadline(limit_s))


@asynccontextmanager
async def prepared_box(
    env: Env, task: Task, stage: Stage, boxes: Boxes, agent: str = ""
) -> AsyncIterator[Sandbox | None]:
    """Yields the sandbox that a stage needs, prepared as the stage does it."""
    program = program_of(agent)
    spec = program.sandbox(env, task) if program else sandbox_spec(env, task, stage)
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(boxes(spec)) if spec else None
        if stage is Stage.RUN or (sandbox is not None and isinstance(env, CachedWorkspace)):
            await env.prepare(task, sandbox)
        yield sandbox


def isolated(kind: str = "auto") -> Boxes:
    """Sandboxes that hold, each with a node of its own (0.2 to 0.5 s); see `prorl doctor`."""
    return lambda spec: prorl.sandbox.open(kind, spec)


@asynccontextmanager
async def node(kind: str = "auto") -> AsyncIterator[Boxes]:
    """Sandboxes that hold, on a node that they share until the end of the block: each starts in a
    hundredth of a second.

        async with node("pyns") as boxes:
            await play(env, task, Replies("done"), boxes=boxes)
    """
    from prorl.sandbox.shell import node

    async with node(kind) as open_sandbox:
        yield open_sandbox


@asynccontextmanager
async def _local(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    with tempfile.TemporaryDirectory(prefix="prorl-test-") as folder:
        yield LocalSandbox(Path(folder))


# ---- a model that says what it is told to


class Replies:
    """Implements `prorl.protocols.Backend`: the given replies in order; keeps what it was asked."""

    name = "replies"

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[GenerateRequest] = []
        self.prompts: list[Int32] = []
        self.completions: list[Completion] = []
        self.waiting = asyncio.Event()
        """Set when a reply is None and the request waits for ever."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """The next reply, cut at the requested length."""
        self.requests.append(request)
        self.prompts.append(request.prompt_ids_L.copy())
        reply = self.replies.pop(0)
        if isinstance(reply, BackendError):
            raise reply
        if reply is None:
            self.waiting.set()
            await asyncio.Event().wait()
            raise AssertionError
        completion = reply if isinstance(reply, Completion) else sampled(_ids(reply))
        room = request.sampling.max_tokens
        if len(completion.token_ids_C) > room:
            completion = sampled(completion.token_ids_C[:room], finish=FinishReason.LENGTH)
        self.completions.append(completion)
        return completion

    async def close(self) -> None:
        """Nothing to close."""


def scripted(kind: str, env: Env) -> Backend:
    """`oracle` makes the calls of the env's reference solution, `noop` says nothing useful."""
    return open_backend(f"scripted:{kind}", RENDERER, lambda name: env)


def sampled(ids: Int32, version: int = 0, finish: FinishReason = FinishReason.STOP) -> Completion:
    """A completion of these ids with made-up, valid logprobs."""
    logprobs = -np.linspace(0.0, 1.0, len(ids), dtype=np.float32)
    ends, versions = ((len(ids),), (PolicyVersion(version),)) if len(ids) else ((), ())
    return Completion(
        token_ids_C=ids,
        logprobs_C=logprobs,
        finish_reason=finish,
        version_ends=ends,
        versions=versions,
    )


def _ids(reply: str | ToolCall | Message) -> Int32:
    if isinstance(reply, ToolCall):
        reply = Message(role="assistant", content="", tool_calls=(reply,))
    elif isinstance(reply, str):
        reply = Message(role="assistant", content=reply)
    return RENDERER.completion(reply)


# ---- a sandbox that is a folder


_PROGRAMS = {"bash": ["bash", "-c"], "python": ["python3", "-c"]}


class LocalSandbox:
    """Implements `prorl.protocols.Sandbox` by plain processes in a folder; no persistent shells.
    `calls` keeps what crossed, for assertions.
    """

    def __init__(self, folder: Path) -> None:
        self.ref = SandboxRef("test", folder.name, "")
        self.folder = folder
        self.calls: list[tuple[str, Mapping[str, Json]]] = []
        self._files = Files(Folder(str(folder)))

    async def call(self, tool: str, arguments: Mapping[str, Json], timeout_s: float) -> ToolResult:
        """bash and python as fresh processes, files as the tool server does it."""
        self.calls.append((tool, arguments))
        if tool == "files":
            done = self._files.run(dict(arguments), time.monotonic() + timeout_s)
            text = done["output"].value().decode("utf-8", "replace")
            return ToolResult(output=text, exit_code=done["exit_code"])
        if tool not in _PROGRAMS:
            raise UserError(
                f"tool {tool!r} in a LocalSandbox", "bash, python or files", "boxes=isolated()"
            )
        argv = _PROGRAMS[tool]
        return await self.exec(
            [*argv, arguments["command" if tool == "bash" else "code"]], timeout_s
        )

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        """Run a program; its whole process group ends with it."""
        began = time.monotonic()
        process = await self._start(argv)
        timed_out, output = False, b""
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate(stdin)
        except TimeoutError:
            timed_out = True
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            await process.wait()
        code = process.returncode or 0
        exit_code = EXIT_TIMEOUT if timed_out else code if code >= 0 else 128 - code
        return ToolResult(
            output=output.decode("utf-8", "replace"),
            exit_code=exit_code,
            duration_s=time.monotonic() - began,
            timed_out=timed_out,
        )

    async def listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    async def _start(self, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """A program in a process group of its own; stderr joins stdout."""
        return await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.folder,
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return (self.folder / path).read_bytes()[:max_bytes]

    async def snapshot(self, path: str, max_bytes: int) -> int:
        with tarfile.open(path, "w") as tar:
            tar.add(self.folder, arcname=".")
        return Path(path).stat().st_size

    async def restore(self, path: str) -> None:
        with tarfile.open(path) as tar:
            # Debian 12's Python, 3.11.2, has no filters; what is unpacked is ours
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)
            tar.extractall(self.folder)

    async def close(self) -> None:
        """Nothing to close."""
