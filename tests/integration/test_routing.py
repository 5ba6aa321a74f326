"""Tests of the experts of a mixture that tokens went through: a trainer has them as the server
reports them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from prorl.backends import open_backend
from prorl.client.client import Client
from prorl.client.records import Feed, Record
from prorl.deploy.running import client_of, service, signals
from prorl.envs import get_env
from prorl.renderer import ChatMLRenderer
from prorl.storage.files.layout import EMPTY, RunDir
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.tokenizer import ByteTokenizer
from prorl.types import Json, Task
from tests.backends.pool_rollouts import TEXT_ONLY_AGENT
from tests.backends.sglang_server import SglangServer, experts
from tests.client.replay_process import served
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.services import settings

GROUPS, SIBLINGS, EXPERTS = 3, 2, 300
"""More experts than a byte holds."""


def fed(url: str | Path, run: str, *, routed_experts: bool = True) -> list[Record]:
    feed = Feed(url, run, routed_experts=routed_experts)
    records = [record for group in feed for record in group]
    feed.commit()
    return records


def check(records: list[Record]) -> None:
    assert len(records) == GROUPS * SIBLINGS
    for record in records:
        assert record.routed_experts is not None
        assert len(record.routed_experts) == len(record.ids) - 1
        np.testing.assert_array_equal(record.routed_experts, experts(record.ids, EXPERTS)[:-1])
    assert any(
        record.routed_experts is not None and record.routed_experts.max() > 255
        for record in records
    )


def submit(client: Client, run: str, **more: Json) -> None:
    limits: Json = {"max_turns": 3, "max_tokens": 2048}
    client.create_run(
        run_id=run,
        agent=TEXT_ONLY_AGENT,
        limits=limits,
        sampling={"max_tokens": 40},
        filter="none",
        delivery="stream",
        **more,
    )
    tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"{i}?") for i in range(GROUPS)]
    client.submit(run, tasks, SIBLINGS, key="k", last=True)


@pytest.mark.timeout(180)
@SLOW_IN_A_SINGLE_PROCESS
async def test_from_the_server_to_the_trainer(
    workers: int, tmp_path: Path, sandbox_kind: str
) -> None:
    renderer = ChatMLRenderer(ByteTokenizer())
    dice = open_backend("scripted:random", renderer, get_env)
    async with SglangServer(dice, ByteTokenizer(), experts=EXPERTS) as server, signals() as stop:
        more: Json = {"workers": workers, "load_code": True}
        config = settings(tmp_path / "root", sandbox_kind, server.url, **more)
        async with service(config, stop) as running:
            client = client_of(running)
            await asyncio.to_thread(submit, client, "plain")
            plain = await asyncio.to_thread(fed, config.root, "plain", routed_experts=True)
            assert not any(body["return_routed_experts"] for body in server.bodies)
            assert [record.routed_experts for record in plain] == [None] * GROUPS * SIBLINGS
            await asyncio.to_thread(submit, client, "moe", routed_experts=True)
            check(await asyncio.to_thread(fed, config.root, "moe"))
            (batch, *_) = await asyncio.to_thread(lambda: [*client.stream("moe", cursor="moe@0")])
            assert "experts" not in batch.arrow.schema.names, "whoever does not ask gets none"
    assert [path.name for path in (tmp_path / "root" / "plain" / "routed_experts").iterdir()] == [
        EMPTY
    ]
    folder = tmp_path / "root" / "moe"
    before = stored(folder)
    assert verify(folder) == []
    assert compact(RunDir(folder), everything=True) is not None
    assert stored(folder).equals(before)
    assert verify(folder) == []
    with served(folder) as location:
        check(fed(location, "moe"))


def stored(folder: Path) -> pa.Table:
    table: pa.Table = StoredRun(folder).read("routed_experts").sort_by("sequence_id")
    assert table.num_rows == GROUPS * SIBLINGS
    return table.replace_schema_metadata()
