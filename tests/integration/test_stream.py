"""A trainer on the live run and on the replay of its copied directory: equal values, equal order,
cursors that resume in both.

Also a trainer that stops reading: the pipeline pauses, and goes on when the trainer does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

import prorl
from prorl.cli.summary import lines, summarise
from prorl.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import Stop, client_of, service
from prorl.schema.rows import row_hashes
from prorl.types import Json, Task
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.services import settings

GROUPS, N = 12, 2


@pytest.fixture
def config(tmp_path: Path, workers: int, sandbox_kind: str) -> ServiceConfig:
    """A service whose policy says random things."""
    return settings(tmp_path / "root", sandbox_kind, "scripted:random", workers=workers)


def _tasks(count: int = GROUPS) -> list[Task]:
    return [
        Task(task_id=str(i), env="noop", prompt=f"say something about {i}") for i in range(count)
    ]


def read(
    client: Client, cursor: str | None = None, groups: int | None = None
) -> tuple[list[str], list[str]]:
    """Hashes of the rows in order, and the cursor after each batch; commits nothing."""
    hashes, cursors = [], []
    for batch in islice(client.stream("r", cursor=cursor, groups_per_batch=1), groups):
        hashes += row_hashes(batch.arrow)
        cursors.append(batch.cursor)
    return hashes, cursors


@contextmanager
def replay(directory: Path) -> Iterator[Client]:
    argv = [sys.executable, "-m", "prorl.cli", "replay", str(directory), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        try:
            with prorl.connect(endpoint["location"], endpoint["token"]) as client:
                yield client
        finally:
            process.terminate()
            assert process.wait(30) == 0


@SLOW_IN_A_SINGLE_PROCESS
async def test_replay_of_a_copy_equals_the_live_stream(
    tmp_path: Path, config: ServiceConfig
) -> None:
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(client.create_run, run_id="r", delivery="stream")
        await asyncio.to_thread(client.submit, "r", _tasks(), N, key="k", last=True)
        live, cursors = await asyncio.to_thread(read, client)
        middle = cursors[GROUPS // 2]
        resumed, _ = await asyncio.to_thread(read, client, middle)
        await asyncio.to_thread(client.commit, cursors[-1])
        client.close()
    assert len(live) == GROUPS * N
    assert len(set(live)) == GROUPS * N
    assert resumed == live[(GROUPS // 2 + 1) * N :]
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "root" / "r", copy)
    with replay(copy) as replayed:
        assert await asyncio.to_thread(read, replayed) == (live, cursors)
        assert (await asyncio.to_thread(read, replayed, middle))[0] == resumed


async def test_a_trainer_that_stops_reading_pauses_the_pipeline_and_it_goes_on(
    config: ServiceConfig,
) -> None:
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(
            client.create_run,
            run_id="r",
            delivery="stream",
            max_open_groups=4,
            max_uncommitted_groups=4,
        )
        await asyncio.to_thread(client.submit, "r", _tasks(), N, key="k", last=True)
        await _settled(client, completed=4 * N)
        await asyncio.sleep(1.0)
        assert (await asyncio.to_thread(client.run, "r"))["counts"]["completed"] == 4 * N
        await asyncio.to_thread(_train, client)
        await _settled(client, completed=GROUPS * N)
        client.close()


def _train(client: Client) -> None:
    for batch in client.stream("r", groups_per_batch=1):
        client.commit(batch)


async def _settled(client: Client, completed: int) -> None:
    async def counts() -> dict[str, Json]:
        return dict((await asyncio.to_thread(client.run, "r"))["counts"])

    async with asyncio.timeout(60):
        while (await counts())["completed"] < completed:
            await asyncio.sleep(0.05)


class _CollectingHandler(logging.Handler):
    """Collects the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage())


async def test_a_trainer_hears_how_many_kept_groups_were_too_stale(
    config: ServiceConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (weights := tmp_path / "weights").mkdir()
    settings = {"delivery": "stream", "max_staleness": 0}
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(client.create_run, run_id="r", **settings)
        await asyncio.to_thread(client.submit, "r", _tasks(3), 2, key="k", last=True)
        batches = client.stream("r", groups_per_batch=1)
        first = await asyncio.to_thread(next, batches)
        while (await asyncio.to_thread(client.run, "r"))["state"] == "open":
            await asyncio.sleep(0.1)
        await asyncio.to_thread(client.publish, "r", 1, weights)
        rest = await asyncio.to_thread(list, batches)
        client.close()
    assert (first.num_groups, rest) == (1, [])
    groups = next(line for line in lines(summarise(config.root / "r")) if "groups  " in line)
    assert groups.endswith("kept 3 (unfiltered) · 2 of the kept too stale to be handed out")
    assert caplog.messages[-1] == (
        "run r has ended, and 2 kept groups were not handed out: weights were published meanwhile,"
        " and max_staleness is 0"
    )


@pytest.mark.slow
async def test_a_trainer_hears_within_half_a_minute_why_nothing_comes(
    config: ServiceConfig,
) -> None:
    silent = config.model_copy(update={"backends": ("scripted:random?delay_s=3600",)})
    handler = _CollectingHandler()
    logging.getLogger("prorl.client").addHandler(handler)
    try:
        async with service(silent, Stop()) as running:
            client = client_of(running)
            await asyncio.to_thread(client.create_run, run_id="r", delivery="stream")
            await asyncio.to_thread(client.submit, "r", _tasks(1), 1, key="k")
            reading = asyncio.ensure_future(
                asyncio.to_thread(lambda: next(client.stream("r"), None))
            )
            began = time.monotonic()
            while not handler.messages:
                assert not reading.done()
                await asyncio.sleep(0.1)
            print(
                f"heard after {time.monotonic() - began:.1f} s: {handler.messages}", file=sys.stderr
            )
            assert handler.messages[0].startswith(
                "run r has no rows yet: 1 rollout runs and none has ended"
            )
            await asyncio.to_thread(client.cancel, "r")
            assert await reading is None
            assert (await asyncio.to_thread(client.run, "r"))["stalled"] == ""
            client.close()
    finally:
        logging.getLogger("prorl.client").removeHandler(handler)
