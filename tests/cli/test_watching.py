"""`prorl status` of a real gateway, once and again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.commands.status import stage_rows
from prorl.control import CommitCursor, Stats
from prorl.types import BackendFault, Json
from tests.service.running_gateway import TOKEN, group, handout, running_gateway


def _status(**changes: Json) -> Json:
    stage = {"workers": 1, "slots": 4, "busy": 2, "queued": 1, "done": 0, "failed": 0, "tokens": 0}
    return {
        "bottleneck": "run",
        "stages": {"run": {**stage, **changes}},
        "backends": [],
        "runs": [],
    }


def test_rates_are_what_grew_over_the_time_between_two_looks() -> None:
    rows = stage_rows(_status(), _status(done=10, tokens=500), 2.0)
    assert rows == [("run *", 1, "2/4", 1, 5.0, 0.0, 250.0)]
    (restarted,) = stage_rows(_status(done=10), _status(done=1), 2.0)
    assert restarted[4] == 0.0


async def test_status_of_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    async with running_gateway(tmp_path) as w, w.worker("run") as run:
        await w.run()
        await w.submit(group(n=3))
        run.stats = Stats(busy=4, queued=2)
        async with asyncio.timeout(30):
            while not (await w.http("GET", "/v1/status"))[1]["bottleneck"]:
                await asyncio.sleep(0.05)
        argv = [sys.executable, "-m", "prorl.cli", "status", "--watch", "0.1"]
        watching = await asyncio.create_subprocess_exec(*argv, "--url", w.served.http, stdout=PIPE)
        assert watching.stdout is not None
        for _ in range(2):
            while not (line := await watching.stdout.readline()).startswith(b"run *"):
                assert line
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 130
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        expected = "bottleneck: RUN (4 of 8 slots busy, 2 queued)"
        assert expected in (output := capsys.readouterr().out)
        assert output.startswith("run\tstate"), "a person looks for the runs first"
        assert output.index("worker\trole") < output.index(f"pid {os.getppid()} is the supervisor")
        assert "endpoint" not in output
        assert await asyncio.to_thread(dispatch, ["status", "--edges", "--url", w.served.http]) == 0
        assert "edge\tto\tendpoint" in capsys.readouterr().out
        assert "host" not in output, "all are on one"
        workers = w.core.state.workers
        workers["run-0"] = replace(workers["run-0"], host="node-7.cluster")
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        assert "node-7.cluster" in capsys.readouterr().out


async def test_a_finished_run_stays_until_its_trainer_has_committed_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        await w.run(delivery="stream")
        await w.submit(group(), last=True)
        await store.commit("r", "p1", await init.take())
        await store.decide("r", 0)
        await store.commit("r", "p2", [], outbox_upto=w.core.run("r").outbox.end)
        await w.until(lambda view: view["state"] == "finished")
        expected = "r is finished, and keeps 1 group that its trainer has not committed"
        for handed_out in (False, True):
            if handed_out:
                await store.ask(handout([[0, 0]]), "r")
            assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
            assert expected in capsys.readouterr().out
            assert (await w.http("GET", "/v1/runs"))[1]["runs"][0]["uncommitted_groups"] == 1
        await store.ask(CommitCursor(consumer="primary", seq=1), "r")
        status = (await w.http("GET", "/v1/status"))[1]
        assert status["runs"] == []
        assert [run["run_id"] for run in status["ended_runs"]] == ["r"], "it does not just vanish"
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        output = capsys.readouterr().out
        assert "no run is open" in output
        assert "r\tfinished" in output


async def test_status_names_a_model_server_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    dead_url = "http://127.0.0.1:9"
    async with running_gateway(tmp_path, backends=(dead_url,)) as w:
        async with asyncio.timeout(30):
            while (await w.http("GET", "/v1/status"))[1]["backends"][0]["state"] != "ejected":
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        w.core.watched.reported(dead_url, BackendFault.MALFORMED, 1, 9, "another request's id")
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        output = capsys.readouterr().out
        assert f"{dead_url} is ejected: a probe was refused" in output
        assert f"{dead_url} contradicted itself in 1 reply, refused and asked again" in output
