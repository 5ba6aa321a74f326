"""NeMo Gym's agent server: `POST /run` with a row, answered by the row, its response and reward.

A row has `responses_create_params` (input, temperature, top_p, max_output_tokens) and what it is
graded by, as NeMo Gym's JSON Lines; one with `env` and `data` beside them is a task of ours. The
last item of each model call has `prompt_token_ids`, `generation_token_ids` and
`generation_log_probs`. A connection that closes cancels; a failure of ours is a 503 and no reward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import fmean

from aiohttp import web

from prorl import exact_json
from prorl.dropin.rollouts import (
    FinishedRollout,
    RolloutRequests,
    answered,
    body_of,
    calls_of,
    logprobs_of,
    sampling_of,
    task_of,
)
from prorl.errors import UnavailableError, UserError
from prorl.tasks.formats import conversation
from prorl.types import Json, Task

TASK_INDEX = "_ng_task_index"


def routes(rollouts: RolloutRequests) -> list[web.RouteDef]:

    async def run(request: web.Request) -> web.Response:
        row = await body_of(
            request, {"responses_create_params": dict}, {"agent": str, "data": dict}
        )
        params = row["responses_create_params"]
        agent = row.get("agent") or "native"
        answer = await rollouts.complete(
            _task(row), agent=agent, sampling=sampling_of(params, "max_output_tokens")
        )
        if answer.failed:
            raise UnavailableError(answer.failed)
        body = {"response": response(params, answer), "reward": answer.row["reward"]}
        return answered({**row, **body})

    async def aggregate(request: web.Request) -> web.Response:
        responses = (await body_of(request, {"verify_responses": list}))["verify_responses"]
        tasks = defaultdict[int, list[float]](list)
        for place, response in enumerate(responses):
            index, reward = _index_and_reward(response, place)
            tasks[index].append(reward)
        groups = [{TASK_INDEX: key, "mean/reward": fmean(tasks[key])} for key in sorted(tasks)]
        rewards = [reward for group in tasks.values() for reward in group]
        mean = {"mean/reward": fmean(rewards)} if rewards else {}
        return answered({"group_level_metrics": groups, "agent_metrics": mean, "key_metrics": mean})

    return [web.post("/run", run), web.post("/aggregate_metrics", aggregate)]


def _index_and_reward(response: Json, place: int) -> tuple[int, float]:
    """Raises UserError."""
    response = response if isinstance(response, dict) else {}
    index, reward = response.get(TASK_INDEX, 0), response.get("reward")
    if not isinstance(index, int) or not isinstance(reward, int | float):
        raise UserError(
            f"verify_responses[{place}] with {TASK_INDEX} {index!r} and reward {reward!r}"[:300],
            "an integer and a number",
        )
    return index, reward


def _task(row: dict[str, Json]) -> Task:
    if "env" not in row:
        return task_of(row)
    return Task(
        task_id=str(row.get("task_id") or row.get("id") or "nemo_gym"),
        env=str(row["env"]),
        prompt=conversation(row["responses_create_params"].get("input")),
        data=row.get("data") or {},
        data_source="nemo_gym",
    )


def response(request: dict[str, Json], answer: FinishedRollout) -> dict[str, Json]:
    row, items = answer.row, list[dict[str, Json]]()
    name = f"{row['run_id']}_{row['rollout_id']}"
    if (sequence := answer.main) is not None:
        ids, logprobs = sequence.token_ids_L, logprobs_of(sequence)
        for i, (start, end, sampled, messages) in enumerate(answer.pieces(sequence)):
            if sampled or i:
                for message in messages:
                    items += _items(f"{name}_{len(items)}", message)
            if sampled:
                items = items or _items(name, {"role": "assistant", "content": ""})
                items[-1] |= {
                    "prompt_token_ids": ids[:start],
                    "generation_token_ids": ids[start:end],
                    "generation_log_probs": logprobs[start:end],
                }
    read = sum(turn["prompt_tokens"] for turn in answer.turns)
    wrote = sum(turn["completion_tokens"] for turn in answer.turns)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": time.time(),
        "model": str(request.get("model") or "policy"),
        "status": "completed",
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": wrote,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + wrote,
        },
    }


def _items(name: str, message: dict[str, Json]) -> list[dict[str, Json]]:
    text = message["content"]
    if message["role"] == "tool":
        call = message["call_id"] or f"call_{message['turn']}_0"
        return [{"type": "function_call_output", "call_id": call, "output": text}]
    if message["role"] != "assistant":
        return [{"type": "message", "role": message["role"], "content": text}]
    calls = calls_of(message) if message.get("tool_calls") else []
    items: list[dict[str, Json]] = [
        {
            "type": "function_call",
            "id": f"fc_{name}_{i}",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": exact_json.dumps(call["arguments"]).decode(),
            "status": "completed",
        }
        for i, call in enumerate(calls)
    ]
    if text or not items:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        head = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        items.insert(0, {**head, "status": "completed", "content": content})
    if thought := message.get("reasoning"):
        summary = [{"type": "summary_text", "text": thought}]
        items.insert(0, {"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    return items
