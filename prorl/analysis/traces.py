"""Rollouts of other frameworks, read into the rows that `foreign` knows; what they lack is absent.

Known are ATIF (Harbor and others), traces and results of verifiers, JSON lines of NeMo Gym,
documents of OpenEnv's capture, samples of slime's dumps, and any row with `messages`. A row that
none of these is passes as it is.

Ids are taken where each call has them with logprobs: a call that goes on from the ids of the one
before it belongs to the same sequence, another one begins a sequence. Of a call without logprobs
nothing is made up: then a rollout has its words, its reward and no sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from pickle import PickleError
from typing import Any, NamedTuple

import orjson

from prorl import exact_json
from prorl.analysis.foreign import Line, Row, has_ids
from prorl.errors import UserError
from prorl.types import Json


class Call(NamedTuple):
    """One model call: what was there before it, and what was sampled."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]


def rows_of(row: Row, number: int) -> list[Row]:
    """What a row of somebody holds: one row a sequence, or one without ids. `number`: its place."""
    if has_ids(row):
        return [row]
    for key, read in _READERS.items():
        if key in row:
            return [found for each in read(row) for found in _rows(each, number)]
    return [row]


def read_dump(path: Path) -> Iterator[Line]:
    """Samples of a dump that slime wrote with `--save-debug-rollout-data`. Raises UserError."""
    try:
        import torch
    except ImportError:
        raise UserError(f"{path} without torch", "torch", "pip install 'prorl[torch]'") from None
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        samples = held["samples"]
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, PickleError) as error:
        raise UserError(f"{path}: {str(error)[:200]}", "a dump of slime's samples") from None
    yield from (Line(f"{path}:{i}", {"slime": each}) for i, each in enumerate(samples, 1))


def _rows(read: dict[str, Json], number: int) -> Iterator[Row]:
    """A rollout that was read, as one row for each of its sequences."""
    sequences = read.pop("sequences", [])
    said = {name: value for name, value in read.items() if value is not None}
    said.setdefault("rollout", number)
    for segment, sequence in enumerate(sequences or [{}]):
        yield {"reward": None, **said, **sequence, "segment": segment}


def _chained(calls: Iterable[Call | None]) -> list[dict[str, Json]]:
    """Calls as sequences; none when one of the calls has no ids."""
    made: list[dict[str, Json]] = []
    for call in calls:
        if call is None or len(call.sampled) != len(call.logprobs):
            return []
        before = made[-1]["token_ids"] if made else []
        if not made or call.prompt[: len(before)] != before:
            made.append({"token_ids": [], "loss_mask": [], "logprobs": []})
            before = []
        context = call.prompt[len(before) :]
        made[-1]["token_ids"] += [*context, *call.sampled]
        made[-1]["loss_mask"] += [*[0] * len(context), *[1] * len(call.sampled)]
        made[-1]["logprobs"] += [*[0.0] * len(context), *call.logprobs]
    return made


def _call(held: Mapping[str, Any] | None, *names: str) -> Call | None:
    values: list[Any] = [(held or {}).get(name) for name in names]
    return Call(*values) if all(isinstance(value, list) for value in values) else None


def _atif(row: Row) -> Iterator[dict[str, Json]]:
    messages: list[Json] = []
    for step in row["steps"]:
        agent = step.get("source") == "agent"
        calls = [
            {
                "id": c.get("tool_call_id"),
                "name": c.get("function_name"),
                "arguments": c.get("arguments"),
            }
            for c in step.get("tool_calls") or []
        ]
        messages.append(
            {
                "role": "assistant" if agent else step.get("source", "user"),
                "content": step.get("message"),
                "reasoning_content": step.get("reasoning_content"),
                "tool_calls": calls,
            }
        )
        for result in (step.get("observation") or {}).get("results") or []:
            call_id = result.get("source_call_id")
            messages.append(
                {"role": "tool", "content": result.get("content"), "tool_call_id": call_id}
            )
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    agents = [step for step in row["steps"] if step.get("source") == "agent"]
    yield {
        "messages": messages,
        "task_id": row.get("session_id"),
        "agent": (row.get("agent") or {}).get("name"),
        "sequences": _chained(_call(step.get("metrics"), *names) for step in agents),
        **{k: v for k, v in (row.get("extra") or {}).items() if k in _KEPT},
    }


def _gym(row: Row) -> Iterator[dict[str, Json]]:
    asked = row["responses_create_params"].get("input") or []
    given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    items = (row.get("response") or {}).get("output") or []
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    yield {
        "messages": _items([*given, *items]),
        "uid": _text(row.get("_ng_task_index")),
        "task_id": _text(row.get("task_id", row.get("id", row.get("_ng_task_index")))),
        "reward": row.get("reward"),
        "sequences": _chained(_call(item, *names) for item in items if names[1] in item),
    }


def _items(items: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Items of the Responses API as messages: calls and reasoning belong to one answer."""
    made: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            told = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            made.append({"role": "tool", **told})
        elif kind == "message" and item.get("role") != "assistant":
            made.append({"role": item.get("role", "user"), "content": item.get("content")})
        else:
            if not made or made[-1]["role"] != "assistant" or made[-1]["content"]:
                made.append({"role": "assistant", "content": "", "tool_calls": []})
            if kind == "reasoning":
                made[-1]["reasoning_content"] = _plain(item.get("summary") or item.get("content"))
            elif kind == "function_call":
                made[-1]["tool_calls"].append({**item, "id": item.get("call_id")})
            else:
                made[-1]["content"] = _plain(item.get("content"))
    return made


def _verifiers(row: Row) -> Iterator[dict[str, Json]]:
    for trace in row["traces"]:
        nodes = trace.get("nodes") or []
        parents = {node.get("parent") for node in nodes}
        paths = [_path(nodes, leaf) for leaf in range(len(nodes)) if leaf not in parents]
        scores = [
            reward and reward["score"] * reward.get("weight", 1.0)
            for reward in (trace.get("rewards") or {}).values()
        ]
        task = trace.get("task") or {}
        yield {
            "messages": [node["message"] for node in (max(paths, key=len) if paths else [])],
            "uid": (row.get("group") or {}).get("id") or task.get("key") or task.get("hash"),
            "task_id": task.get("key") or task.get("hash"),
            "data_source": (row.get("env") or {}).get("id"),
            "reward": sum(scores) if scores and None not in scores else None,
            "stop_reason": trace.get("stop_condition"),
            "rollout": trace.get("id"),
            "sequences": _branches(paths),
        }


def _path(nodes: list[Json], leaf: int | None) -> list[Json]:
    found: list[Json] = []
    while leaf is not None:
        found.append(nodes[leaf])
        leaf = nodes[leaf].get("parent")
    return found[::-1]


def _branches(paths: list[list[Json]]) -> list[dict[str, Json]]:
    made = []
    for path in paths:
        ids = [token for node in path for token in node.get("token_ids") or []]
        mask = [int(one) for node in path for one in node.get("mask") or []]
        sampled = iter([value for node in path for value in node.get("logprobs") or []])
        logprobs = [next(sampled, None) if one else 0.0 for one in mask]
        if not ids or not any(mask) or None in logprobs or next(sampled, None) is not None:
            return []
        made.append({"token_ids": ids, "loss_mask": mask, "logprobs": logprobs})
    return made


def _results(row: Row) -> Iterator[dict[str, Json]]:
    asked, said = row["prompt"], row["completion"]
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    said = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    yield {
        "messages": [*asked, *said],
        "uid": _text(row.get("example_id")),
        "task_id": _text(row.get("example_id")),
        "data_source": _text(row.get("task")),
        "reward": row.get("reward"),
    }


def _openenv(row: Row) -> Iterator[dict[str, Json]]:
    turns = {turn["node_id"]: turn for turn in row.get("turns") or []}
    agents = [one for one in row["sequences"] if one.get("role") == "agent"]
    last = turns.get(max(agents, key=lambda one: one["n_turns"])["node_ids"][-1]) if agents else {}
    answer = (last or {}).get("response_message")
    about = row.get("metadata") or {}
    names = {"token_ids": "input_ids", "loss_mask": "loss_mask", "logprobs": "logprobs"}
    yield {
        "messages": [*((last or {}).get("request_messages") or []), *([answer] if answer else [])],
        "task_id": _text(about.get("task_id", row["session_id"])),
        "reward": about.get("reward"),
        "sequences": [
            {ours: one[theirs] for ours, theirs in names.items()}
            for one in agents
            if any(one["loss_mask"])
        ],
    }


def _slime(row: Row) -> Iterator[dict[str, Json]]:
    sample = row["slime"]
    prompt, length = sample.get("prompt") or "", int(sample.get("response_length") or 0)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    ids, logprobs = list(sample.get("tokens") or []), sample.get("rollout_log_probs")
    first = len(ids) - length
    whole = length and logprobs is not None and len(logprobs) == length
    mask = [0] * first + list(sample.get("loss_mask") or [1] * length)
    trained = zip(logprobs if whole else (), mask[first:], strict=False)
    padded = [0.0] * first + [logprob if one else 0.0 for logprob, one in trained]
    reward = sample.get("reward")
    yield {
        "messages": [*asked, {"role": "assistant", "content": sample.get("response") or ""}],
        "uid": _text(sample.get("group_index")),
        "task_id": _text(sample.get("group_index")),
        "reward": reward if isinstance(reward, int | float) else None,
        "stop_reason": _text(sample.get("status")),
        "sequences": [{"token_ids": ids, "loss_mask": mask, "logprobs": padded}] if whole else [],
    }


def _chat(row: Row) -> Iterator[dict[str, Json]]:
    held = {name: row.get(name) for name in _KEPT if name in row}
    task = row.get("task_id", row.get("episode_id"))
    yield {**held, "messages": row["messages"], "task_id": _text(task), "reward": row.get("reward")}


_READERS = {
    "steps": _atif,
    "responses_create_params": _gym,
    "traces": _verifiers,
    "slime": _slime,
    "capture_level": _openenv,
    "completion": _results,
    "messages": _chat,
}
"""By a key that those before it do not have."""

_KEPT = (
    *("rollout_id", "group_id", "sample_index", "attempt", "uid", "reward"),
    *("task_id", "data_source", "stop_reason"),
)


def message_rows(
    messages: Iterable[Mapping[str, Any]], rollout_id: int
) -> Iterator[dict[str, Json]]:
    """Rows of `messages` of one rollout from messages as chat has them."""
    turn = 0
    for index, message in enumerate(messages):
        calls = [_tool_call(call) for call in message.get("tool_calls") or []]
        yield {
            "rollout_id": rollout_id,
            "attempt": 1,
            "index": index,
            "role": str(message.get("role") or "user"),
            "content": _plain(message.get("content")),
            "tool_calls": exact_json.dumps(calls).decode() if calls else "",
            "name": str(message.get("name") or ""),
            "turn": turn,
            "reasoning": _plain(message.get("reasoning_content")),
            "call_id": str(message.get("tool_call_id") or ""),
        }
        turn += message.get("role") == "assistant"


def _tool_call(call: Mapping[str, Any]) -> dict[str, Json]:
    about = call.get("function") or call
    given = about.get("arguments")
    try:
        given = exact_json.loads(given) if isinstance(given, str) else given or {}
    except orjson.JSONDecodeError:
        given = {"": given}
    if not isinstance(given, dict):
        given = {"": given}
    return {
        "id": str(call.get("id") or ""),
        "name": str(about.get("name") or ""),
        "arguments": given,
    }


def _plain(content: Any) -> str:
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else "" if content is None else _text(content) or ""


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value, default=str).decode()
