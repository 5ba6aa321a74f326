"""The table `attempts`: one row for each attempt that began and did not commit, with the culprit.

The slow one is the whole proof: 200 failed attempts of ten kinds, in SQL, in `prorl show` and in
what the viewer's rollout page is given.

    .venv/bin/python -m pytest -m slow tests/storage/test_attempts.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl.cli.commands.show import lines, transcript
from prorl.cli.summary import lines as summary_lines
from prorl.cli.summary import summarise
from prorl.control import Failed, Leaving, Progress, Released, Started
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.types import AttemptKey
from prorl.view.opened import Opened
from tests.service.running_gateway import GatewayHarness, Worker, group, running_gateway
from tests.storage.store_pipeline import directory, store


class Kind(NamedTuple):
    """The end of an attempt, and the content of its row."""

    code: str
    stage: str
    worker: str
    failure_class: str = "infra"
    message: str = ""
    num_sampled: int = 0

    async def end(self, w: GatewayHarness, workers: dict[str, Worker], key: AttemptKey) -> None:
        worker = workers[self.worker]
        if self.stage != "init":
            worker.say(Started(), key)
        if self.num_sampled:
            worker.say(Progress(turn=1, tokens=self.num_sampled), key)
        if self.stage == "run":  # here INIT is a worker of its own, which lets go once RUN began
            holders = w.core.run("r").rollouts[key.rollout_id].holders
            await _until(lambda: self.worker in {holder.name for holder in holders})
            workers["init-0"].say(Released(), key)
            await _until(lambda: [holder.name for holder in holders] == [self.worker])
        if self.code == "returned":
            worker.say(Leaving(), key)
            worker.say(Released(), key)
        elif self.code == "cancelled":
            await w.http("DELETE", f"/v1/runs/r/rollouts/{key.rollout_id}")
        elif self.code != "worker_lost":
            worker.say(Failed(message=self.message), key, self.code)


async def _until(holds: Callable[[], bool]) -> None:
    """Waits, since the messages of workers come by streams of their own, in any order."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


KINDS = (
    Kind("sandbox_start", "init", "init-0", message="no space left in /tmp"),
    Kind("stage_error", "init", "init-0", message="KeyError: 'x'"),
    Kind("sandbox_lost", "run", "run-a", message="killed by signal 9", num_sampled=7),
    Kind("backend_unavailable", "run", "run-b", message="connection refused", num_sampled=3),
    Kind("tool_protocol", "run", "run-a", message="a frame of 9 GB"),
    Kind("bad_task", "run", "run-b", "task", "data.answer is missing"),
    Kind("eval_failed", "eval", "eval-b", message="3 tries: gone", num_sampled=11),
    Kind("worker_lost", "run", "run-dying", message="no worker has it any more", num_sampled=5),
    Kind(
        "returned",
        "run",
        "run-leaving",
        "cancelled",
        "its worker left or ended, and it begins anew",
    ),
    Kind("cancelled", "run", "run-b", "cancelled", num_sampled=2),
)
NODES = {
    "init-0": "n0",
    "run-a": "na",
    "run-b": "nb",
    "eval-b": "nb",
    "run-dying": "nd",
    "run-leaving": "nl",
}


async def take_leases(init: Worker, count: int) -> list[AttemptKey]:
    keys: list[AttemptKey] = []
    while len(keys) < count:
        keys += await init.take()
    return keys


async def fail(tmp_path: Path, each: int) -> Path:
    """A run whose attempts end in each kind so often; where it is stored."""
    async with running_gateway(tmp_path) as w, store(w), AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(
                w.worker(name.partition("-")[0], name, node=node, location="")
            )
            for name, node in NODES.items()
            if name != "run-dying"
        }
        dying = w.worker("run", "run-dying", node=NODES["run-dying"], location="")
        workers["run-dying"] = await dying.__aenter__()
        count = each * len(KINDS)
        limits = {"max_attempts": 1, "max_worker_losses": 0}
        await w.run(limits=limits, max_open_groups=count)
        await w.submit(*(group(f"t{i}", key=f"k{i}") for i in range(count)), last=True)
        for key in await take_leases(workers["init-0"], count):
            await KINDS[key.rollout_id % len(KINDS)].end(w, workers, key)
        returned = sum(kind.code == "returned" for kind in KINDS) * each
        for key in await take_leases(workers["init-0"], returned):
            assert key.attempt == 2
            workers["init-0"].say(Failed(message="at its second"), key, "sandbox_start")
        await w.until(lambda view: view["counts"]["running"] == each)  # those of the dying one
        await dying.__aexit__()
        view = await w.until(lambda view: view["state"] == "finished")
        assert view["failures"]["worker_lost on nd"] == each
        return directory(w)


async def check(tmp_path: Path, each: int) -> None:
    run = await fail(tmp_path, each)
    assert await asyncio.to_thread(verify, run) == []
    stored, opened = StoredRun(run), Opened(str(run))
    rows = stored.sql("select * from attempts order by rollout_id, attempt").to_pylist()
    assert len([row for row in rows if row["attempt"] == 1]) == each * len(KINDS)
    assert len(rows) == each * (len(KINDS) + 1)
    for row in rows:
        if row["attempt"] == 2:
            assert (row["failure_code"], row["stage"]) == ("sandbox_start", "init")
            continue
        kind = KINDS[row["rollout_id"] % len(KINDS)]
        names = ("failure_code", "stage", "worker", "failure_class", "failure_message")
        assert tuple(row[name] for name in names) == kind[:5]
        assert (row["node"], row["num_sampled"]) == (NODES[kind.worker], kind.num_sampled)
        assert (row["server"], row["seconds"] >= 0) == ("scripted:oracle", True)
        page = opened.rollout(row["rollout_id"])["attempts"]
        assert page[0]["worker"] == kind.worker
        text = "\n".join(lines(transcript(stored, row["rollout_id"])))
        assert f"attempt 1 ended in {kind.stage.upper()} after" in text
        assert f"{kind.worker} · {NODES[kind.worker]} · scripted:oracle" in text
        assert f"{kind.failure_class}/{kind.code}: {kind.message}" in text
    summary = summarise(run)
    (retried,) = summary["retried"]
    assert retried == {
        "failure_class": "cancelled",
        "failure_code": "returned",
        "n": each,
        "first_rollout": 8,
    }
    line = f"  retried   cancelled/returned {each}: `prorl show r --rollout 8 --root {run.parent}`"
    assert f"{line} says why and where" in summary_lines(summary)
    by_node = stored.sql(
        "select node, count(*) as n from rollouts where status = 'failed' group by 1"
    )
    assert {row["node"] for row in by_node.to_pylist()} == {*NODES.values()} - {"nl"}


async def test_each_attempt_that_did_not_commit_is_a_row_that_names_the_culprit(
    tmp_path: Path,
) -> None:
    await check(tmp_path, 1)


@pytest.mark.slow
async def test_two_hundred_of_ten_kinds(tmp_path: Path) -> None:
    await check(tmp_path, 20)


async def test_what_never_began_is_no_attempt(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, store(w), w.worker("init") as init:
        await w.run(max_open_groups=1)
        await w.submit(*(group(f"t{i}", n=3) for i in range(4)), last=True)
        first = await init.take(3)
        assert len(first) == 3
        await w.http("DELETE", "/v1/runs/r")
        await w.until(lambda view: view["state"] == "cancelled")
        run = directory(w)
    answer = StoredRun(run).sql("select status, count(*) as n from rollouts group by 1").to_pylist()
    assert answer == [{"status": "cancelled", "n": 12}]
    begun = StoredRun(run).sql("select count(*) as n from attempts").to_pylist()
    assert 3 <= begun[0]["n"] <= 8
