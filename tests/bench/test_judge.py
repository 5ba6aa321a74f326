"""The bench of the judge: a scripted one against the built-in table and against tables of one's
own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from prorl.bench.judge import cases, run
from prorl.errors import UserError
from prorl.types import Json

WRONG = "Sydney."
SILENT = "Good night"


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Knows the table by heart, but for one answer that it overrates and one that it will not
    score.
    """
    known = {case.artefact.decode(): case.score for case in cases()}

    async def handle(request: web.Request) -> web.StreamResponse:
        asked: Json = await request.json()
        content: str = asked["messages"][0]["content"]
        mark = content.split("between the marks ")[1].split(".")[0]
        answer = content.split(f"\n{mark}\n")[1]
        said = f'{{"score": {1 if answer == WRONG else known[answer]}}}'
        text = "No." if answer == SILENT else said
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("PRORL_JUDGE_URL", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("PRORL_JUDGE_MODEL", "scripted")
    yield
    await runner.cleanup()


@pytest.mark.usefixtures("server")
async def test_a_judge_is_measured_against_the_table() -> None:
    total = len(cases())
    found = {row.what: row.value for row in (await run()).rows}
    assert found["judge_accuracy"] == pytest.approx((total - 2) / total)
    assert (found["judge_false_positives"], found["judge_errors"]) == (1, 1)
    assert found["judge_mean_error"] == pytest.approx(1 / (total - 1))


@pytest.mark.usefixtures("server")
async def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mine.jsonl"
    table.write_bytes(orjson.dumps({"prompt": "?", "answer": WRONG, "score": 1}) + b"\n")
    monkeypatch.setenv("PRORL_JUDGE_TABLE", str(table))
    assert (await run(quick=True)).rows[0].value == 1
    for line, says in (("{", "line 1"), ('{"prompt": "?", "answer": "", "score": 7}', "score 7")):
        table.write_text(line)
        with pytest.raises(UserError, match=says):
            await run()


async def test_without_a_judge_it_says_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRORL_JUDGE_URL", raising=False)
    with pytest.raises(UserError, match="PRORL_JUDGE_URL"):
        await run()
