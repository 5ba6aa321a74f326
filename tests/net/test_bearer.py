"""Tokens that may do less: what they grant, over HTTP and over Flight, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from multidict import CIMultiDict

from prorl.cli.app import dispatch
from prorl.errors import ForbiddenError, UnauthorizedError, UserError
from prorl.flight import FlightNetwork
from prorl.flight.wire import call_options
from prorl.net.bearer import EVERYTHING, Keys, signing_key
from prorl.schema import TRAINED
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay
from tests.service.running_gateway import TOKEN, running_gateway
from tests.storage.run_directories import new_run

KEY = "k" * 64

DATA = pa.table({"x": [1]})


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def test_a_token_grants_what_it_was_made_for() -> None:
    keys = Keys("secret", KEY)
    grant, token = keys.issue("viewer", runs=("r",))
    assert keys.check(bearer(token)) == grant
    assert keys.check(bearer("secret")) == EVERYTHING
    with pytest.raises(ForbiddenError, match="is for run 'r', not for 'other'"):
        grant.check_run("other")
    with pytest.raises(UserError, match="one of trainer, viewer, node"):
        keys.issue("service")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Basic secret",
        b"Bearer .",
        b"Bearer ..",
        b"Bearer \xff\xfe",
        b"Bearer eyJhbGciOiJub25lIn0.e30.",
        b"Bearer " + b"x" * 100_000,
    ],
)
def test_what_is_no_token_of_ours_is_refused(header: bytes) -> None:
    with pytest.raises(UnauthorizedError):
        Keys("secret", KEY).check(header)


def lineage(run: str) -> bytes:
    """Returns the body of a client's `record`."""
    values = {"checkpoint": "c", "parent_checkpoint": "p", "consumer": "primary", "run_id": "other"}
    row = {field.name: values.get(field.name, 0) for field in TRAINED if not field.nullable}
    rows = pa.Table.from_pylist([row], TRAINED).replace_schema_metadata(
        {**TRAINED.metadata, b"prorl.run": run.encode()}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


async def test_a_trainer_of_a_run_records_lineage_of_that_run_alone(tmp_path: Path) -> None:
    keys, endpoint = Keys("secret", KEY), Endpoint(tmp_path / "hot", 1 << 20)
    for name in ("mine", "other"):
        new_run(tmp_path, name)
        endpoint.add(*open_replay(tmp_path / name))
    async with FlightNetwork("secret", keys=keys) as network:
        location = await network.listen(f"grpc+unix://{tmp_path}/s", {}, endpoint.reads())

        def record(token: str, body: bytes) -> bytes:
            with fl.connect(location) as client:
                (answer,) = client.do_action(("record", body), call_options(token, 30))
                return bytes(answer.body.to_pybytes())

        _, token = keys.issue("trainer", runs=("mine",))
        for body in (lineage("other"), lineage(""), b'{"run": "mine"}', b"", lineage("mine")[:200]):
            with pytest.raises(pa.ArrowException, match="is for run 'mine'"):
                await asyncio.to_thread(record, token, body)
        for who, run in ((token, "mine"), ("secret", "other")):
            answer = await asyncio.to_thread(record, who, lineage(run))
            assert answer == b'{"recorded": false}', "a replay lets it in and writes nothing"
    endpoint.close()


def test_the_command_makes_a_token_for_a_role_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(tmp_path)]
    assert dispatch(["token", "new", *root]) == 2
    (tmp_path / "token").write_text("secret\n")
    keys = Keys("secret", signing_key(tmp_path))
    for options, role, runs in (
        ([], "trainer", ()),
        (["--run", "r", "--run", "s"], "trainer", ("r", "s")),
        (["--role", "guest", "--run", "r"], "guest", ("r",)),
    ):
        capsys.readouterr()
        assert dispatch(["token", "new", *options, *root]) == 0
        grant = keys.check(bearer(capsys.readouterr().out.strip()))
        assert (grant.role, grant.runs) == (role, runs)
    for options in ([], ["--run", "r", "--run", "s"]):
        assert dispatch(["token", "new", "--role", "guest", *options, *root]) == 2


async def test_a_request_with_two_tokens_is_refused(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        url = w.served.http + "/v1/runs"
        twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=CIMultiDict(twice)) as answer,
        ):
            assert answer.status == 401
