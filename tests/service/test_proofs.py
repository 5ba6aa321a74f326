"""A run whose template is being proved: no request waits for it, everybody is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.cli.commands.status import remarks
from prorl.errors import ConfigError, ConflictError, QueueFullError
from prorl.service.core.proofs import MOST, Proofs
from tests.service.running_gateway import run_config, running_gateway

AGENT = """
import time
from pathlib import Path
while not Path(__file__).with_name("go").exists():
    time.sleep(0.02)
WORD
"""
"""What the service imports while it makes a run: as slow as a test wants."""


def agent(folder: Path, word: str) -> str:
    """The place of an agent whose import ends with `word` once `go` is there."""
    (folder / "slow.py").write_text(AGENT.replace("WORD", word))
    return f"{folder / 'slow.py'}:agent"


async def test_a_run_is_accepted_at_once_and_says_that_it_is_being_proved(tmp_path: Path) -> None:
    """Else a busy machine lets the client's time pass, which says that no service answers."""
    place = agent(tmp_path, "from prorl.agents.native import NativeAgent as agent")
    async with running_gateway(tmp_path, load_code=True) as w:
        w.served.gateway.proofs.reply_s = 0.05
        body = {"run_id": "r", "agent": place}
        async with asyncio.timeout(60):
            status, answer = await w.http("POST", "/v1/runs", body)
        assert (status, answer["state"]) == (202, "proving")
        assert (await w.view())["state"] == "proving"
        service_status = (await w.http("GET", "/v1/status"))[1]
        assert any("r is proving: " in line for line in remarks(service_status)), service_status
        assert [run["state"] for run in (await w.http("GET", "/v1/runs"))[1]["runs"]] == ["proving"]
        status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": [], "last": True})
        assert (status, "is being proved" in answer["message"]) == (503, True)
        status, answer = await w.http("POST", "/v1/runs", {**body, "filter": "dapo"})
        assert (status, "other filter" in answer["message"]) == (409, True)
        (tmp_path / "go").touch()
        async with asyncio.timeout(60):
            while (await w.http("POST", "/v1/runs", body))[0] == 202:
                pass
        assert (await w.view())["state"] == "open"


async def test_a_run_with_a_failed_proof_ends_with_the_reason(tmp_path: Path) -> None:
    place = agent(tmp_path, "raise ValueError('no such luck')")
    async with running_gateway(tmp_path, load_code=True) as w:
        w.served.gateway.proofs.reply_s = 0.05
        body = {"run_id": "r", "agent": place}
        assert (await w.http("POST", "/v1/runs", body))[0] == 202
        (tmp_path / "go").touch()
        view = await w.until(lambda view: view["state"] != "proving")
        assert (view["state"], "no such luck" in view["stalled"]) == ("refused", True), view
        status, answer = await w.http("POST", "/v1/runs", body)
        assert (status, "no such luck" in answer["message"]) == (422, True)
        assert (await w.http("GET", "/v1/runs/r"))[0] == 404, "told: the name is free again"


async def test_the_first_request_creates_the_run_and_a_cancelled_proof_raises() -> None:
    proofs, go = Proofs(lambda: 0.0), asyncio.Event()

    async def create() -> bool:
        return await go.wait()

    requests = [asyncio.ensure_future(proofs.make(run_config(), create)) for _ in range(3)]
    await asyncio.sleep(0)
    go.set()
    assert sorted(map(str, await asyncio.gather(*requests))) == ["False", "False", "True"]
    go.clear()
    requests = [asyncio.ensure_future(proofs.make(run_config(), create))]
    await asyncio.sleep(0)
    proofs.cancel("r")
    with pytest.raises(ConflictError, match="cancelled"):
        await requests[0]


async def test_what_is_kept_of_proofs_is_bounded() -> None:
    proofs, go = Proofs(lambda: 0.0), asyncio.Event()
    proofs.reply_s = 0.0

    async def create() -> bool:
        await go.wait()
        raise ConfigError("a model", "another")

    for i in range(MOST):
        assert await proofs.make(run_config(run_id=f"r{i}"), create) is None
    with pytest.raises(QueueFullError):
        await proofs.make(run_config(run_id="more"), create)
    go.set()
    await asyncio.sleep(0.05)
    with pytest.raises(ConfigError):
        await proofs.make(run_config(run_id="more"), create)
    await proofs.close()
