"""`prorl plan` on a stored run, `prorl top` and `status` on a real gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.commands.plan import size
from prorl.cli.commands.top import sheets
from prorl.control import Stats
from prorl.types import Json
from tests.service.world import TOKEN, group, world

GOLDEN = Path(__file__).parents[1] / "storage" / "golden" / "v1"


def test_a_plan_grows_with_the_rate_and_names_the_stage_that_needs_most() -> None:
    means = {"init": 1.0, "run": 10.0, "eval": 0.5, "llm_s": 6.0, "sampled": 100.0}
    few, many = (size(means, rate, {"init": 4, "run": 16, "eval": 4}) for rate in (1.0, 10.0))
    assert (few.slots, few.nodes, few.sandboxes) == ({"init": 2, "run": 13, "eval": 1}, 1, 15)
    assert (many.slots["run"], many.nodes) == (125, 8)
    assert (many.calls_in_flight, many.sampled_per_s) == (60.0, 1000.0)


def test_plan_reads_a_stored_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plan", str(GOLDEN), "--rate", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] >= 1
    assert found["from"]["rollouts"] > 0
    assert dispatch(["plan", str(GOLDEN), "--rate", "0"]) == 2


def _status(**changes: Json) -> Json:
    stage = {"workers": 1, "slots": 4, "busy": 2, "queued": 1, "done": 0, "failed": 0, "tokens": 0}
    return {
        "bottleneck": "run",
        "stages": {"run": {**stage, **changes}},
        "backends": [],
        "runs": [],
    }


def test_rates_are_what_grew_over_the_time_between_two_looks() -> None:
    stages, backends, runs = sheets(_status(), _status(done=10, tokens=500), 2.0)
    assert stages.rows == [("run *", 1, "2/4", 1, 5.0, 0.0, 250.0)]
    assert (backends.rows, runs.rows) == ([], [])
    restarted, *_ = sheets(_status(done=10), _status(done=1), 2.0)
    assert restarted.rows[0][4] == 0.0


async def test_top_and_status_of_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    async with world(tmp_path) as w, w.worker("run") as run:
        await w.run()
        await w.submit(group(n=3))
        run.stats = Stats(busy=4, queued=2)
        async with asyncio.timeout(30):
            while not (await w.http("GET", "/v1/status"))[1]["bottleneck"]:
                await asyncio.sleep(0.05)
        looks = ["--every", "0.1", "--times", "2", "--url", w.served.http]
        assert await asyncio.to_thread(dispatch, ["top", *looks]) == 0
        shown = capsys.readouterr().out
        assert shown.count("run *") == 2
        assert "scripted:oracle" in shown
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        said = "RUN holds the others back: 4 of 8 slots busy, 2 queued"
        assert said in capsys.readouterr().out


async def test_status_names_a_model_server_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    gone = "http://127.0.0.1:9"
    async with world(tmp_path, backends=(gone,)) as w:
        async with asyncio.timeout(30):
            while (await w.http("GET", "/v1/status"))[1]["backends"][0]["state"] != "ejected":
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(dispatch, ["status", "--url", w.served.http]) == 0
        assert f"{gone} is ejected: a probe was refused" in capsys.readouterr().out
