"""ProRL Agent (NVIDIA, arXiv 2603.18815): one blocking request a trajectory.

    POST /start, /stop, /clear_llm_server     GET /status
    POST /add_llm_server {address}
    POST /process {instance, sampling_params, job_id?} -> messages with ids and logprobs, score
    POST /cancel {job_id}

`instance` is a row of any format that `prorl run --tasks` reads. A connection that closes cancels
its rollout, as `/cancel` does: one of its trainers knows no other way. What the policy did wrong is
`resolved: false`; what we did wrong has no messages, so that clients ask again.

A `job_id` is an idempotency key while its job runs: the same request with the same `job_id` gets
the answer of the job that runs, and the job is cancelled when the last of its connections closes.
Another request with that `job_id` is a job of its own (repeats of an instance differ in their
`trajectory_id` alone). A job that has ended or was cancelled is forgotten.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson
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
from prorl.errors import NotFoundError
from prorl.types import Json


@dataclass(slots=True)
class _RolloutJob:
    work: asyncio.Future[FinishedRollout]
    connections: int = 0
    """Requests that wait for it."""


def routes(rollouts: RolloutRequests) -> list[web.RouteDef]:
    jobs: dict[tuple[str, bytes], _RolloutJob] = {}
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
        end(list(jobs))
        return answered({"status": "Server stopped successfully"})

    async def status(_: web.Request) -> web.Response:
        must_run()
        pending = len(jobs)
        return answered({"status": "running", "pending_jobs": pending, "total": pending})

    async def add(request: web.Request) -> web.Response:
        address = (await body_of(request, {"address": str}))["address"]
        url = address.rstrip("/").removesuffix("/v1")
        await asyncio.to_thread(rollouts.client.add_backend, url)
        if url not in servers:
            servers.append(url)
        verb = "Added" if running else "Buffered"
        return answered({"status": f"{verb} LLM server address: {address}"})

    async def clear(_: web.Request) -> web.Response:
        while servers:
            try:
                await asyncio.to_thread(rollouts.client.remove_backend, servers[-1])
            except NotFoundError:
                pass  # somebody else took it out
            servers.pop()
        scope = "all" if running else "buffered"
        return answered({"status": f"Cleared {scope} LLM server addresses"})

    async def process(request: web.Request) -> web.Response:
        must_run()
        body = await body_of(request, {"instance": dict, "sampling_params": dict}, {"job_id": str})
        must_run()  # it may have been stopped while the body came
        name = body.get("job_id") or uuid.uuid4().hex
        key = name, blake2b(exact_json.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()
        if key not in jobs:  # no `await` between the question and the reservation
            jobs[key] = _RolloutJob(begin(body["instance"], body["sampling_params"]))
        job = jobs[key]
        job.connections += 1
        try:
            await asyncio.wait({job.work})
            if job.work.cancelled():
                return answered({"error": "Job was cancelled"})
            return answered(result(body["instance"], job.work.result()))
        finally:  # also of a connection that was closed
            job.connections -= 1
            if jobs.get(key) is job and (job.work.done() or not job.connections):
                end([key])

    def begin(
        instance: dict[str, Json], params: dict[str, Json]
    ) -> asyncio.Future[FinishedRollout]:
        limits = {
            "max_turns": params.get("max_iterations"),
            "max_tokens": params.get("max_model_len"),
        }
        return asyncio.ensure_future(
            rollouts.complete(
                task_of({key: instance[key] for key in instance if key != "trajectory_id"}),
                limits={key: value for key, value in limits.items() if value},
                sampling=sampling_of(params, "max_output_tokens"),
            )
        )

    def end(keys: list[tuple[str, bytes]]) -> None:
        for key in keys:
            jobs.pop(key).work.cancel()

    async def cancel(request: web.Request) -> web.Response:
        must_run()
        name = (await body_of(request, {"job_id": str}))["job_id"]
        end([key for key in jobs if key[0] == name])
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


def result(instance: dict[str, Json], answer: FinishedRollout) -> dict[str, Json]:
    row = answer.row
    done = row["stop_reason"] == "done"
    artifact = bytes(row["artifact"]).decode(errors="replace")
    spent = {f"{stage}_time": row[f"{stage}_s"] for stage in ("init", "run", "eval")}
    return {
        "instance_id": instance.get("instance_id", row["task_id"]),
        "trajectory_id": instance.get("trajectory_id", 0),
        "git_patch": artifact if row["env"] == "swe" else "",
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


def messages(answer: FinishedRollout) -> list[dict[str, Json]]:
    """Returns the main sequence as messages whose `token_ids` are the sequence, in order.

    Where the template's tokens belong to several messages, the first of them has all.
    """
    if (sequence := answer.main) is None:
        return []
    ids, logprobs, entries = sequence.token_ids_L, logprobs_of(sequence), list[dict[str, Any]]()
    for start, end, sampled, turn_messages in answer.pieces(sequence):
        first = len(entries)
        for message in turn_messages or [
            {"role": "assistant" if sampled else "user", "content": ""}
        ]:
            calls = calls_of(message) if message.get("tool_calls") else []
            entries.append(
                {
                    "role": message["role"],
                    "content": message["content"],
                    "tool_calls": [{k: call[k] for k in ("name", "arguments")} for call in calls],
                    "token_ids": [],
                    "logprobs": None,
                }
            )
        entries[first]["token_ids"] = ids[start:end]
        if sampled:
            entries[first] |= {"input_ids": ids[:start], "logprobs": logprobs[start:end]}
    return entries
