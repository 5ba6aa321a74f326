"""Tests of the questions to a model server before a run starts, and of the lines while one
waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web

from prorl.cli.app import dispatch
from prorl.cli.progress import follow
from prorl.types import Json


@asynccontextmanager
async def model_server(name: str) -> AsyncIterator[str]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "max_model_len": 4096}]})

    async def well(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", well)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_model_that_the_server_lacks_is_a_single_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, root = tmp_path / "tasks.jsonl", tmp_path / "root"
    tasks.write_bytes(orjson.dumps({"task_id": "t", "env": "noop", "prompt": "?"}))
    async with model_server("tiny") as url:
        argv = ["run", "--tasks", str(tasks), "--policy", url, "--root", str(root)]
        sets = ["--set", "service.model=qwen", "--set", "service.tokenizer=bytes"]
        assert await asyncio.to_thread(dispatch, [*argv, *sets]) == 2
    stderr = capsys.readouterr().err
    assert f"{url} serves 'tiny'; expected the service's model 'qwen'" in stderr
    assert stderr.count("\n") == 1
    assert not root.exists()


class Stalled:
    def __init__(self) -> None:
        failing = ("open", "attempt after attempt fails with stage_error, the first: exit 3")
        self._answers = [("open", "no backend is able"), ("open", ""), failing, ("finished", "")]

    def run(self, name: str) -> Json:
        state, stalled = self._answers.pop(0)
        config = {"delivery": "store"}
        progress = {"counts": {}, "stages": {}, "mean_reward": None, "commits": 0, "config": config}
        return {**progress, "state": state, "stalled": stalled, "cancelled": False}


@pytest.mark.parametrize("quiet", [False, True])
async def test_a_stalled_run_says_so_even_without_progress_display(
    capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    running: Any = SimpleNamespace(
        restarts=0, note_commits=lambda total: None, deaths_since=lambda restarts: []
    )
    client: Any = Stalled()
    await follow(client, running, "r", 1, quiet=quiet)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("r ")] == [
        "r is stalled: no backend is able",
        "r moves again",
        "r is stalled: attempt after attempt fails with stage_error, the first: exit 3",
    ], "it does not move again by ending"
