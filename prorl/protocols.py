"""The architecture on a few screens: what the parts promise. Implementations meet only here.
What an agent promises stands beside the record that it gets: `prorl.agents.context`.

    trainer, CLI --HTTP--> gateway
    gateway --lease--> INIT --ready--> RUN --ran--> EVAL --scored--> store --DoGet--> trainer

Everything between processes is a `Channel`: an ordered two-way stream of record batches, over Arrow
Flight or inside one loop. Two protocols run over channels: an *edge* (work one way; credit and acks
the other way) and *control* (events up, commands down); both are described in `prorl/schema`. A row
of work grows from stage to stage: `prorl/schema/rows.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prorl.types import (
    Completion,
    Failure,
    GenerateRequest,
    Grade,
    Json,
    Message,
    NetworkRefusal,
    SandboxRef,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

if TYPE_CHECKING:
    import socket

    import pyarrow as pa

    from prorl.env_state import EnvState
    from prorl.limits import Deadline
    from prorl.network_policy import NetworkPolicy
    from prorl.schema.rows import Added, Row
    from prorl.types import Int32


# ---- between processes


class Channel(Protocol):
    """One end of an ordered two-way stream of record batches.

    All methods are called from the owner's event loop.

    `send` never blocks; what bounds the memory is the credit protocol above it. After the other end
    is gone `receive` gives None and `send` drops silently: the protocol above decides what a lost
    stream means.
    """

    @property
    def peer(self) -> Mapping[str, Json]:
        """The dialler's hello: worker, role, node, schema_version ..."""

    @property
    def node(self) -> str:
        """The node whose certificate the dialler showed; empty for this host."""

    @property
    def is_local(self) -> bool:
        """Tells whether both ends are one process, so that nothing goes through a socket."""

    def send(self, batch: pa.RecordBatch) -> None:
        """Queue a batch for the other end."""

    async def receive(self) -> pa.RecordBatch | None:
        """Next batch from the other end, or None when the stream has ended."""

    async def close(self) -> None:
        """End the stream after what was sent; idempotent."""


Accept = Callable[[Channel], Awaitable[None]]
"""Runs for the life of one accepted channel; the channel closes when it returns. Raising refuses
the stream with that text.
"""


class Network(Protocol):
    """Makes channels: between processes over Flight, inside one by handing over. `FlightNetwork`
    does both.
    """

    async def listen(
        self, name: str, routes: Mapping[str, tuple[Accept, pa.Schema, pa.Schema]]
    ) -> str:
        """Serve routes, path -> (handler, schema received, schema sent); the location to dial."""

    async def dial(
        self,
        location: str,
        path: str,
        hello: Mapping[str, Json],
        sends: pa.Schema,
        receives: pa.Schema,
    ) -> Channel:
        """Open a channel to a listener. Raises UnavailableError when nobody listens, SchemaError
        when `schema_version` differs.
        """

    async def close(self) -> None:
        """Stop listening and end every channel; idempotent."""


class Operator(Protocol):
    """A stage's work on one row: knows nothing of queues, edges or other rows."""

    @property
    def stage(self) -> str:
        """The name of its row in `prorl.graph`."""

    async def __call__(self, row: Row) -> Added:
        """Take one row of the stage's input schema, return what its output schema has more. A
        rollout's failure is part of what is returned; what raises is our own bug and becomes
        `stage_error`.
        """

    def unfinished(self, failure: Failure) -> Added | None:
        """Returns what a row gets that could not be worked on, so that what earlier stages made of
        it is kept; None where there is nothing to keep.
        """

    async def release(self, row: Row) -> None:
        """Give back the sandboxes that INIT made for a row that is cut. Idempotent."""


# ---- the policy


class Tokenizer(Protocol):
    """Text <-> ids. Special tokens never come out of `encode`."""

    vocab_size: int
    specials: Mapping[str, int]

    def encode(self, text: str) -> Int32:
        """Ids of plain text; what spells a special stays text."""

    def decode(self, ids: Int32) -> str:
        """Text of ids, specials spelled out; invalid UTF-8 becomes U+FFFD."""


class Renderer(Protocol):
    """Turns messages into token ids and sampled ids into messages. Ids that exist are never
    rendered again: the next prompt = earlier ids + `bridge`.
    """

    stop_token_ids: tuple[int, ...]
    vocab_size: int
    """Ids at or above it are impossible."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        """Ids of a first prompt, ending where the assistant starts to speak."""

    def bridge(self, completion_ids: Int32, messages: Sequence[Message]) -> Int32:
        """Ids to append after a completion: its end marker if cut off, messages, a new start."""

    def parse(
        self,
        completion_ids: Int32,
        prompt_ids: Int32 | None = None,
        tools: Sequence[ToolSpec] = (),
    ) -> Message:
        """The assistant message that was sampled; calls that do not parse carry their error.
        `prompt_ids` say whether a thought was open when sampling began, `tools` what types
        arguments have where a family writes them bare.
        """

    def completion(self, message: Message) -> Int32:
        """Returns what a model would sample to say this assistant message, end marker included. For
        oracles and warm starts.
        """

    def starts_segment(self, messages: Sequence[Message]) -> bool:
        """Returns whether new messages begin a new segment, since the template would rewrite its
        past.
        """


class RemoteRenderer(Protocol):
    """A renderer whose code runs in another process, as far as backends need it."""

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    async def completion(self, message: Message) -> Int32:
        """See `Renderer.completion`."""


class Backend(Protocol):
    """Token-in/token-out inference."""

    name: str

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises BackendError; cancelling aborts the request at the backend."""

    async def close(self) -> None:
        """Close connections; calling it again does nothing."""


@runtime_checkable
class ProbedBackend(Backend, Protocol):
    """A backend that can show, before it serves, that it is fit to train from."""

    async def probe(self) -> None:
        """Ask it once. Raises ConfigError if it is unfit, BackendError if it does not answer."""


# ---- the world


@runtime_checkable
class Sandbox(Protocol):
    """A started sandbox, spoken to over its tool server's socket. A call is never sent twice."""

    ref: SandboxRef

    async def call(self, tool: str, arguments: Mapping[str, Json], timeout_s: float) -> ToolResult:
        """Run a tool: `bash {command}`, `python {code}` ... A time-out is a result. Raises
        SandboxError (we lost it), or SandboxError with SANDBOX_BROKEN when what the agent did is to
        blame.
        """

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        """Run a program without a shell, output capped."""

    async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file below the workspace without following links."""

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a regular file below the workspace without following links."""

    async def snapshot(self, path: str, max_bytes: int) -> int:
        """Keep the workspace's files in a file of the host; its size. 0 when that would be more
        than `max_bytes`.
        """

    async def restore(self, path: str) -> None:
        """Put the files of a snapshot into the workspace."""

    async def close(self) -> None:
        """Close the connection; the sandbox itself is stopped by its owner."""


@runtime_checkable
class SupportsListen(Protocol):
    """Describes what a Sandbox has besides, in which a program may call us."""

    async def listen(self) -> socket.socket:
        """A socket that listens on the sandbox's own loopback: who connects to it runs inside. The
        caller serves and closes it. Raises SandboxError.
        """


class SandboxHost(Protocol):
    """Client of this node's sandboxd."""

    node_id: str

    async def start(self, owner: str, purpose: str, spec: SandboxSpec) -> SandboxRef:
        """A fresh sandbox for (owner = run/rollout/attempt, purpose = run | eval). Raises
        SandboxError.
        """

    def connect(self, ref: SandboxRef) -> AbstractAsyncContextManager[Sandbox]:
        """Connect to its tool server."""

    async def reserve(self, owner: str, purpose: str, spec: SandboxSpec) -> None:
        """Have one warm: a later `start` with the same arguments takes it."""

    async def prepare(
        self, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
    ) -> bool:
        """Run `work` on a fresh sandbox, or restore the snapshot of an earlier call with this key.
        True if restored. Snapshots belong to the node. Callers with equal keys wait for the first
        of them; when its work raises, the next one does its own.
        """

    async def set_network(self, ref: SandboxRef, network: NetworkPolicy) -> None:
        """Give a living sandbox the network of another phase, up to the operator's cap. Raises
        SandboxError.
        """

    async def refusals(self, ref: SandboxRef) -> tuple[NetworkRefusal, ...]:
        """Returns the connections that were refused to a sandbox since the last call. Raises
        SandboxError.
        """

    async def close_targets(self, targets: Iterable[tuple[str, int]]) -> None:
        """Let no sandbox of the node reach these (host, port), whatever its network is: model
        servers, which may come while a run goes on.
        """

    async def stop(self, ref: SandboxRef) -> None:
        """End it and remove every trace; idempotent."""

    async def stop_owner(self, owner: str) -> None:
        """End everything that belongs to an attempt; idempotent."""

    async def keep(self, sandboxes: Mapping[str, str]) -> None:
        """Go on with these, by owner, of what earlier incarnations of this process have started,
        and end the others; idempotent.
        """


class Env(Protocol):
    """A task domain. Stateless: one object serves all rollouts of a worker."""

    name: str

    def check(self, task: Task) -> None:
        """Raise TaskError if `task.data` lacks what this env reads."""

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """Returns what `stage` (RUN or EVAL) needs, or None for no sandbox."""

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """Tools that the policy may call for this task."""

    def messages(self, task: Task) -> tuple[Message, ...]:
        """First messages of the conversation: system, user."""

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Put the task's files into a fresh RUN sandbox."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run a tool call of the policy; bad arguments are a result with exit code 2."""

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """Returns what crosses into EVAL, from the final answer's text and the RUN sandbox."""

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Score the artifact in a fresh sandbox. Idempotent. Raises GraderError when the grader,
        not the artifact, fails.
        """

    def reference(self, task: Task) -> Reference:
        """The reference solution, for oracles and checks. Raises NoReferenceError, TaskError."""


@runtime_checkable
class CachedWorkspace(Protocol):
    """Optional: an Env whose prepared workspace is cached per node and copied for siblings."""

    def preparation(self, task: Task) -> str:
        """All that `prepare` makes a workspace from; empty: nothing worth keeping."""


@runtime_checkable
class SupportsTaskVerification(Protocol):
    """Optional: an Env whose tasks can be wrong in ways that only a sandbox shows."""

    async def verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        """Try the task in a sandbox as `score` gets it, once a node; RolloutError if it is bad."""


@runtime_checkable
class ScoresInPlace(Protocol):
    """Optional: an Env whose artifact may be too large to cross into EVAL. Then RUN's sandbox lives
    on, and EVAL scores there.
    """

    async def pack(self, task: Task, sandbox: Sandbox, max_bytes: int) -> bytes | None:
        """The artifact; None where it cannot be had within `max_bytes`, which is no failure."""

    async def score_in_place(
        self, task: Task, sandbox: Sandbox, fresh: Sandbox, deadline: Deadline
    ) -> Score:
        """Score what the agent left in its own `sandbox`; `fresh` is one as `score` gets it.
        Raises as `score`.
        """


@runtime_checkable
class Responds(Protocol):
    """Optional: an Env with turns of its own. An answer of the policy ends a rollout of it only
    where the env says nothing more.
    """

    def respond(
        self,
        task: Task,
        messages: Sequence[Message],
        state: EnvState,
        sandbox: Sandbox | None,
    ) -> str | Awaitable[str | None] | None:
        """The next user message, by the conversation so far, whose last message is the policy's
        answer; None ends the rollout. It may change `state`.
        """


@runtime_checkable
class ProvidesAgent(Protocol):
    """Optional: an Env whose tasks are played by an agent that it names itself."""

    agent: str

    def runs_code(self, task: Task) -> bool:
        """Returns whether that runs what the task says on this host. A service takes such tasks
        only with `load_code`.
        """


class Reference(Protocol):
    """A known way through a task: the tool calls an oracle makes, then its final answer."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The reference's calls, in this order, one a turn."""

    @property
    def answer(self) -> str:
        """Text of the assistant's message behind the calls."""

    @property
    def replies(self) -> tuple[str, ...]:
        """Answers to the env's own turns, one each; the last one again where it has more."""


class RewardFn(Protocol):
    """One named measure of an artifact; a `Rubric` is a weighted sum of them."""

    name: str

    async def __call__(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> float | Grade:
        """A value, usually in [0, 1], with or without words about it."""
