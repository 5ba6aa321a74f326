"""Polar (NVIDIA, arXiv 2605.24220): tasks are submitted, then polled or called back.

    POST /rollout/task/submit TaskRequest -> {task_id, status}     409 while that task runs
    GET, DELETE /rollout/task/{id} -> TaskStatus     callback_url gets the TaskResult
    GET /tasks, /rollout/status, /health     GET /events: server-sent events

The task is `metadata.task` (a row of any format that `prorl run --tasks` reads), or the `instance`
of the evaluator `swebench_harness`; `instruction` is its prompt and `runtime.image` its image.
`agent.harness` names a program of docs/agents.md, or `native`. A trace is a sequence: a rollout
that forked has several, whose weights sum to one (`metadata.weight`). Results are read from the
store when they are asked for; a failure of ours is an ERROR, which trainers mask, and the policy's
own is COMPLETED with its reward.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from prorl.dropin.rollouts import (
    Answer,
    Asked,
    Rollouts,
    answered,
    body_of,
    logprobs_of,
    mask_of,
    sampling_of,
    task_of,
)
from prorl.errors import ConflictError, TaskError
from prorl.types import DOCKER, Json, Sequence, Task

CALLBACK_S, CALLBACKS = 10.0, 3
BEAT_S = 15.0
"""Between two signs of life of a stream of events."""
MAX_EVENTS = 1000
"""That a listener may lag behind; then it loses the oldest."""
MAX_ENDED = 4096
"""Tasks that have ended and can still be asked for."""


@dataclass(slots=True)
class _Job:
    request: dict[str, Json]
    asked: Asked
    status: str = "running"
    ended: dict[int, bool] = field(default_factory=dict)
    """Members that are stored, and whether their rewards count."""
    work: asyncio.Task[None] | None = None


def routes(rollouts: Rollouts) -> list[web.RouteDef]:
    jobs: dict[str, _Job] = {}
    early = set[str]()
    """Cancelled by who could not know that the submission was still on its way."""
    listeners = set[asyncio.Queue[bytes]]()

    def tell(event: str, **what: Json) -> None:
        for listener in listeners:
            if listener.full():
                listener.get_nowait()
            listener.put_nowait(b"event: %s\ndata: %s\n\n" % (event.encode(), orjson.dumps(what)))

    async def submit(request: web.Request) -> web.Response:
        body = await body_of(request, "task_id", "instruction", "agent")
        name, agent = str(body["task_id"]), body["agent"]
        if name in jobs and jobs[name].status == "running":
            raise ConflictError(f"task {name} is already running")
        if name in early:
            raise ConflictError(f"task {name} was cancelled before it was submitted")
        settings = agent.get("settings") or {}
        timeout_s = (body.get("metadata") or {}).get("agent_timeout") or body.get("timeout_seconds")
        limits = {"run_s": timeout_s or 600.0, "max_turns": settings.get("step_limit")}
        asked = await rollouts.ask(
            _task(body),
            int(body.get("num_samples") or 1),
            agent=str(agent["harness"]).replace("_", "-"),
            limits={key: value for key, value in limits.items() if value},
            sampling=sampling_of(settings.get("model_kwargs") or {}, "max_tokens"),
        )
        ended = [known for known, job in jobs.items() if job.status != "running"]
        for known in ended[: max(0, len(ended) - MAX_ENDED)]:
            del jobs[known]
        job = jobs[name] = _Job(body, asked)
        job.work = asyncio.ensure_future(follow(name, job))
        tell("task.created", task_id=name, status="running", num_samples=len(asked.rollouts))
        return answered({"task_id": name, "status": "running"})

    async def follow(name: str, job: _Job) -> None:
        enough = job.request.get("early_stop_min_usable_sessions") or len(job.asked.rollouts)

        async def member(index: int) -> None:
            answer = await rollouts.answer(job.asked, index)
            job.ended[index] = not answer.failed
            shown = {"task_id": name, "session_id": _session(job, index)}
            tell("session.state_changed", **shown, status=_status(answer))
            tell("task.updated", task_id=name, completed_sessions=len(job.ended))
            if sum(job.ended.values()) == enough < len(job.asked.rollouts):
                await rollouts.cancel(job.asked)

        await asyncio.gather(*map(member, range(len(job.asked.rollouts))))
        if job.status == "running":
            job.status = "completed"
        tell("task.completed", task_id=name, status=job.status)
        if (url := job.request.get("callback_url")) and job.status == "completed":
            await _call_back(url, await view(name, job))

    async def view(name: str, job: _Job) -> dict[str, Json]:
        done = job.status == "completed"
        members = range(len(job.asked.rollouts) if done else 0)
        answers = [await rollouts.answer(job.asked, index) for index in members]
        return {
            "task_id": name,
            "status": job.status,
            "total_sessions": len(job.asked.rollouts),
            "completed_sessions": len(job.ended),
            "results": [_result(name, job, i, answer) for i, answer in enumerate(answers)],
            "result_paths": [],
        }

    async def get(request: web.Request) -> web.Response:
        if (name := request.match_info["task"]) not in jobs:
            raise web.HTTPNotFound(text="Task not found")
        return answered(await view(name, jobs[name]))

    async def cancel(request: web.Request) -> web.Response:
        name = request.match_info["task"]
        if name not in jobs and request.query.get("register_if_missing") == "true":
            early.add(name)
            none = {"total_sessions": 0, "completed_sessions": 0, "results": []}
            return answered({"task_id": name, "status": "cancelled", **none})
        if name not in jobs:
            raise web.HTTPNotFound(text="Task not found")
        job = jobs[name]
        if job.status == "running":
            job.status = "cancelled"
            await rollouts.cancel(job.asked)
        return answered(await view(name, job))

    async def tasks(_: web.Request) -> web.Response:
        shown = [
            {
                "task_id": name,
                "status": job.status,
                "harness": job.request["agent"]["harness"],
                "total_sessions": len(job.asked.rollouts),
                "completed_sessions": len(job.ended),
            }
            for name, job in reversed(jobs.items())
        ]
        return answered({"tasks": shown[:1000]})

    async def health(_: web.Request) -> web.Response:
        running = sum(job.status == "running" for job in jobs.values())
        return answered({"status": "ok", "nodes": 1, "running_tasks": running})

    async def events(request: web.Request) -> web.StreamResponse:
        heads = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        response, mine = web.StreamResponse(headers=heads), asyncio.Queue[bytes](MAX_EVENTS)
        listeners.add(mine)
        try:
            await response.prepare(request)
            while True:  # until the connection closes, which cancels us
                event = b": alive\n\n"
                with contextlib.suppress(TimeoutError):
                    event = await asyncio.wait_for(mine.get(), BEAT_S)
                await response.write(event)
        finally:
            listeners.discard(mine)

    return [
        web.post("/rollout/task/submit", submit),
        web.get("/rollout/task/{task}", get),
        web.delete("/rollout/task/{task}", cancel),
        web.get("/tasks", tasks),
        web.get("/rollout/status", health),
        web.get("/health", health),
        web.get("/events", events),
    ]


def _task(body: dict[str, Json]) -> Task:
    """What is to be done, and how it is judged. Raises TaskError."""
    evaluator = body.get("evaluator") or {}
    config = evaluator.get("config") or {}
    if row := (body.get("metadata") or {}).get("task"):
        task = task_of(row)
    elif evaluator.get("strategy") == "swebench_harness" and config.get("instance"):
        task = task_of(config["instance"])
    else:
        raise TaskError(
            f"evaluator {str(evaluator.get('strategy'))[:100]!r} without a task",
            "metadata.task, a row as `prorl run --tasks` reads it",
            "or the evaluator swebench_harness (instance)",
        )
    data = dict(task.data)
    if image := (body.get("runtime") or {}).get("image"):
        data["image"] = image if image[0] == "/" or image.startswith(DOCKER) else DOCKER + image
    return replace(task, prompt=str(body["instruction"]), data=data)


def _session(job: _Job, index: int) -> str:
    return f"{job.asked.run}/{job.asked.rollouts[index]}"


def _status(answer: Answer) -> str:
    return "ERROR" if answer.failed else "COMPLETED"


def _result(name: str, job: _Job, index: int, answer: Answer) -> dict[str, Json]:
    row, error = answer.row, answer.failed or None
    stages = {f"{stage}_ms": 1000 * row[f"{stage}_s"] for stage in ("init", "run", "eval")}
    about = {key: row[key] for key in ("stop_reason", "failure_code", "num_turns", "attempt")}
    return {
        "session_id": _session(job, index),
        "task_id": name,
        "status": _status(answer),
        "trajectory": {
            "status": _status(answer),
            "metadata": about | {"record_count": row["num_turns"]},
            "traces": [_trace(answer, one) for one in answer.sequences if len(one.logprobs_C)],
            "error": error,
        },
        # their model forbids keys that it does not know
        "timing": stages
        | {"e2e_ms": sum(stages.values()), "ready_queue_ms": 1000 * row["queue_s"]},
        "node_id": "prorl",
        "error": error,
        "metadata": job.request.get("metadata") or {},
    }


def _trace(answer: Answer, sequence: Sequence) -> dict[str, Json]:
    pieces, ids = answer.pieces(sequence), sequence.token_ids_L
    first = next((piece.start for piece in pieces if piece.sampled), len(ids))
    last = pieces[-1].end if pieces else len(ids)
    said = [
        {"role": message["role"], "content": message["content"]}
        for message in answer.said_in(sequence)
    ]
    asked = next((i for i, one in enumerate(said) if one["role"] == "assistant"), len(said))
    turns = [turn for turn in answer.turns if turn["segment"] == sequence.segment]
    about: dict[str, Any] = {"lineage": sequence.lineage, "weight": sequence.weight}
    return {
        "prompt_ids": ids[:first],
        "response_ids": ids[first:last],
        "loss_mask": mask_of(sequence)[first:last],
        "response_logprobs": logprobs_of(sequence)[first:last],
        "prompt_messages": said[:asked],
        "response_messages": said[asked:],
        "tools": None,
        "finish_reason": turns[-1]["finish_reason"] if turns else None,
        "reward": answer.row["reward"],
        "metadata": about | {"policy_version": answer.row["min_version"]},
    }


async def _call_back(url: str, result: dict[str, Json]) -> None:
    """Say it; a trainer that cannot be reached polls."""
    told = answered({key: value for key, value in result.items() if "sessions" not in key})
    async with ClientSession(timeout=ClientTimeout(CALLBACK_S)) as session:
        for _ in range(CALLBACKS):
            with contextlib.suppress(ClientError, TimeoutError):
                heads = {"content-type": "application/json"}
                async with session.post(url, data=told.body, headers=heads) as said:
                    if said.status < 500:
                        return
            await asyncio.sleep(1.0)
