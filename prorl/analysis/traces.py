"""Rollouts as OpenTelemetry traces, made of what is stored, so that no hot path knows of them.

A trace is one rollout; names and attributes are those of the GenAI semantic conventions:

    invoke_agent AGENT          from the lease to the commit
      INIT
      RUN
        chat MODEL              one for each model call: gen_ai.usage.*, finish reason, server
        execute_tool NAME       one for each tool call of the turn
      EVAL

Stored are durations and the time of the commit, not the times at which each began. So EVAL ends at
the commit, RUN before EVAL, INIT before RUN; model calls and tools follow each other within RUN, a
turn's tools in equal shares of its tool time. Ids are hashes of run, rollout and attempt: a trace
that is sent again is the same trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from prorl.errors import UserError
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json

NS = 1e9
ROLLOUTS = """
select rollout_id, attempt, task_id, env, agent, status, reward, failure_code, stop_reason, server,
    num_sampled, queue_s, init_s, run_s, eval_s, epoch(committed_at) as ended,
    epoch_us(committed_at) as committed_us
from rollouts where (epoch_us(committed_at), rollout_id) > ({committed_us}, {rollout_id})
order by epoch_us(committed_at), rollout_id limit {limit}"""
TURNS = """
select rollout_id, attempt, turn, prompt_tokens, completion_tokens, finish_reason, temperature,
    policy_version, backend, llm_s, tool_s
from turns where rollout_id in ({ids}) order by rollout_id, turn"""
CALLS = """
select rollout_id, attempt, turn, name, error from tool_calls
where rollout_id in ({ids})"""
AT_ONCE = 500
"""Rollouts of one question; their turns and calls lie in memory."""


FLUSH_SPANS = 1000
"""Spans that are handed to the SDK at a time, of the 2,048 that its queue holds."""


class Span(NamedTuple):
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Json]
    children: tuple[Span, ...] = ()
    error: str = ""


class ReadPosition(NamedTuple):
    """Holds how far a reader has come in the order of commits."""

    committed_us: int = -1
    rollout_id: int = -1


START = ReadPosition()


class Trace(NamedTuple):
    trace_id: int
    place: ReadPosition
    root: Span


def traces(stored: StoredRun, after: ReadPosition = START) -> Iterator[Trace]:
    """The rollouts that were committed behind a place, in the order of commits."""
    while True:
        rollouts = stored.sql(ROLLOUTS.format(**after._asdict(), limit=AT_ONCE)).to_pylist()
        if not rollouts:
            return
        after = ReadPosition(rollouts[-1]["committed_us"], rollouts[-1]["rollout_id"])
        ids = ",".join(str(row["rollout_id"]) for row in rollouts)
        turns, calls = stored.answers(TURNS.format(ids=ids), CALLS.format(ids=ids))
        by_rollout, by_turn = _grouped(turns.to_pylist(), calls.to_pylist())
        for row in rollouts:
            key = (row["rollout_id"], row["attempt"])
            digest = hashlib.sha256(f"{stored.run_id}/{key[0]}/{key[1]}".encode()).digest()
            root = _root(stored.run_id, row, by_rollout.get(key, []), by_turn)
            place = ReadPosition(row["committed_us"], row["rollout_id"])
            yield Trace(int.from_bytes(digest[:16]), place, root)


def _grouped(
    turns: list[dict[str, Json]], calls: list[dict[str, Json]]
) -> tuple[dict[Any, list[dict[str, Json]]], dict[Any, list[dict[str, Json]]]]:
    by_rollout: dict[Any, list[dict[str, Json]]] = {}
    for turn in turns:
        by_rollout.setdefault((turn["rollout_id"], turn["attempt"]), []).append(turn)
    by_turn: dict[Any, list[dict[str, Json]]] = {}
    for call in calls:
        by_turn.setdefault((call["rollout_id"], call["attempt"], call["turn"]), []).append(call)
    return by_rollout, by_turn


def _root(
    run_id: str,
    row: dict[str, Json],
    turns: list[dict[str, Json]],
    calls: dict[Any, list[dict[str, Json]]],
) -> Span:
    ended = row["ended"]
    graded = ended - row["eval_s"]
    ran = graded - row["run_s"]
    begun = ran - row["init_s"]
    parts = (
        Span("INIT", begun, ran, {}),
        Span("RUN", ran, graded, {}, tuple(_calls(row, turns, calls, ran))),
        Span(
            "EVAL", graded, ended, {} if row["reward"] is None else {"prorl.reward": row["reward"]}
        ),
    )
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": row["agent"],
        "gen_ai.usage.output_tokens": row["num_sampled"],
        "prorl.run_id": run_id,
        "prorl.rollout_id": row["rollout_id"],
        "prorl.attempt": row["attempt"],
        "prorl.task_id": row["task_id"],
        "prorl.env": row["env"],
        "prorl.status": row["status"],
        "prorl.stop_reason": row["stop_reason"],
    }
    if row["reward"] is not None:
        attributes["prorl.reward"] = row["reward"]
    start = begun - row["queue_s"]
    return Span(
        f"invoke_agent {row['agent']}", start, ended, attributes, parts, row["failure_code"]
    )


def _calls(
    row: dict[str, Json],
    turns: list[dict[str, Json]],
    calls: dict[Any, list[dict[str, Json]]],
    at: float,
) -> Iterator[Span]:
    for turn in turns:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "prorl",
            "gen_ai.request.model": turn["backend"],
            "gen_ai.request.temperature": turn["temperature"],
            "gen_ai.usage.input_tokens": turn["prompt_tokens"],
            "gen_ai.usage.output_tokens": turn["completion_tokens"],
            "gen_ai.response.finish_reasons": [turn["finish_reason"]],
            "prorl.policy_version": turn["policy_version"],
            "prorl.turn": turn["turn"],
        }
        yield Span(f"chat {turn['backend']}", at, at + turn["llm_s"], attributes)
        at += turn["llm_s"]
        turn_calls = calls.get((row["rollout_id"], row["attempt"], turn["turn"]), [])
        for call in turn_calls:
            tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call["name"] or ""}
            end = at + turn["tool_s"] / len(turn_calls)
            yield Span(f"execute_tool {call['name']}", at, end, tool, error=call["error"])
            at = end


class Exporter:
    """Sends traces over OTLP by the OpenTelemetry SDK; `endpoint` is that of a collector, as
    http://HOST:4318/v1/traces. The variables OTEL_EXPORTER_OTLP_* count, too.
    """

    def __init__(self, endpoint: str = "") -> None:
        """Raises UserError without the packages."""
        try:
            sdk = import_module("opentelemetry.sdk.trace")
            export = import_module("opentelemetry.sdk.trace.export")
            resource = import_module("opentelemetry.sdk.resources")
            otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self._api = import_module("opentelemetry.trace")
        except ImportError as error:
            raise UserError(
                f"no OpenTelemetry: {error}",
                "the SDK and the OTLP exporter",
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
            ) from None
        ids = self._ids = _Ids()
        exporter = otlp.OTLPSpanExporter(**({"endpoint": endpoint} if endpoint else {}))
        self._provider = sdk.TracerProvider(
            resource=resource.Resource.create({"service.name": "prorl"}), id_generator=ids
        )
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("prorl")
        self._num_unsent = 0

    def write(self, trace: Trace) -> None:
        self._ids.begin(trace.trace_id)
        self._span(trace.root, None)

    def _span(self, span: Span, parent: Any) -> None:
        context = None if parent is None else self._api.set_span_in_context(parent)
        started = self._tracer.start_span(
            span.name,
            context=context,
            attributes=span.attributes,
            start_time=int(span.start_s * NS),
        )
        for child in span.children:
            self._span(child, started)
        if span.error:
            started.set_attribute("error.type", span.error[:200])
            started.set_status(self._api.StatusCode.ERROR, span.error[:200])
        started.end(end_time=int(span.end_s * NS))
        self._num_unsent += 1
        if self._num_unsent >= FLUSH_SPANS:  # else the SDK drops what its queue does not hold
            self._provider.force_flush()
            self._num_unsent = 0

    def close(self) -> None:
        """Everything was sent, or given up."""
        self._provider.shutdown()


class _Ids:
    """Ids that are equal when a trace is made again: of the trace, and counted within it."""

    def __init__(self) -> None:
        self._trace, self._count = 0, 0

    def begin(self, trace_id: int) -> None:
        self._trace, self._count = trace_id, 0

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        self._count += 1
        digest = hashlib.sha256(f"{self._trace}/{self._count}".encode()).digest()
        return int.from_bytes(digest[:8])

    def is_trace_id_random(self) -> bool:
        return False
