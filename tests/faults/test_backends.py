"""Model servers are killed and frozen in the middle of rollouts of several turns: nothing fails,
nothing is charged, and every stored token is what a server said on the wire.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from prorl.cli.progress import Show, follow
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread, service, signals
from prorl.linux.procfs import descendants
from prorl.storage.catalog import StoredRun
from prorl.types import Json, Task
from tests.faults.model_server import TURNS, says
from tests.integration.checks import check_complete, check_nothing_left, rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


class ModelServer:
    """A child, on a port that it keeps over its lives."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tap = folder / f"{name}.tap"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        argv = [sys.executable, "-m", "tests.faults.model_server", str(self.port), str(self.tap)]
        root = Path(__file__).parents[2]
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, cwd=root
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    def strike(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._process is not None:
            await self._process.wait()

    def calls(self) -> dict[str, list[dict[str, Any]]]:
        """What the wire had, by the call's name; a call that was cut may stand here twice."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.tap.read_bytes().splitlines() if self.tap.exists() else ():
            said = orjson.loads(line)
            if "prompt" in said:
                found.setdefault(said["call"], []).append({"prompt": said["prompt"], "ids": []})
            else:
                found[said["call"]][-1]["ids"] += said["ids"]
        return found


@asynccontextmanager
async def servers(folder: Path, count: int) -> AsyncIterator[list[ModelServer]]:
    async with AsyncExitStack() as stack:
        made = [ModelServer(folder, f"server-{i}") for i in range(count)]
        for one in made:
            stack.push_async_callback(one.end)
            await one.start()
        yield made


def config(root: Path, sandbox_kind: str, pool: Sequence[ModelServer]) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "root": root,
            "backends": tuple(one.url for one in pool),
            "sandbox": {"kind": sandbox_kind},
            "run": {"slots": 32},
        }
    )


async def submit(client: Client, count: int) -> None:
    await in_thread(lambda: client.create_run(run_id="r", limits={"run_s": 30}))
    tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"Find it, {i}.") for i in range(count)]
    await in_thread(lambda: client.submit("r", tasks, 1, key="w", last=True))


async def until_out(client: Client, url: str, limit_s: float) -> float:
    """Seconds until the gateway gives it nothing."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        status = await in_thread(client.status)
        (one,) = [one for one in status["backends"] if one["name"] == url]
        if one["state"] == "ejected":
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise AssertionError(f"{url} is {one['state']} after {limit_s} s")


async def until_tokens(pool: Sequence[ModelServer], calls: int) -> None:
    """All are in the middle of work."""
    async with asyncio.timeout(60):
        while any(len(one.calls()) < calls for one in pool):
            await asyncio.sleep(0.1)


def check_exact(stored: StoredRun, pool: Sequence[ModelServer]) -> int:
    """Each stored sequence is its prompts and, after each, what a server said then; how many calls
    had to be continued elsewhere.
    """
    said: dict[int, list[dict[str, Any]]] = {}
    for one in pool:
        for name, calls in one.calls().items():
            if name.startswith("r/"):
                said.setdefault(int(name.split("/")[1]), []).extend(calls)
    continued = 0
    for row in rows(
        stored, "select rollout_id, token_ids, logprobs, span_end, span_kind from sequences"
    ):
        ids, calls = row["token_ids"], said[row["rollout_id"]]
        kinds = np.repeat(row["span_kind"], np.diff([0, *row["span_end"]]))
        borders = sorted({len(call["prompt"]) for call in calls})
        assert all(ids[: len(call["prompt"])] == call["prompt"] for call in calls)
        sampled = np.flatnonzero(kinds)
        told = np.full(len(ids), -1)
        for call in calls:
            start = len(call["prompt"])
            end = min(start + len(call["ids"]), len(ids))
            same = [a == b for a, b in zip(ids[start:end], call["ids"], strict=False)]
            kept = same.index(False) if False in same else len(same)
            told[start : start + kept] = ids[start : start + kept]
        assert (told[sampled] == np.array(ids)[sampled]).all(), "a token that nobody said"
        expected = (-1e-3 * (1 + np.array(ids)[sampled])).astype(np.float32)
        np.testing.assert_array_equal(np.array(row["logprobs"], np.float32), expected)
        assert ids[sampled[-1] + 1 - len(says(TURNS - 1)) :] == says(TURNS - 1).tolist()
        continued += len(borders) - TURNS
    return continued


def check_nothing_charged(stored: StoredRun, count: int) -> None:
    found: Json = rows(
        stored,
        "select status, failure_code, attempt, num_turns, count(*) as n from rollouts group by all",
    )
    assert found == [
        {"status": "completed", "failure_code": "", "attempt": 1, "num_turns": TURNS, "n": count}
    ]


async def test_one_killed_and_one_frozen_of_four_cost_nothing(
    tmp_path: Path, sandbox_kind: str
) -> None:
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    async with servers(tmp_path, 4) as pool:
        async with (
            signals() as stop,
            service(config(root, sandbox_kind, pool), stop) as running,
        ):
            client = client_of(running)
            await submit(client, 64)
            finished = asyncio.ensure_future(follow(client, running, "r", 64, Show.NOTHING))
            await until_tokens(pool, 4)
            pool[0].strike(signal.SIGKILL)
            dead_s = await until_out(client, pool[0].url, 5)
            pool[1].strike(signal.SIGSTOP)
            frozen_s = await until_out(client, pool[1].url, 10)
            await asyncio.wait_for(finished, 120)
            pool[1].strike(signal.SIGCONT)
        stored = check_complete(root / "r", 64)
        check_nothing_charged(stored, 64)
        continued = check_exact(stored, pool)
        print(
            f"dead out after {dead_s:.2f} s, frozen after {frozen_s:.2f} s, {continued} continued"
        )
        assert continued > 0
    check_nothing_left(root, before)


async def test_a_sole_server_that_is_away_keeps_everybody_waiting_and_nobody_fails(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    async with servers(tmp_path, 1) as pool:
        async with (
            signals() as stop,
            service(config(root, sandbox_kind, pool), stop) as running,
        ):
            client = client_of(running)
            await submit(client, 200)
            finished = asyncio.ensure_future(follow(client, running, "r", 200, Show.NOTHING))
            await until_tokens(pool, 8)
            await pool[0].end()
            await until_out(client, pool[0].url, 5)
            await asyncio.sleep(10)  # longer than all retries took that once failed them
            counts = (await in_thread(client.run, "r"))["counts"]
            assert counts["failed"] == 0
            assert counts["queued"] > 100
            await pool[0].start()
            await asyncio.wait_for(finished, 150)
        stored = check_complete(root / "r", 200)
        check_nothing_charged(stored, 200)
        check_exact(stored, pool)
