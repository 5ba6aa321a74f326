"""Tests of the table of access, each cell tried for real: role of certificate x token x route or
verb x run. Routes and verbs come from the app and from the server, so that what is added is asked
as well; what should come of it is worked out here from the table, and not by the code that reads
it.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from prorl.control import ControlRow, Hello, to_batch
from prorl.errors import ForbiddenError, ProrlError
from prorl.flight import FlightNetwork, FlightReads, control_client
from prorl.flight.control_client import ControlClient, this_incarnation
from prorl.flight.rpc import NOT_SERVED, RpcServer
from prorl.flight.wire import Opening, call_options, open_client, with_version
from prorl.net.access import FLIGHT, GRANTED, HTTP, OPEN, check_flight, check_http
from prorl.net.bearer import Keys, keys_of, signing_key
from prorl.net.tls import ROLES, Authority, Credentials
from prorl.protocols import Channel
from prorl.schema import CONTROL
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.http.app import create_app
from prorl.service.serve import serving
from tests.integration.test_outside import three_ports
from tests.service.running_gateway import TOKEN, settings

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")

MINE, OTHER = "mine", "other"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class BearerToken:
    """A token, and what it should allow."""

    name: str
    text: str
    valid: bool = True
    role: str = ""
    """Empty: the owner's."""
    run: str = ""


@dataclass(frozen=True)
class Cert:
    """The certificate that a caller presents over TLS; None: it is on the service's own host."""

    name: str
    credentials: Credentials | None = None

    @property
    def role(self) -> str:
        return self.name.partition(":")[0]

    def dialling(self, role: str) -> Credentials | None:
        """The same, to be dialled with as this role does: whom one expects goes by one's role."""
        return replace(self.credentials, role=role) if self.credentials else None


def tokens(root: Path) -> list[BearerToken]:
    keys = Keys(TOKEN, signing_key(root))
    by_owners = Keys("", TOKEN.ljust(32, "\0"))  # to HMAC the same key, and long enough for PyJWT
    made = [
        BearerToken("owner", TOKEN),
        BearerToken("none", "", valid=False),
        BearerToken("wrong", "x" * 43, valid=False),
        BearerToken("forged", Keys(TOKEN, "f" * 64).issue("trainer")[1], valid=False),
        BearerToken(
            "signed with the owner's",
            by_owners.issue("trainer")[1],
            valid=False,
        ),
    ]
    for role in GRANTED:
        made.append(BearerToken(role, keys.issue(role)[1], role=role))
        token = keys.issue(role, runs=(MINE,))[1]
        made.append(BearerToken(f"{role} of a run", token, role=role, run=MINE))
    return made


def certificates(authority: Authority) -> list[Cert]:
    """One a role, a node without a name and one with."""
    named = authority.credentials("node", node="n1")
    return [
        Cert("here"),
        *(Cert(role, authority.credentials(role)) for role in ROLES),
        Cert("node:n1", named),
    ]


def may(cert: Cert, token: BearerToken, roles: frozenset[str], named: str | None) -> bool:
    """Returns whether the table allows it. `named`: the run that is asked for; empty: none; None:
    of no account.
    """
    by_certificate = cert.credentials is None or cert.role in roles
    by_token = token.valid and (not token.role or token.role in roles)
    return by_certificate and by_token and (not token.run or named in (None, token.run))


@asynccontextmanager
async def gateway(tmp_path: Path) -> AsyncIterator[tuple[Any, list[Cert], list[BearerToken]]]:
    """A real one, over loopback and over TLS."""
    config = settings(tmp_path, listen=f"127.0.0.1:{three_ports()}")
    config.root.mkdir()
    authority, bearers = Authority.of(config.tls_dir), tokens(config.root)
    own = authority.credentials("service")
    async with (
        FlightNetwork(TOKEN, own, keys_of(config)) as network,
        serving(config, network, credentials=own) as served,
    ):
        yield served, certificates(authority), bearers


def requests(app: Any) -> Iterator[tuple[str, str, str, str, Any]]:
    """Each route: its row of the table, method, path, the run that it names, a body."""
    for route in app.routes:
        for method in sorted(route.methods - {"HEAD"}):
            what = f"{method} {route.path}"
            for run in (MINE, OTHER) if "{run_id}" in what or what == "POST /v1/runs" else ("",):
                path = re.sub(r"\{(group|rollout)_id\}", "0", route.path)
                path = path.replace("{run_id}", run).replace("{node}", "n1")
                yield what, method, path, run, {"run_id": run} if what == "POST /v1/runs" else {}


async def test_over_http(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with gateway(tmp_path) as (served, certs, bearers):
        routes = list(requests(create_app(served.gateway)._app))
        assert {what for what, *_ in routes} == set(HTTP)
        for cert in certs:
            config = served.gateway.config
            url = served.http if cert.credentials is None else config.listener.url
            context = cert.credentials.client_context() if cert.credentials else True
            name = "service.prorl" if cert.credentials else None
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4)) as session:
                for token, (what, method, path, run, body) in itertools.product(bearers, routes):
                    async with session.request(
                        method,
                        url + path,
                        data=orjson.dumps(body),
                        headers=JSON
                        | ({"authorization": f"Bearer {token.text}"} if token.text else {}),
                        ssl=context,
                        server_hostname=name,
                    ) as answer:
                        let_in = answer.status not in (401, 403)
                        reply = await answer.read()
                    if answer.status >= 400:
                        assert set(orjson.loads(reply)) == {"code", "message", "request_id"}
                    roles = HTTP[what]
                    is_allowed = may(cert, token, roles, run)
                    if path == OPEN:
                        is_allowed = cert.credentials is None or cert.role in roles
                    if let_in != is_allowed:
                        wrong.append(f"{what} {run} as {cert.name} with {token.name}: {reply!r}")
    assert not wrong, wrong


EMPTY = pa.schema([pa.field("x", pa.int64())])


def call(client: fl.FlightClient, what: str, token: str, run: str, worker: str) -> str:
    """Returns the error, in words; empty when the caller was let in."""
    verb, _, name = what.partition(" ")
    body, options = orjson.dumps({"run": run}), call_options(token, 30)
    try:
        match verb:
            case "exchange":
                opening = Opening(name, with_version({"worker": worker, "roles": {"run": 1}}))
                descriptor = fl.FlightDescriptor.for_command(opening.encode())
                writer, reader = client.do_exchange(descriptor, options)
                writer.begin(EMPTY)
                _ = reader.schema
                writer.close()
            case "info":
                client.get_flight_info(fl.FlightDescriptor.for_command(body), options)
            case "get":
                client.do_get(fl.Ticket(body), options).read_all()
            case "action":
                list(client.do_action((name, body), options))
            case "list_actions":
                client.list_actions(options)
            case "list_flights":
                list(client.list_flights(b"", options))
            case "get_schema":
                client.get_schema(fl.FlightDescriptor.for_command(body), options)
            case "do_put":
                descriptor = fl.FlightDescriptor.for_command(body)
                writer, _ = client.do_put(descriptor, EMPTY, options)
                writer.done_writing()
                writer.close()
    except (fl.FlightError, pa.ArrowException, OSError, StopIteration) as error:
        return str(error) or type(error).__name__
    return ""


UNKNOWN = ("list_flights", "get_schema", "do_put", "action unknown", "exchange unknown")


def test_every_verb_of_flight_is_tried() -> None:
    verbs = {name for name in vars(fl.FlightServerBase) if name.startswith(("do_", "get_", "list"))}
    ours = {name for name in vars(RpcServer) if not name.startswith("_")}
    assert verbs == ours | {"list_flights", "get_schema", "do_put"}, "else pyarrow's traceback"
    assert {m.name for m in fl.FlightMethod} == {m.name for m in NOT_SERVED} | {
        *("INVALID", "GET_FLIGHT_INFO", "DO_GET", "DO_ACTION", "LIST_ACTIONS", "DO_EXCHANGE")
    }


async def test_over_flight(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    bearers, authority = tokens(root), Authority.of(tmp_path / "tls")

    async def accept(channel: Channel) -> None:
        await channel.receive()

    async def get(body: bytes) -> pa.Table:
        return pa.table({"x": [1]})

    async def info(body: bytes) -> fl.FlightInfo:
        return fl.FlightInfo(EMPTY, fl.FlightDescriptor.for_command(body), [])

    async def act(body: bytes) -> bytes:
        return b"{}"

    paths = [what.split()[1] for what in FLIGHT if what.startswith("exchange ")]
    actions = {what.split()[1]: act for what in FLIGHT if what.startswith("action ")}
    routes = dict.fromkeys(paths, (accept, EMPTY, EMPTY))
    reads = FlightReads(get=get, info=info, actions=actions)
    keys = Keys(TOKEN, signing_key(root))

    def ask(cert: Cert, location: str) -> list[str]:
        wrong = []
        with open_client(location, cert.dialling("trainer")) as client:
            requests = itertools.product(bearers, [*FLIGHT, *UNKNOWN], (MINE, OTHER))
            for token, what, run in requests:
                refusal = call(client, what, token.text, run, "n1/run-0")
                where = f"{what} {run} as {cert.name} with {token.name}: {refusal}"
                assert "Traceback" not in refusal, where
                assert "NotImplemented" not in refusal, where
                named: str | None = "" if what.startswith("exchange") else run
                if what == "list_actions":
                    named = None
                is_allowed = may(cert, token, FLIGHT.get(what, frozenset()), named)
                if what.startswith("exchange") and "node" in (cert.role, token.role):
                    is_allowed = is_allowed and cert.name == "node:n1"
                if what in UNKNOWN:
                    is_allowed = False
                if (not refusal) != is_allowed:
                    wrong.append(where)
        return wrong

    own = authority.credentials("service")
    async with FlightNetwork(TOKEN, own, keys) as network:
        near = await network.listen(f"grpc+unix://{tmp_path}/s", routes, reads)
        far = await network.listen("grpc+tls://127.0.0.1:0", routes, reads)
        for cert in certificates(authority):
            wrong = await asyncio.to_thread(ask, cert, far if cert.credentials else near)
            assert not wrong, wrong


async def test_at_a_node_the_service_alone_by_its_certificate(tmp_path: Path) -> None:
    """It shows a node no token: whatever it showed, the node could use in its name."""
    seen: list[str] = []

    async def accept(channel: Channel) -> None:
        seen.append(str(channel.peer["worker"]))
        await channel.receive()

    authority = Authority.of(tmp_path / "tls")
    routes = {"edge/scored": (accept, EMPTY, EMPTY)}
    async with FlightNetwork("nodes", authority.credentials("node", node="n1")) as node:
        at = await node.listen("grpc+tls://127.0.0.1:0", routes)
        for cert in certificates(authority)[1:]:
            with open_client(at, cert.dialling("service")) as client:
                refusal = await asyncio.to_thread(
                    call, client, "exchange edge/scored", "", "", "store-0"
                )
            assert (refusal == "") == (cert.name == "service"), (cert.name, refusal)
        async with FlightNetwork("the owner's", authority.credentials("service")) as service:
            channel = await service.dial(at, "edge/scored", {"worker": "mine"}, EMPTY, EMPTY)
            await channel.close()
    assert seen == ["store-0", "mine"]


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        ({"roles": {"run": 1}, "worker": "n2/worker-0"}, "worker n1/"),
        ({"roles": {"run": 1}, "worker": "worker-0"}, "worker n1/"),
        ({"roles": {"store": 1}, "worker": "n1/store-0"}, "as {'store': 1}"),
        ({"roles": {"run": 1, "store": 1}, "worker": "n1/worker-0"}, "worker n1/"),
        ({"roles": {"run": 1}, "worker": "n1/worker-0", "node": "n2"}, "worker n1/"),
        ({"roles": {"store": 1}, "worker": "store-0"}, "worker n1/"),
    ],
)
async def test_a_node_speaks_for_itself_alone(
    tmp_path: Path, hello: dict[str, Any], expected: str
) -> None:
    async with gateway(tmp_path) as (served, certs, bearers):
        node = next(cert for cert in certs if cert.name == "node:n1").credentials
        at = served.gateway.config.listener.gateway
        token = next(token for token in bearers if token.name == "node").text
        async with FlightNetwork(token, node) as network:
            with pytest.raises(ForbiddenError, match=expected):
                await network.dial(at, "control", hello, CONTROL, CONTROL)
            good: dict[str, Any] = {"roles": {"run": 1}, "worker": "n1/worker-0"}
            channel = await network.dial(at, "control", good, CONTROL, CONTROL)
            hello_fields: dict[str, Any] = {"node": "n1"} | hello
            lie = Hello(schema_version=SCHEMA_VERSION, **hello_fields)
            channel.send(to_batch([ControlRow.of(lie, seq=1)]))
            try:
                assert await asyncio.wait_for(channel.receive(), 60) is None, "no welcome"
            except ProrlError:
                pass
            assert served.gateway.core.state.workers == {}
            await channel.close()


async def test_a_worker_that_is_refused_for_good_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the service has another signing key; a node ends with that line instead of dialling for
    ever.
    """
    monkeypatch.setattr(control_client, "REFUSED_S", 0.5)
    async with gateway(tmp_path) as (served, certs, bearers):
        at = served.gateway.config.listener.gateway
        node = next(cert for cert in certs if cert.name == "node:n1").credentials
        forged_token = next(token for token in bearers if token.name == "forged").text
        identity = this_incarnation(roles={"run": 1}, worker="n1/run-0", node="n1", remote=True)
        async with FlightNetwork(forged_token, node) as network:
            client = ControlClient(network, at, identity, on={})
            client.start()
            with pytest.raises(control_client.REFUSALS, match="a wrong bearer token"):
                await asyncio.wait_for(client.wait(), 30)
            await client.close()


@pytest.mark.parametrize("role", [*ROLES, "", "somebody"])
def test_what_the_table_does_not_name_is_for_nobody(role: str) -> None:
    for method, path in (("GET", "/v1/secrets"), ("PATCH", "/v1/runs"), ("GET", "/v1/runs/a/b/c")):
        with pytest.raises(ForbiddenError):
            check_http(role, method, path)
    with pytest.raises(ForbiddenError):
        check_flight(role, "exchange edge/ready")
