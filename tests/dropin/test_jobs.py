"""Tests of the jobs of the drop-in servers without a service: a rollout that fails by us is
nobody's reward, and one that nobody waits for is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prorl.dropin.__main__ import app_of
from prorl.dropin.rollouts import FinishedRollout
from prorl.types import Json

ROW: dict[str, Json] = {
    **dict.fromkeys(("init_s", "run_s", "eval_s", "queue_s"), 0.0),
    "stop_reason": "done",
    "artifact": b"",
    "env": "math",
    "task_id": "t",
    "reward": 0.0,
    "valid": False,
    "failure_message": "the grader crashed",
    "failure_code": "grader_error",
}
INSTANCE = {"prompt": "?", "reward_model": {"ground_truth": "1"}, "data_source": "gsm8k"}
REQUESTS: dict[str, tuple[str, Json]] = {
    "prorl-agent": ("/process", {"instance": INSTANCE, "sampling_params": {}, "job_id": "j"}),
    "nemo-gym": (
        "/run",
        {"env": "math", "responses_create_params": {"input": [{"role": "user", "content": "?"}]}},
    ),
}


class Waiting:
    """In the place of a service: each rollout waits until a test says how it ends."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.answer: asyncio.Future[FinishedRollout] = asyncio.Future()

    async def complete(self, *_: object, **__: object) -> FinishedRollout:
        self.began.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def opened(name: str, rollouts: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    runner = app_of(name, rollouts)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with aiohttp.ClientSession() as http:
            if name == "prorl-agent":
                await http.post(f"{url}/start")
            yield http, url
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", REQUESTS)
async def test_what_failed_by_us_is_nobodys_reward(name: str) -> None:
    rollouts, (path, body) = Waiting(), REQUESTS[name]
    rollouts.answer.set_result(FinishedRollout(ROW, (), [], []))
    async with opened(name, rollouts) as (http, url), http.post(url + path, json=body) as reply:
        if name == "nemo-gym":
            assert (reply.status, "the grader crashed" in await reply.text()) == (503, True)
        else:
            reply_body = await reply.json()
            assert (reply_body["filter"], reply_body["error"]) == (True, "the grader crashed")


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_rollout_is_cancelled_with_whoever_waits_for_it(name: str) -> None:
    rollouts, (path, body) = Waiting(), REQUESTS[name]
    async with opened(name, rollouts) as (http, url):
        asking = asyncio.ensure_future(http.post(url + path, json=body))
        async with asyncio.timeout(60):
            await rollouts.began.wait()
            asking.cancel()
            await rollouts.cancelled.wait()
