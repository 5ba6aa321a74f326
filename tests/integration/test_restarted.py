"""A trainer outlives its service: the next one on the root has another port, and is found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.running import Stop, service
from prorl.types import Task


def config(root: Path) -> ServiceConfig:
    values = {"root": root, "workers": 0, "backends": ("scripted:oracle",)}
    return ServiceConfig.model_validate(values)


async def test_connect_finds_a_service_that_was_started_again_on_another_port(
    tmp_path: Path,
) -> None:
    task = Task(task_id="t", env="noop", prompt="?", data={"reward": 1})
    root = tmp_path / "root"
    async with service(config(root), Stop()) as first:
        trainer = prorl.connect(root, retry_s=20)
        await asyncio.to_thread(trainer.create_run, run_id="r", delivery="stream")
        await asyncio.to_thread(trainer.submit, "r", [task], n=1, key="a")
        batches = trainer.stream("r")
        batch = await asyncio.to_thread(next, batches)
        before = first.config.http_port
    async with service(config(root), Stop()) as second:
        assert second.config.http_port != before
        await asyncio.to_thread(trainer.commit, batch)
        await asyncio.to_thread(trainer.submit, "r", [task], n=1, key="b", last=True)
        assert (await asyncio.to_thread(next, batches)).num_groups == 1
        trainer.close()
