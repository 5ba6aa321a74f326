"""The vocabulary: every record that crosses a boundary inside prorl.

Open this file first, `protocols.py` second.

    Task --> Group --n siblings--> Rollout --1 or more--> Attempt --> Trajectory
    Trajectory = Sequences + Turns + Messages

All records are frozen. Token ids and logprobs are numpy arrays from the moment a model call returns
until they are an Arrow buffer; they are never Python lists in between. Shape suffixes: L = tokens
of a sequence, C = sampled tokens, S = spans.

This module imports nothing but the standard library and numpy's array type, and does nothing when
imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NewType

from annotated_types import Len

from prorl.states import FAILURE_CLASS as FAILURE_CLASS
from prorl.states import UNSCORED as UNSCORED
from prorl.states import BackendFault as BackendFault
from prorl.states import FailureClass as FailureClass
from prorl.states import FailureCode as FailureCode
from prorl.states import FinishReason as FinishReason
from prorl.states import GroupState as GroupState
from prorl.states import Lineage as Lineage
from prorl.states import RolloutState as RolloutState
from prorl.states import Stage as Stage
from prorl.states import StopReason as StopReason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    UInt8 = NDArray[np.uint8]
    Float32 = NDArray[np.float32]
    Int16 = NDArray[np.int16]

Json = Any
"""A JSON value, only where JSON enters or leaves."""


PolicyVersion = NewType("PolicyVersion", int)
"""Id of the weights that sampled a token: given by the gateway, monotone, never reused; 0 is the
start, -1 means context, or weights that nobody can name.
"""

FIRST_VERSION = PolicyVersion(0)
"""The version of the weights that a run began with."""

UNKNOWN_VERSION = PolicyVersion(-1)
"""The version of tokens whose server cannot prove which weights sampled them: they do not train."""


class RunWeights(NamedTuple):
    """Holds what servers' labels say about a run's weights (`prorl/backends/labels.py`)."""

    tag: str
    """The run's: `TAG:VERSION:NONCE` names weights that it published."""
    start: tuple[str, ...] = ()
    """`TAG:VERSION` of weights that served when the run began: its version 0."""
    published: bool = False
    """True if the run published any through the service: then a server that states none is not
    believed.
    """
    announced: bool = False
    """True if its trainer sends them itself: what a server was started with is no version then."""


class SpanKind(IntEnum):
    """Says what a span of tokens is; stored as uint8."""

    CONTEXT = 0
    """Prompt or tool output: no logprobs."""
    TRAINED = 1
    """Sampled, trains."""
    SAMPLED = 2
    """Sampled, does not train."""


class AttemptKey(NamedTuple):
    """Names one attempt everywhere; `attempt` is the fencing token."""

    run_id: str
    rollout_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem that an env can pose. `data` is the domain's own: the env says what it reads from
    it (`prorl/envs`). A key whose value is None is left out of it, also in objects inside: a table
    gives each row the keys of all rows. Lists stay as they are.
    """

    task_id: Annotated[str, Len(1, 512)]
    """Unique in its source, e.g. `HumanEval/0`."""
    env: str
    """Name of the env that runs and scores it, e.g. `math`, `code`."""
    prompt: str
    """The instruction to the policy."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """Reference answer, tests, entry point ... JSON values only."""
    data_source: str = ""
    """The data set that it came from, e.g. `gsm8k`; a column of `rollouts`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _without_none(self.data))


def _without_none(value: Json) -> Json:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_none(inner) for key, inner in value.items() if inner is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Holds how tokens are sampled. Training runs use top_p 1 and no top_k, so that logprobs are
    those of the policy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    max_tokens: int = 4096
    """Per model call."""
    priority: int = 0
    """Lower is served earlier, by a server that schedules by it; 0 is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Budgets of one rollout. The wire carries what remains; receivers time with their own
    monotonic clock.
    """

    init_s: float = 60.0
    """INIT, per attempt (infra)."""
    run_s: float = 300.0
    """Model and tool time in RUN (policy)."""
    eval_s: float = 120.0
    """EVAL, retries included (infra, or task if the tests alone use it up)."""
    queue_s: float = 3600.0
    """Waiting anywhere (infra)."""
    tool_s: float = 30.0
    """One tool call."""
    max_turns: int = 16
    max_tokens: int = 16384
    """Tokens of a sequence, context included."""
    max_attempts: int = 3
    """Attempts in all that may fail with class infra: 3 = two retries. Deaths of our own workers
    are counted apart.
    """
    max_worker_losses: int = 10
    """Such deaths that a rollout may outlive: the next one ends it."""
    artifact_mb: int = 64
    """Packed changes of an agent's sandbox that cross into EVAL, where an env packs any. What is
    more is scored in the agent's own sandbox, and cannot be scored again; 0: all is.
    """


class ToolSpec(NamedTuple):
    """A tool as the policy sees it: JSON schema of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, Json]


class ToolCall(NamedTuple):
    """A call that the policy asks for. `error` is set when its text could not be parsed; the policy
    is told.
    """

    name: str
    arguments: Mapping[str, Json]
    error: str = ""
    id: str = ""
    """The id as the policy wrote it, where its family has ids; the result must quote it."""
    text: str = ""
    """The text that the policy wrote, markers left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The outcome of a tool call, a failed or timed-out one too."""

    output: str
    """Text for the policy, already capped."""
    exit_code: int = 0
    duration_s: float = 0.0
    truncated: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message for people: no ids come from here again once a prompt was rendered."""

    role: str
    """`system`, `user`, `assistant`, `tool`, `grader`, or one that the model's template knows."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    """Tool name of a `tool` message."""
    turn: int = 0
    reasoning: str = ""
    """Thoughts of an `assistant` message; they are no part of its content."""
    call_id: str = ""
    """The id in a `tool` message: `ToolCall.id` of the call that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One model call: exact ids in."""

    prompt_ids_L: Int32
    sampling: SamplingParams
    seed: int
    """From (run seed, task, sample, attempt, turn), never from time."""
    stop_token_ids: tuple[int, ...]
    request_id: str
    """`run/rollout/attempt/turn`: sent to the backend so that an abort finds it."""
    session: str
    """Rollout key, for prefix caches and sticky routers."""
    min_version: PolicyVersion = FIRST_VERSION
    """No backend with older weights may continue this rollout."""
    newest_version: PolicyVersion = FIRST_VERSION
    """Version recorded for backends that report none (scripted backends, weights pushed by the
    trainer itself): the newest version of the run that this worker knows.
    """
    weights: RunWeights | None = None
    """The way to read what servers state about their weights; None = their numbers are versions."""
    on_part: Callable[[Completion], None] | None = None
    """Called with the partial completion as it grows, and once more if the call is aborted. The
    last call wins.
    """
    part_tokens: int = 16
    """Tokens that should come between two such calls."""
    routing_from: int = -1
    """First place whose routing of experts is asked for; -1 = none is."""
    task: Task | None = None
    """This and what follows: for scripted backends in this process; never sent over a wire."""
    sample_index: int = 0
    turn: int = 0
    run_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Exact ids out. `version_ends`/`versions` split the ids where the weights changed; mostly one
    entry.
    """

    token_ids_C: Int32
    logprobs_C: Float32
    """The logprobs of the distribution sampled from; finite and <= 0."""
    finish_reason: FinishReason
    version_ends: tuple[int, ...]
    versions: tuple[PolicyVersion, ...]
    cached_tokens: int = 0
    llm_s: float = 0.0
    backend: str = ""
    routed_experts: Int16 | None = None
    """[places, layers * top_k] experts from `routing_from` to the last id but one, which alone no
    layer has seen; None where none were asked for, or a cut call has none.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One append-only token sequence of an attempt. `segment` > 0 only when a harness rewrote its
    history, or holds several conversations. Spans tile the tokens: `span_end_S[-1] ==
    len(token_ids_L)`; lengths of spans with kind >= 1 sum to `len(logprobs_C)`.
    """

    segment: int
    token_ids_L: Int32
    logprobs_C: Float32
    span_end_S: Int32
    span_kind_S: UInt8
    span_version_S: Int32
    span_turn_S: Int32
    span_temperature_S: Float32
    lineage: Lineage = Lineage.MAIN
    parent: int = -1
    """Segment that it forked from or goes on from; -1 for none."""
    weight: float = 1.0
    """1 over the sequences of its rollout that train; 0 where nothing of it does."""
    routed_experts: Int16 | None = None
    """[R, layers * top_k] experts of its first R ids: all but the last of a whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, in numbers."""

    turn: int
    segment: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    temperature: float
    policy_version: int
    """The version of the first token."""
    backend: str
    llm_s: float
    tool_s: float
    tool_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Holds why something ended other than well. `failure_class` follows from the code."""

    code: FailureCode
    message: str = ""

    @property
    def failure_class(self) -> FailureClass:
        """Class that the code belongs to (`FAILURE_CLASS`)."""
        return FAILURE_CLASS[self.code]


NO_FAILURE = Failure(code=FailureCode.NONE)
"""All went well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCounts:
    """Holds what became of a program's calls (`prorl.agents.capture`).

    They are zeros where no program drove the policy. `prorl.schema.fields.ENDPOINT_COUNTS` says
    what each one counts.
    """

    continued_calls: int = 0
    rendered_calls: int = 0
    forked_calls: int = 0
    edited_replies: int = 0
    unused_replies: int = 0
    retokenization_mismatches: int = 0
    image_placeholders: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """Holds what RUN leaves of an attempt."""

    sequences: tuple[Sequence, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    artifact: bytes
    """The only thing that crosses into EVAL: answer text, program, diff, tar of named files."""
    rescorable: bool = True
    """True if the artifact is all that is graded. False: it does not fit, and the agent's sandbox
    lives on until EVAL has graded it there.
    """
    stop_reason: StopReason
    failure: Failure
    llm_s: float
    tool_s: float
    endpoint_counts: EndpointCounts = EndpointCounts()
    env_state: str = ""
    """The state that the env remembers of the rollout (`prorl/env_state.py`), as JSON; EVAL sees
    it.
    """


class Grade(NamedTuple):
    """Holds what one reward function found, where a number alone would leave people asking why."""

    value: float
    log: str = ""
    """For people; becomes part of the score's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One named contribution to a reward."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Holds what EVAL found: reward = sum(value * weight)."""

    parts: tuple[RewardPart, ...]
    log: str = ""
    """Grader output for people, capped."""

    @property
    def reward(self) -> float:
        """Weighted sum of the parts."""
        return float(sum(part.value * part.weight for part in self.parts))


class SandboxRef(NamedTuple):
    """All that stages know of a sandbox; empty strings when the env needs none."""

    node_id: str = ""
    sandbox_id: str = ""
    socket_path: str = ""
    """The socket of the tool server, under 100 bytes."""


class NetworkRefusal(NamedTuple):
    """A host that a sandbox tried to reach through the node's proxy and may not."""

    host: str
    """The host as the sandbox named it; `(others)` stands for all beyond a bounded number."""
    port: int
    reason: str
    """no-network, not allowed, private, loopback, link-local, metadata, service ..."""
    times: int


DOCKER = "docker://"
"""The beginning of the name of an image in a container registry."""
DOCKERFILE = "dockerfile:"
"""The beginning of the name of an image that is built from a folder with a Dockerfile; an absolute
path follows.
"""
IMAGE_WORKDIR = "image"
"""The value of `SandboxSpec.workdir`: the WORKDIR of the image."""
HOST_WHEELS = "host"
"""The value of `SandboxSpec.wheels`: copied from the Python that prorl itself runs in."""


def image_name(reference: str) -> str:
    """The name in a node's registry of an image in a container registry.

    >>> image_name("docker://docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest")
    'sweb.eval.x86_64.psf_1776_requests-1142'
    """
    last = reference.removeprefix(DOCKER).rpartition("/")[2].partition("@")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "_", last.removesuffix(":latest"))[:128]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Holds what an env asks of a sandbox for one stage."""

    image: str = ""
    """Absolute path of a folder or .sif, a name of the node's registry (`prorl image`), or
    `docker://REFERENCE`, which is that name (`image_name`) and is pulled where it lacks; empty =
    the host's /usr, read-only.
    """
    overlay_bytes: int = 0
    """The bytes that may be written over the image's files, where the kind can; 0 = the image is
    read-only.
    """
    fakeroot: bool = False
    """Be root of the image (uid 0 of a user namespace that holds no other uid), where the kind can:
    for `apt-get` and its like.
    """
    workdir: str = ""
    """The agent's folder in the image: IMAGE_WORKDIR for the image's own WORKDIR, or an absolute
    path. HOME, /workspace and /tmp are the image's then. Empty: /workspace, an empty folder.
    """
    variables: tuple[str, ...] = ()
    """Variables of everything inside, as NAME=VALUE; they replace those of the image and of its
    user. The folders of PATH that the image has stay, behind these.
    """
    requirements: tuple[str, ...] = ()
    """Python packages beside the host's /usr, or npm's (`npm:NAME@VERSION`), installed once a node;
    then nothing of the host's own Python packages is seen. For sandboxes without an image.
    """
    wheels: str = ""
    """The source of the wheels: a folder of wheels, an index's URL, HOST_WHEELS, or empty for pip's
    own configuration.
    """
    tools: tuple[str, ...] = ("bash", "python", "files")
    memory_bytes: int = 2 << 30
    address_bytes: int = 0
    """The bytes that one process may map; 0 = memory_bytes. V8 and JavaScriptCore map far more than
    they use.
    """
    processes: int = 128
    file_bytes: int = 256 << 20
    """Largest single file."""
    tmp_bytes: int = 256 << 20
    workspace_bytes: int = 512 << 20
    """The limit of the agent's folder, where the kind can bound it."""
    wall_s: float = 3600.0
    cpus: float = 0.0
    """Cores that it may use at once, where a control group can bound it; 0 = all."""
    network_mode: str = "no-network"
    """The network that it may reach through the node's proxy, up to what the operator grants:
    `no-network`, `allowlist`, `public` (`prorl.network_policy`). It never has an interface.
    """
    allowed_hosts: tuple[str, ...] = ()
    """The hosts of `allowlist`: names, and `*.NAME` for all names below one."""
