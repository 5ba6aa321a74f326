"""The price of a simple rollout: one streamed call of 128 tokens, no tool, closed-form grading.

    .venv/bin/python configs/simple_rollouts.py ROLLOUTS IN_FLIGHT WORKERS

The model server is a stand-in that speaks vLLM's completions as a stream: sixteen tokens every
.128 s, as a small model on a GPU, whatever else it does. Prints as JSON: rollouts a second between
the first and the last tenth, CPU milliseconds a rollout of each process and of all (the stand-in's
are not in it), and how many rollouts a second the server would allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from aiohttp import web

from prorl.bench.meter import tree
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import UnavailableError
from prorl.linux import procfs
from prorl.supervisor.service import Supervisor
from prorl.types import Task

GROUP = 4
PIECE, NUM_PIECES, PIECE_S = 16, 8, 0.128
IDS = [65 + at % 20 for at in range(PIECE)]
PATIENCE_S = 900.0


# ---- the stand-in


def reply(body: dict, first: int, count: int, logprob: float, is_last: bool) -> bytes:
    """Returns a piece of a completion, from token `first` on, as vLLM writes it."""
    ids = [IDS[at % PIECE] for at in range(count)]
    logprobs = {"token_logprobs": [logprob] * count}
    reason = "length" if is_last else None
    choice = {"index": 0, "text": "x" * count, "token_ids": ids, "logprobs": logprobs}
    prompt = len(body["prompt"])
    usage = {"prompt_tokens": prompt, "completion_tokens": first + count}
    usage["total_tokens"] = prompt + first + count
    head = {"id": f"cmpl-{body.get('request_id', 'x')}", "model": body["model"], "created": 1}
    head |= {"object": "text_completion", "usage": usage}
    return json.dumps({**head, "choices": [{**choice, "finish_reason": reason}]}).encode()


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["max_tokens"] <= 1:  # the probe that tells raw logprobs from those of the temperature
        logprob = -0.001 if body.get("temperature", 1) < 1 else -1.0
        return web.Response(body=reply(body, 0, 1, logprob, True), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for at in range(NUM_PIECES):
        await asyncio.sleep(PIECE_S)
        piece = reply(body, at * PIECE, PIECE, -1.0, at == NUM_PIECES - 1)
        await response.write(b"data: " + piece + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def serve(port: int) -> None:
    models = {"data": [{"id": "policy", "object": "model", "max_model_len": 1 << 20}]}
    pages = {"/health": {}, "/v1/models": models, "/weight_info": {"weight_version": "default"}}
    app = web.Application(client_max_size=1 << 26)
    for path, page in pages.items():
        app.router.add_get(path, lambda _, page=page: asyncio.sleep(0, web.json_response(page)))
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


# ---- the measurement


async def measure(rollouts: int, in_flight: int, workers: int) -> None:
    port = 20000 + os.getpid() % 20000
    argv = [sys.executable, __file__, "serve", str(port)]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE) as server,
        tempfile.TemporaryDirectory(prefix="prorl-simple-", dir=Path.cwd()) as folder,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        values = {
            "root": Path(folder) / "root",
            "workers": workers,
            "backends": (f"http://127.0.0.1:{port}",),
            "init": {"slots": 64},
            "run": {"slots": -(-in_flight // max(workers, 1))},
            "eval": {"slots": 64},
        }
        async with Supervisor(ServiceConfig.model_validate(values)) as supervisor:
            figures = await asyncio.to_thread(
                run_all, client_of(supervisor), rollouts, in_flight, server.pid
            )
        print(json.dumps(figures | {"server_allows_per_s": in_flight / NUM_PIECES / PIECE_S}))


def run_all(client: Client, rollouts: int, in_flight: int, server: int) -> dict[str, object]:
    client.create_run(
        run_id="simple",
        max_open_groups=2 * in_flight // GROUP,
        sampling={"max_tokens": PIECE * NUM_PIECES},
        limits={"queue_s": PATIENCE_S, "max_turns": 1},
    )
    settings = {"answer": "7", "settings": {"tools": []}}
    tasks = [
        Task(task_id=f"sum/{number}", env="math", prompt=f"What is {number} + 7?", data=settings)
        for number in range(rollouts // GROUP)
    ]
    client.submit("simple", tasks, GROUP, key="simple", last=True)
    first, last = rollouts // 10, rollouts * 9 // 10
    began, before = wait_for(client, first), cpu_by_process(server)
    ended, after = wait_for(client, last), cpu_by_process(server)
    cpu_ms = {
        name: round((seconds - before[name]) / (last - first) * 1e3, 2)
        for name, seconds in after.items()
    }
    return {
        "rollouts_per_s": round((last - first) / (ended - began), 1),
        "cpu_ms_per_rollout": round(sum(cpu_ms.values()), 2),
        "cpu_ms_by_process": cpu_ms,
        "load": os.getloadavg()[0],
    }


def wait_for(client: Client, count: int) -> float:
    """Returns when so many rollouts have ended."""
    until = time.monotonic() + PATIENCE_S
    while (counts := client.run("simple")["counts"])["completed"] < count:
        if counts["failed"] or time.monotonic() > until:
            raise UnavailableError(f"{counts}: prorl show says why")
        time.sleep(0.1)
    return time.monotonic()


def cpu_by_process(server: int) -> Counter[str]:
    """Returns the CPU seconds of each kind of process below this one, but the model server's."""
    seconds = Counter[str]()
    for pid in set(tree(os.getpid())) - set(tree(server)):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = next((word for word in words if word.startswith("prorl.")), "this script")
        seconds[name] += procfs.cpu_s(pid)
    return seconds


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2])))
    else:
        asyncio.run(measure(*map(int, sys.argv[1:])))
