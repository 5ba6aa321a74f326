"""ProRL Agent (NVIDIA, arXiv 2603.18815): one blocking request a trajectory.

    POST /start, /stop, /clear_llm_server     GET /status
    POST /add_llm_server {address}
    POST /process {instance, sampling_params, job_id?} -> messages with ids and logprobs, score
    POST /cancel {job_id}

`instance` is a row of any format that `prorl run --tasks` reads. A connection that closes cancels
its rollout, as `/cancel` does: one of its trainers knows no other way. What the policy did wrong is
`resolved: false`; what we did wrong has no messages, so that clients ask again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from prorl.dropin.rollouts import (
    Answer,
    Rollouts,
    answered,
    body_of,
    calls_of,
    logprobs_of,
    sampling_of,
    task_of,
)
from prorl.errors import NotFoundError
from prorl.types import Json


def routes(rollouts: Rollouts) -> list[web.RouteDef]:
    jobs: dict[str, set[asyncio.Future[Answer]]] = {}
    servers = list[str]()
    running = False

    def must_run() -> None:
        if not running:
            text = "Server is not running. Please start the server first."
            raise web.HTTPServiceUnavailable(text=text)

    async def start(_: web.Request) -> web.Response:
        nonlocal running
        if running:
            raise web.HTTPBadRequest(text="Server is already running")
        running = True
        return answered({"status": "Server started successfully"})

    async def stop(_: web.Request) -> web.Response:
        nonlocal running
        must_run()
        running = False
        for job in (job for several in jobs.values() for job in several):
            job.cancel()
        return answered({"status": "Server stopped successfully"})

    async def status(_: web.Request) -> web.Response:
        must_run()
        pending = sum(map(len, jobs.values()))
        return answered({"status": "running", "pending_jobs": pending, "total": pending})

    async def add(request: web.Request) -> web.Response:
        address = str((await body_of(request, "address"))["address"])
        url = address.rstrip("/").removesuffix("/v1")
        await asyncio.to_thread(rollouts.client.add_backend, url)
        if url not in servers:
            servers.append(url)
        said = "Added" if running else "Buffered"
        return answered({"status": f"{said} LLM server address: {address}"})

    async def clear(_: web.Request) -> web.Response:
        while servers:
            try:
                await asyncio.to_thread(rollouts.client.remove_backend, servers[-1])
            except NotFoundError:
                pass  # somebody else took it out
            servers.pop()
        said = "all" if running else "buffered"
        return answered({"status": f"Cleared {said} LLM server addresses"})

    async def process(request: web.Request) -> web.Response:
        must_run()
        body = await body_of(request, "instance", "sampling_params")
        instance, params = body["instance"], body["sampling_params"]
        limits = {
            "max_turns": params.get("max_iterations"),
            "max_tokens": params.get("max_model_len"),
        }
        job = asyncio.ensure_future(
            rollouts.one(
                task_of({key: instance[key] for key in instance if key != "trajectory_id"}),
                limits={key: value for key, value in limits.items() if value},
                sampling=sampling_of(params, "max_output_tokens"),
            )
        )
        same = jobs.setdefault(str(body.get("job_id") or id(job)), set())
        same.add(job)
        try:
            await asyncio.wait({job})
            if job.cancelled():
                return answered({"error": "Job was cancelled"})
            return answered(result(instance, job.result()))
        finally:  # also of a connection that was closed
            job.cancel()
            same.discard(job)
            for name in [name for name, several in jobs.items() if not several]:
                del jobs[name]

    async def cancel(request: web.Request) -> web.Response:
        must_run()
        name = str((await body_of(request, "job_id"))["job_id"])
        for job in jobs.get(name, ()):
            job.cancel()
        return answered({"status": f"Cancel requested for job {name}"})

    return [
        web.post("/start", start),
        web.post("/stop", stop),
        web.get("/status", status),
        web.post("/add_llm_server", add),
        web.post("/clear_llm_server", clear),
        web.post("/process", process),
        web.post("/cancel", cancel),
    ]


def result(instance: dict[str, Json], answer: Answer) -> dict[str, Json]:
    row = answer.row
    done = row["stop_reason"] == "done"
    artefact = bytes(row["artefact"]).decode(errors="replace")
    spent = {f"{stage}_time": row[f"{stage}_s"] for stage in ("init", "run", "eval")}
    return {
        "instance_id": instance.get("instance_id", row["task_id"]),
        "trajectory_id": instance.get("trajectory_id", 0),
        "git_patch": artefact if row["env"] == "swe" else "",
        "success": not answer.failed,
        "error": answer.failed or None,
        "finish": done,
        "messages": [] if answer.failed else messages(answer),
        "tools": [],
        "end_properly": done,
        "resolved": (row["reward"] or 0.0) >= 1.0,
        "score": row["reward"] or 0.0,
        "critical_error": "run" if answer.failed else None,
        "filter": bool(answer.failed),
        "timing": {
            **spent,
            "others_time": row["queue_s"],
            "counted_elapsed": sum(spent.values()),
            "timeout_triggered": row["stop_reason"] == "deadline",
        },
    }


def messages(answer: Answer) -> list[dict[str, Json]]:
    """The main sequence as messages whose `token_ids` are the sequence, in order.

    Where the template's tokens belong to several messages, the first of them has all.
    """
    if (sequence := answer.main) is None:
        return []
    ids, logprobs, told = sequence.token_ids_L, logprobs_of(sequence), list[dict[str, Any]]()
    for start, end, sampled, said in answer.pieces(sequence):
        first = len(told)
        for message in said or [{"role": "assistant" if sampled else "user", "content": ""}]:
            calls = calls_of(message) if message.get("tool_calls") else []
            told.append(
                {
                    "role": message["role"],
                    "content": message["content"],
                    "tool_calls": [{k: call[k] for k in ("name", "arguments")} for call in calls],
                    "token_ids": [],
                    "logprobs": None,
                }
            )
        told[first]["token_ids"] = ids[start:end]
        if sampled:
            told[first] |= {"input_ids": ids[:start], "logprobs": logprobs[start:end]}
    return told
