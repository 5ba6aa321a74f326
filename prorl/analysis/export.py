"""A stored run in the shapes that others read, in the order of delivery.

One row per sequence (`trl`, `verl`, `hf`) or per rollout (`chat`, `atif`). Token-carrying rows say
everything that a sequence is (ids, logprobs of sampled tokens, spans, keys), beside the columns
that the trainer of that name reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from prorl import exact_json
from prorl.schema.fields import SPANS
from prorl.schema.sequences import dense
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.replay import ReplayOrder, stored_index
from prorl.types import Json


def arrow_schema(row: Mapping[str, Json]) -> pa.Schema:
    """Columns of a token-carrying row: ids int32, logprobs float32, masks uint8, text, keys."""
    return pa.schema([(name, _dtype(name, value)) for name, value in row.items()])


def _dtype(name: str, value: Json) -> pa.DataType:
    if name in SPANS:
        return pa.list_(SPANS[name].value_type)
    if name.endswith("_mask"):
        return pa.list_(pa.uint8())
    if "log" in name and isinstance(value, list):
        return pa.list_(pa.float32())
    if name in ("prompts", "responses") or name.endswith("_ids"):
        return pa.list_(pa.int32())
    if name == "messages":
        return _MESSAGES
    if name == "reward":
        return pa.float32()
    return pa.utf8() if isinstance(value, str) else pa.int64()


_CALL = pa.struct([("name", pa.utf8()), ("arguments", pa.utf8())])


_MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", pa.utf8()),
            ("content", pa.utf8()),
            (
                "tool_calls",
                pa.list_(pa.struct([("id", pa.utf8()), ("type", pa.utf8()), ("function", _CALL)])),
            ),
            ("name", pa.utf8()),
            ("tool_call_id", pa.utf8()),
            ("reasoning_content", pa.utf8()),
        ]
    )
)


ATIF = "ATIF-v1.8"

KEYS = ("rollout_id", "group_id", "sample_index", "attempt", "segment", "reward")

Rows = Iterator[dict[str, Json]]


def sequences(stored: StoredRun, everything: bool) -> Iterator[pa.RecordBatch]:
    """Groups in the order in which a replay serves them; with `everything` then all others."""
    index = stored_index(stored)
    groups = [group for group in ReplayOrder(stored).groups if group in index]
    if everything:
        stored_groups = stored.read("sequences", ["group_id"]).column("group_id").to_pylist()
        groups += sorted(set(stored_groups) - set(groups))
    return (index.read(group) for group in groups)


def _token_rows(stored: StoredRun, everything: bool = False) -> Rows:
    """A row per sequence: keys, spans, `ids`, and `mask`, `sampled`, `logprobs` of full length."""
    columns = ["rollout_id", "task_id", "data_source"]
    about = {row.pop("rollout_id"): row for row in stored.read("rollouts", columns).to_pylist()}
    for batch in sequences(stored, everything):
        full = dense(batch)
        for i in range(batch.num_rows):
            row = {name: batch.column(name)[i].as_py() for name in (*KEYS, *SPANS)}
            masks = ("token_ids", "loss_mask", "sampled_mask", "logprobs")
            arrays = {name: full.column(name)[i].values.to_numpy() for name in masks}
            yield {**row, **about[row["rollout_id"]], **arrays}


def trl(stored: StoredRun, everything: bool = False) -> Rows:
    """Returns rows as TRL's `rollout_func` gives them: prompt, completion, logprobs, and a mask.
    The prompt is the context before the first sampled token; logprobs are as long as the
    completion; the mask says which of its tokens are the model's.
    """
    for row in _token_rows(stored, everything):
        ids, mask, sampled = (row.pop(n) for n in ("token_ids", "loss_mask", "sampled_mask"))
        logprobs, cut = row.pop("logprobs"), _first(sampled)
        yield {
            "prompt_ids": ids[:cut].tolist(),
            "completion_ids": ids[cut:].tolist(),
            "logprobs": logprobs[cut:].tolist(),
            "env_mask": mask[cut:].tolist(),
            **row,
        }


def verl(stored: StoredRun, everything: bool = False) -> Rows:
    """Rows as verl's agent loop gives them; `uid` groups siblings."""
    for row in trl(stored, everything):
        renamed = {
            "prompts": row.pop("prompt_ids"),
            "responses": row.pop("completion_ids"),
            "response_mask": row.pop("env_mask"),
            "rollout_log_probs": row.pop("logprobs"),
            "uid": str(row["group_id"]),
        }
        yield {**renamed, **row}


def hf(stored: StoredRun, everything: bool = False) -> Rows:
    """Rows for `datasets.load_dataset`, with the conversation. Ids of the whole sequence; masks and
    logprobs as long as it.
    """
    conversations = _messages(stored)
    for row in _token_rows(stored, everything):
        arrays = {name: v.tolist() for name, v in row.items() if isinstance(v, np.ndarray)}
        yield {"messages": conversations.get(row["rollout_id"], []), **row, **arrays}


def chat(stored: StoredRun, everything: bool = False) -> Rows:
    """Conversations with their reward, one per rollout; no token."""
    conversations = _messages(stored)
    for row in _rollouts(stored, everything):
        yield {"messages": conversations.get(row["rollout_id"], []), **row}


def _rollouts(stored: StoredRun, everything: bool = False) -> Rows:
    columns = ["rollout_id", "group_id", "task_id", "data_source", "reward", "stop_reason", "valid"]
    rows = {row["rollout_id"]: row for row in stored.read("rollouts", columns).to_pylist()}
    for batch in sequences(stored, everything):
        for rollout_id in dict.fromkeys(batch.column("rollout_id").to_pylist()):
            yield rows[rollout_id]


def _messages(stored: StoredRun) -> Mapping[int, list[Json]]:
    conversations: dict[int, list[Json]] = {}
    rows = stored.read("messages").sort_by([("rollout_id", "ascending"), ("index", "ascending")])
    for row in rows.to_pylist():
        if row["role"] != "grader":
            conversations.setdefault(row["rollout_id"], []).append(_message(row))
    for conversation in conversations.values():
        name_calls(conversation)
    return conversations


def name_calls(conversation: list[Json]) -> None:
    """Give each call without an id one, `call-N`, and the messages that answer calls theirs.

    A policy that writes its calls as text names none; the tools' messages follow in their order.

    >>> messages = [{"role": "assistant", "tool_calls": [{"id": ""}, {"id": ""}]}, {"role": "tool"}]
    >>> name_calls(messages)
    >>> [call["id"] for call in messages[0]["tool_calls"]], messages[1]["tool_call_id"]
    (['call-0', 'call-1'], 'call-0')
    """
    num_calls, unanswered = 0, list[str]()
    for message in conversation:
        if message["role"] == "assistant":
            unanswered = []
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call-{num_calls}"
            unanswered.append(call["id"])
            num_calls += 1
        if message["role"] == "tool" and unanswered:
            answered = message.setdefault("tool_call_id", unanswered[0])
            if answered in unanswered:
                unanswered.remove(answered)


def _message(row: Mapping[str, Json]) -> Json:
    message = {"role": row["role"], "content": row["content"]}
    calls = [
        {
            "id": call.get("id", ""),
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": exact_json.dumps(call.get("arguments") or {}).decode(),
            },
        }
        for call in exact_json.loads(row["tool_calls"] or "[]")
    ]
    named = {
        "tool_calls": calls,
        "name": row["name"],
        "tool_call_id": row["call_id"],
        "reasoning_content": row["reasoning"],
    }
    return message | {name: value for name, value in named.items() if value}


def atif(stored: StoredRun, everything: bool = False) -> Rows:
    """Yields Harbor's Agent Trajectory Interchange Format, one per rollout, with all its ids."""
    conversations = _messages(stored)
    by_rollout: dict[int, list[tuple[int, dict[str, Json]]]] = {}
    abouts = {row["rollout_id"]: row for row in _rollouts(stored, everything)}
    for row in _token_rows(stored, everything):
        by_rollout.setdefault(row["rollout_id"], []).extend(_calls(row))
    for rollout_id, by_turn in by_rollout.items():
        calls = [call for _, call in sorted(by_turn, key=lambda turn_call: turn_call[0])]
        steps = _steps(conversations.get(rollout_id, []), iter(calls))
        yield {
            "schema_version": ATIF,
            "session_id": f"{stored.run_id}/{rollout_id}",
            "agent": {"name": "prorl", "version": str(stored.manifest.get("code_version", "0"))},
            "steps": steps,
            "final_metrics": {
                "total_completion_tokens": sum(len(c["completion_token_ids"]) for c in calls),
                "total_steps": len(steps),
            },
            "extra": abouts[rollout_id],
        }


def _calls(row: Mapping[str, Any]) -> Iterable[tuple[int, dict[str, Json]]]:
    """Turn and metrics of each call of a sequence; neighbouring spans of one turn are one call."""
    start, calls = 0, dict[int, dict[str, Json]]()
    for end, kind, turn in zip(row["span_end"], row["span_kind"], row["span_turn"], strict=True):
        if kind:
            empty = {"prompt_tokens": start, "prompt_token_ids": row["token_ids"][:start].tolist()}
            call = calls.setdefault(turn, {**empty, "completion_token_ids": [], "logprobs": []})
            call["completion_token_ids"] += row["token_ids"][start:end].tolist()
            call["logprobs"] += row["logprobs"][start:end].tolist()
            call["completion_tokens"] = len(call["completion_token_ids"])
        start = end
    return calls.items()


def _steps(messages: list[Json], calls: Iterator[dict[str, Json]]) -> list[Json]:
    steps: list[Json] = []
    for message in messages:
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            source = message.get("tool_call_id") or None
            results.append({"source_call_id": source, "content": message["content"]})
            continue
        agent = message["role"] == "assistant"
        source = "agent" if agent else "system" if message["role"] == "system" else "user"
        step = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
        if agent and (metrics := next(calls, None)) is not None:
            step["metrics"] = metrics
        if tools := message.get("tool_calls"):
            step["tool_calls"] = [_tool_call(call) for call in tools]
        if reasoning := message.get("reasoning_content"):
            step["reasoning_content"] = reasoning
        steps.append(step)
    for metrics in calls:  # of which no message is stored
        step = {"step_id": len(steps) + 1, "source": "agent", "message": "", "metrics": metrics}
        steps.append(step)
    return steps


def _tool_call(call: Mapping[str, Any]) -> Json:
    return {
        "tool_call_id": call["id"],
        "function_name": call["function"]["name"],
        "arguments": exact_json.loads(call["function"]["arguments"]),
    }


def _first(sampled: np.ndarray[Any, Any]) -> int:
    positions = np.flatnonzero(sampled)
    return int(positions[0]) if len(positions) else len(sampled)


FORMATS: Mapping[str, Callable[[StoredRun, bool], Rows]] = {
    "chat": chat,
    "verl": verl,
    "trl": trl,
    "atif": atif,
    "hf": hf,
}

LINES = ("chat", "atif")
"""Formats with a row per rollout, always JSON lines; others are Parquet unless called `.jsonl`."""
