"""Records <-> rows of the edges: each conversion is one function. A stage reads its row with
`read_*` and answers with `*_columns`: what it adds, as Python values, which `rows.grow` converts
for many rows at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from operator import attrgetter

import pyarrow as pa

from prorl import exact_json
from prorl.schema import RAN, READY, SCORED
from prorl.schema.fields import MESSAGE, REWARD_PART, TURN
from prorl.schema.rows import Added, Row
from prorl.schema.sequences import routed_values, sequence_values
from prorl.states import TASK_LINEAGES, Lineage
from prorl.task_json import task_from_json
from prorl.types import (
    UNSCORED,
    AttemptKey,
    Failure,
    FailureClass,
    FailureCode,
    Json,
    Message,
    NetworkRefusal,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    key: AttemptKey
    group_id: int
    sample_index: int
    rollout_key: str
    task: Task
    agent: str
    renderer: str = "{}"
    sampling: SamplingParams
    limits: RolloutLimits
    backend: str
    min_version: int = 0
    run_seed: int = 0
    queue_s: float = 0.0
    extra: str = "{}"
    on_lost_tool_call: str = ""
    """The fate of a tool call that may have run when its worker died; empty: no journal."""
    keep_routed_experts: bool = False
    train: tuple[Lineage, ...] = TASK_LINEAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Holds what RUN reads of a READY row."""

    lease: Lease
    sandbox: SandboxRef
    prompt: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


Values = tuple[Json, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyColumns(Added):
    schema = READY
    sandbox: SandboxRef
    prompt: list[Values]
    tools: str
    responds: bool
    init_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanColumns(Added):
    schema = RAN
    sequences: list[Values]
    turns: list[Values]
    messages: list[Values]
    artifact: bytes
    rescorable: bool
    artifact_digest: str
    env_state: str
    stop_reason: StopReason
    failure_class: FailureClass
    failure_code: FailureCode
    failure_message: str
    run_s: float
    llm_s: float
    tool_s: float
    routed_experts: list[Values]
    resumes: int
    continued_calls: int
    rendered_calls: int
    forked_calls: int
    edited_replies: int
    unused_replies: int
    retokenization_mismatches: int
    image_placeholders: int
    node: str
    worker: str
    server: str
    agent_refusals: tuple[NetworkRefusal, ...]

    @property
    def failure(self) -> Failure:
        return Failure(code=self.failure_code, message=self.failure_message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredColumns(Added):
    schema = SCORED
    scored: bool
    reward: float
    reward_parts: list[Values]
    grader_log: str
    eval_failure_code: FailureCode
    eval_failure_message: str
    eval_s: float
    env_sha256: str
    verifier_refusals: tuple[NetworkRefusal, ...]

    @property
    def failure(self) -> Failure:
        return Failure(code=self.eval_failure_code, message=self.eval_failure_message)

    @property
    def is_committed(self) -> bool:
        return self.failure.failure_class.trains or self.eval_failure_code in UNSCORED


_PLAIN = (
    *("group_id", "sample_index", "rollout_key", "agent", "renderer", "backend", "min_version"),
    *("run_seed", "queue_s", "extra", "on_lost_tool_call", "keep_routed_experts"),
)
"""Columns that are fields of `Lease` as they are."""


def read_lease(row: Row) -> Lease:
    return Lease(
        key=read_key(row),
        task=read_task(row),
        sampling=SamplingParams(**row.value("sampling")),
        limits=RolloutLimits(**row.value("limits")),
        train=tuple(map(Lineage, row.value("train"))),
        **{name: row.value(name) for name in _PLAIN},
    )


def read_task(row: Row) -> Task:
    """The task of a row of any edge; much cheaper than a whole `Lease`."""
    return task_from_json(row.value("task"))


def read_limit(row: Row, name: str) -> float:
    """One of the budgets in seconds; much cheaper than all of them."""
    return float(row.value("limits")[name])


def keys(batch: pa.RecordBatch) -> list[AttemptKey]:
    columns = (batch.column(name).to_pylist() for name in ("run_id", "rollout_id", "attempt"))
    return [AttemptKey(*key) for key in zip(*columns, strict=True)]


def read_key(row: Row) -> AttemptKey:
    return AttemptKey(row.value("run_id"), row.value("rollout_id"), row.value("attempt"))


def ready_columns(
    *,
    sandbox: SandboxRef,
    prompt: Many[Message],
    tools: Many[ToolSpec],
    init_s: float,
    responds: bool = False,
) -> ReadyColumns:
    """Returns what INIT adds to a LEASED row: the sandbox that RUN will act in, the prompt, the
    tools, and whether the env has turns of its own.
    """
    return ReadyColumns(
        sandbox=sandbox,
        prompt=[_message_values(m) for m in prompt],
        tools=exact_json.dumps([spec._asdict() for spec in tools]).decode() if tools else "[]",
        responds=responds,
        init_s=init_s,
    )


def read_ready(row: Row) -> Ready:
    return Ready(
        lease=read_lease(row),
        sandbox=read_sandbox(row),
        prompt=tuple(read_message(m) for m in row.value("prompt")),
        tools=tuple(ToolSpec(**spec) for spec in exact_json.loads(row.value("tools"))),
    )


def read_sandbox(row: Row) -> SandboxRef:
    """The RUN sandbox of a READY row."""
    return SandboxRef(**row.value("sandbox"))


def _message_values(message: Message) -> Values:
    """Values of a message in the order of MESSAGE."""
    calls = exact_json.dumps([call._asdict() for call in message.tool_calls]).decode()
    role, content, _, *rest = _message_fields(message)
    return role, content, calls, *rest


_message_fields = attrgetter(*(f.name for f in MESSAGE))
_turn_values = attrgetter(*(f.name for f in TURN))
_part_values = attrgetter(*(f.name for f in REWARD_PART))


def read_message(value: dict[str, Json]) -> Message:
    calls = tuple(ToolCall(**call) for call in exact_json.loads(value["tool_calls"]))
    return Message(**{**value, "tool_calls": calls})


def ran_columns(
    trajectory: Trajectory,
    *,
    run_s: float,
    resumes: int = 0,
    node: str = "",
    worker: str = "",
    server: str = "",
    refusals: tuple[NetworkRefusal, ...] = (),
) -> RanColumns:
    """Returns what RUN adds to a READY row: the trajectory, and what has happened to it. `server`:
    the one that it was given.
    """
    failure = trajectory.failure
    return RanColumns(
        sequences=[sequence_values(s) for s in trajectory.sequences],
        turns=[_turn_values(turn) for turn in trajectory.turns],
        messages=[_message_values(m) for m in trajectory.messages],
        artifact=trajectory.artifact,
        rescorable=trajectory.rescorable,
        artifact_digest=artifact_digest(trajectory.artifact),
        env_state=trajectory.env_state,
        stop_reason=trajectory.stop_reason,
        failure_class=failure.failure_class,
        failure_code=failure.code,
        failure_message=failure.message,
        run_s=run_s,
        llm_s=trajectory.llm_s,
        tool_s=trajectory.tool_s,
        routed_experts=[
            routed_values(s) for s in trajectory.sequences if s.routed_experts is not None
        ],
        resumes=resumes,
        **asdict(trajectory.endpoint_counts),
        node=node,
        worker=worker,
        server=trajectory.turns[-1].backend if trajectory.turns else server,
        agent_refusals=refusals,
    )


def artifact_digest(artifact: bytes) -> str:
    """BLAKE2b-128 of the artifact, hex."""
    return hashlib.blake2b(artifact, digest_size=16).hexdigest()


def scored_columns(
    *,
    score: Score | None,
    failure: Failure,
    eval_s: float,
    trace: str = "",
    env_sha256: str = "",
    refusals: tuple[NetworkRefusal, ...] = (),
) -> ScoredColumns:
    """RAN -> SCORED; `score` is None for rows that pass unscored, `trace` a grader's traceback."""
    return ScoredColumns(
        scored=score is not None,
        reward=score.reward if score else 0.0,
        reward_parts=[_part_values(part) for part in score.parts] if score else [],
        grader_log=score.log if score else trace,
        eval_failure_code=failure.code,
        eval_failure_message=failure.message,
        eval_s=eval_s,
        env_sha256=env_sha256,
        verifier_refusals=refusals,
    )


def read_failure(row: Row, prefix: str = "") -> Failure:
    return Failure(
        code=FailureCode(row.value(f"{prefix}failure_code")),
        message=row.value(f"{prefix}failure_message"),
    )
