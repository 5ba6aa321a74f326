"""Tests of the rows of the run's table `metrics` that a trainer logs of its steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.client import Client
from prorl.client.records import Feed
from prorl.errors import ForbiddenError, ProrlError
from prorl.flight import FlightNetwork
from prorl.net.bearer import Keys
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import query
from prorl.storage.read.verify import verify
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay
from prorl.storage.write.metrics import MAX_VALUES, append_logged, read_logged

ROWS = "select consumer, step, version, name, value from metrics order by all"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, Keys]]:
    """A store's endpoint with the run `live`, which may be written to, and the replay `stored`."""
    keys, endpoint = Keys("secret", "k" * 32), Endpoint(tmp_path / "hot", 1 << 20)
    for name in ("live", "stored"):
        make_run(tmp_path / name, 4, 1)
        order, index = open_replay(tmp_path / name)
        endpoint.add(order, index, RunDir(tmp_path / name) if name == "live" else None)
    async with FlightNetwork("secret", keys=keys) as network:
        yield await network.listen(f"grpc+unix://{tmp_path}/s", {}, endpoint.reads()), keys
    endpoint.close()


async def test_the_last_word_on_a_step_counts(
    tmp_path: Path, served: tuple[str, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, _ = served
    monkeypatch.setenv("PRORL_TOKEN", "secret")

    def log() -> None:
        with Client(flight=location, token="secret") as client:
            assert client.log("live", 1, {"loss": 0.5, "kl": 1, "odd": math.nan}, version=3)
            assert client.log("live", 2, {"loss": 0.4})
            assert client.log("live", 1, {"loss": 0.25}), "the step was trained again"
            assert client.log("live", 1, {"loss": 0.75}, consumer="critic")
            assert not client.log("live", 3, {"loss": math.inf}), "no value is finite"
            assert not client.log("stored", 1, {"loss": 0.5}), "a replay stores nothing"
        Feed(location, "live").log(3, {"loss": 0.3}, 7)

    await asyncio.to_thread(log)
    assert [tuple(row.values()) for row in query(tmp_path / "live", ROWS).to_pylist()] == [
        ("critic", 1, None, "loss", 0.75),
        ("primary", 1, 3, "kl", 1.0),
        ("primary", 1, None, "loss", 0.25),
        ("primary", 2, None, "loss", 0.4),
        ("primary", 3, 7, "loss", 0.3),
    ]
    assert AppendedTable(RunDir(tmp_path / "stored"), "metrics").pieces() == []
    assert verify(tmp_path / "live") == []


async def test_a_token_of_a_run_logs_to_that_run_alone(served: tuple[str, Keys]) -> None:
    location, keys = served
    _, token = keys.issue("trainer", runs=("stored",))

    def log() -> None:
        with Client(flight=location, token=token) as client:
            assert not client.log("stored", 1, {"loss": 0.5})
            client.log("live", 1, {"loss": 0.5})

    with pytest.raises(ForbiddenError, match="'stored'"):
        await asyncio.to_thread(log)


GOOD = {"run": "r", "step": 1, "values": {"loss": 0.5}, "key": "k"}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"step": -1}, id="step"),
        pytest.param({"values": {}}, id="no value"),
        pytest.param({"values": {"loss": None}}, id="no number"),
        pytest.param({"values": {"loss": "0.5"}}, id="text"),
        pytest.param({"values": {"": 0.5}}, id="no name"),
        pytest.param({"values": dict.fromkeys(map(str, range(MAX_VALUES + 1)), 0.5)}, id="many"),
        pytest.param({"version": -2}, id="version"),
        pytest.param({"more": 1}, id="unknown"),
    ],
)
def test_what_comes_in_is_checked(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ProrlError, match="metrics"):
        read_logged(orjson.dumps(GOOD | wrong))
    run = make_run(tmp_path / "r", 1, 1)
    assert append_logged(run, read_logged(orjson.dumps(GOOD)))
    assert not append_logged(run, read_logged(orjson.dumps(GOOD))), "the call was retried"
