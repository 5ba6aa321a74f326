"""Publication of weights: ids, backends that take them by halves, backends that do not, and what a
restart remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from prorl.control import Kind, Paused, VersionPublished
from prorl.service import probes, publish
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.types import BackendFault, Json
from tests.backends.misbehaving_server import head, usage
from tests.service.running_gateway import GatewayHarness, group, running_gateway
from tests.waiting import until


class ModelServer:
    """Speaks the embedded backend's words about weights, or vLLM's; notes what it was told."""

    def __init__(self, vllm: str = "") -> None:
        self.paths: list[str] = []
        self.version = "default" if vllm else "0"
        self.path = self.adapter = ""
        self.refuses = self.paused = self.silent = self.serves = False
        self.freezes_at = ""
        self.fails_at = ""
        self.waits_at, self.go_on = "", asyncio.Event()
        self.resumes = True
        self.others: list[ModelServer] = []
        self.most_paused = 0
        self.keys: dict[str, str] = {}
        """By path, the key that came with the last request for it."""
        self._vllm = vllm
        self._app = web.Application()
        self._app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    @property
    def number(self) -> str:
        """Version of the weights that it serves, from its label."""
        return self.version.split(":")[1] if ":" in self.version else self.version

    async def __aenter__(self) -> ModelServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.silent = self.silent or request.path == self.freezes_at
        if self.silent:
            await asyncio.Event().wait()
        self.keys[request.path] = request.headers.get("Authorization", "")
        body: Json = await request.json() if request.can_read_body else {}
        match request.path:
            case "/health" | "/metrics":
                return web.Response()
            case "/version":
                return web.json_response({"version": self._vllm or "prorl-0.1.0"})
            case "/weight_info":
                return web.json_response({"weight_version": self.version})
            case "/v1/models" if self.serves:
                return web.json_response({"data": [{"id": "m"}]})
            case "/v1/completions" if self.serves:
                return _token(body)
            case "/v1/models" | "/v1/completions" | "/tokenize":
                return web.Response(status=404)
        self.paths.append(request.path_qs)
        if request.path == self.waits_at:
            await self.go_on.wait()
        answer = self._reply_to(request.path, body)
        return web.Response(status=500) if request.path == self.fails_at else answer

    def _reply_to(self, path: str, body: Json) -> web.Response:
        match path:
            case "/pause":
                self.paused = True
                self.most_paused = max(
                    self.most_paused, sum(server.paused for server in self.others)
                )
            case "/resume":
                self.paused = not self.resumes
            case "/init_weight_transfer_engine" if self._vllm != "0.32-transfer":
                return web.Response(status=404)
            case "/update_weights" | "/collective_rpc" if self.refuses or not self.paused:
                return web.Response(status=500, text="no such directory")
            case "/update_weights" if "path" in body:
                self.path, self.version = body["path"], str(body["label"])
            case "/update_weights":
                self.path = body["update_info"]["path"]
            case "/v1/load_lora_adapter":
                assert body["load_inplace"] is True
                self.path, self.adapter = body["lora_path"], body["lora_name"]
            case "/collective_rpc":
                self.path = body["kwargs"]["weights_path"]
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/update_weight_version":
                self.version = body["new_version"]
        return web.json_response({})


def _token(body: Json) -> web.Response:
    logprobs = {"token_logprobs": [-0.001 if body["temperature"] < 1 else -1.0]}
    choice = {"token_ids": [65], "logprobs": logprobs, "finish_reason": "length"}
    return web.json_response(head(body) | {"choices": [choice], "usage": usage(body, 1)})


@asynccontextmanager
async def servers(count: int, vllm: str = "") -> AsyncIterator[list[ModelServer]]:
    async with AsyncExitStack() as stack:
        model_servers = [await stack.enter_async_context(ModelServer(vllm)) for _ in range(count)]
        for server in model_servers:
            server.others = model_servers
        yield model_servers


def urls(model_servers: list[ModelServer]) -> tuple[str, ...]:
    return tuple(server.url for server in model_servers)


async def say(w: GatewayHarness, path: str, version: int = 0) -> tuple[int, Json]:
    return await w.http("POST", "/v1/runs/r/versions", {"version": version, "path": path})


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_backend_takes_the_weights_and_at_most_half_are_paused(
    tmp_path: Path, count: int
) -> None:
    async with (
        servers(count) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers), backend_key="k") as w,
        w.worker("run") as run,
    ):
        await w.run()
        assert await say(w, "/w/1") == (
            201,
            {"run_id": "r", "version": 1, "failed": {}, "pending": False, "verified": False},
        )
        assert [(server.path, server.number, server.paused) for server in model_servers] == [
            ("/w/1", "1", False)
        ] * count
        assert all(
            server.paths == ["/pause?mode=abort", "/update_weights", "/resume"]
            for server in model_servers
        )
        assert max(server.most_paused for server in model_servers) == max(1, count // 2)
        for server in model_servers:
            assert {key for path, key in server.keys.items() if path != "/health"} == {"Bearer k"}
        reports = [
            (pause.backend, pause.paused)
            for pause in (row.read(Paused) for row in await run.hear(Kind.PAUSED, 2 * count))
        ]
        assert sorted(reports) == sorted(
            (server.url, paused) for server in model_servers for paused in (True, False)
        )
        versions = [row.read(VersionPublished).version for row in await run.hear(Kind.VERSION, 2)]
        assert versions == [0, 1]


async def test_the_key_never_goes_to_an_address_that_a_run_merely_names(tmp_path: Path) -> None:
    """Whatever the gateway asks: what it is, its health, its labels, to take weights, a token."""
    async with (
        servers(2) as (ours, theirs),
        running_gateway(tmp_path, backends=(ours.url,), backend_key="k") as w,
    ):
        theirs.serves = True
        run_body = {"run_id": "r", "backends": [theirs.url]}
        assert (await w.http("POST", "/v1/runs", run_body))[0] == 201
        assert (await say(w, "/w/1"))[0] == 201
        theirs.silent = True
        async with asyncio.timeout(60):
            await until(lambda: w.core.state.balancer.state(theirs.url) == "ejected")
            theirs.silent = False
            theirs.keys.pop("/v1/completions", None)
            await until(lambda: "/v1/completions" in theirs.keys)
        words = {"/health", "/v1/models", "/weight_info", "/update_weights", "/v1/completions"}
        assert words <= theirs.keys.keys()
        assert set(theirs.keys.values()) == {""}
        assert (await w.http("POST", "/v1/backends", {"name": theirs.url}))[0] == 201
        assert (await say(w, "/w/2"))[0] == 201
        assert theirs.keys["/update_weights"] == "Bearer k", "now the operator has named it"
        assert (await w.http("DELETE", f"/v1/backends?name={theirs.url}"))[0] == 200
        assert (await say(w, "/w/3"))[0] == 201
        assert theirs.keys["/update_weights"] == "", "and has taken it back"


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ("0.32-transfer", ["/start_weight_update", "/update_weights", "/finish_weight_update"]),
        ("0.27", ["/collective_rpc", "/update_weight_version"]),
    ],
)
async def test_vllm_is_spoken_to_in_its_own_words(
    tmp_path: Path, vllm: str, words: list[str]
) -> None:
    async with (
        servers(1, vllm) as (server,),
        running_gateway(tmp_path, backends=(server.url,)) as w,
    ):
        await w.run()
        assert (await say(w, "/w/1"))[0] == 201
        assert server.paths == [
            "/init_weight_transfer_engine",
            "/pause?mode=abort",
            "/update_weight_version",
            *words,
            "/resume",
        ]
        assert (server.path, server.number) == ("/w/1", "1")


@pytest.mark.parametrize("pause", ["wait", "keep"])
async def test_what_becomes_of_calls_that_run_is_the_trainers_choice(
    tmp_path: Path, pause: str
) -> None:
    async with (
        servers(1, "0.27") as (server,),
        running_gateway(tmp_path, backends=(server.url,)) as w,
    ):
        await w.run()
        body = {"path": "/w/1", "pause": pause}
        assert (await w.http("POST", "/v1/runs/r/versions", body))[0] == 201
        assert server.paths[1] == f"/pause?mode={pause}"
        (row,) = (
            StoredRun(w.config.run_directory("r"))
            .sql("from versions where version > 0")
            .to_pylist()
        )
        assert row["pause"] == pause


async def test_an_adapter_replaces_the_adapter_that_the_model_names(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    path = str(tmp_path / "lora")
    async with (
        servers(1, "0.32") as (server,),
        running_gateway(tmp_path, backends=(server.url,), model="policy") as w,
    ):
        await w.run()
        assert (await say(w, path))[0] == 201
        words = ["/update_weight_version", "/v1/load_lora_adapter", "/update_weight_version"]
        assert server.paths[2:-1] == words, "its label says neither while it loads"
        assert (server.path, server.adapter, server.number) == (path, "policy", "1")
        assert (await say(w, "/w/2"))[0] == 201
        assert (server.path, server.number) == ("/w/2", "2"), "a whole checkpoint again"
    (tmp_path / "o").mkdir()
    async with servers(1) as (ours,), running_gateway(tmp_path / "o", backends=(ours.url,)) as w:
        await w.run()
        status, answer = await say(w, path)
        assert (status, "takes no adapter" in answer["message"]) == (503, True)


async def test_versions_are_a_table_of_the_run_directory(tmp_path: Path) -> None:
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
    ):
        await w.run()
        assert (await say(w, "/w/1"))[0] == 201
        model_servers[1].refuses = True
        assert (await say(w, "/w/2"))[0] == 201
        assert (await say(w, "/w/2", version=2))[0] == 200
        rows = StoredRun(w.config.run_directory("r")).sql("from versions order by version")
        kept = [
            (row["version"], row["path"], len(row["loaded_servers"])) for row in rows.to_pylist()
        ]
        assert kept == [(0, "", 2), (1, "/w/1", 2), (2, "/w/2", 1)], "once each, if said again"
        assert rows.column("label").to_pylist()[0] == "0", "what they were started with"
        (why,) = rows.column("failed_servers")[2].as_py()
        assert why.startswith(model_servers[1].url)
        assert rows.column("published_at")[0].as_py().year >= 2026
    assert not verify(w.config.run_directory("r"))


async def test_weights_that_are_not_the_ones_meant_are_not_published(tmp_path: Path) -> None:
    """A server that calls them so and says something else: the trainer knows what they say."""
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        server.serves = True
        await w.run()
        for logprob, status in ((-3.0, 503), (-1.05, 200)):
            own = {"prompt_ids": [1, 2], "ids": [64, 65], "logprobs": [-0.5, logprob]}
            body = {"version": 1, "path": "/w/1", "expected": own}
            reply_status, answer = await w.http("POST", "/v1/runs/r/versions", body)
            assert reply_status in (status, status + 1), answer
            if status == 503:
                assert "does not serve version 1" in answer["message"]
                assert "2 from those of the trainer" in answer["message"]
                assert w.core.state.balancer.fenced == {server.url}
        assert not w.core.state.balancer.fenced


async def test_tied_embeddings_are_named_where_logprobs_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    for tied in (True, False):
        config = orjson.dumps({"tie_word_embeddings": tied})
        (tmp_path / "w/config.json").write_bytes(config)
        (tmp_path / str(tied)).mkdir()
        async with (
            servers(1) as (server,),
            running_gateway(tmp_path / str(tied), backends=[server.url]) as w,
        ):
            server.serves = True
            await w.run()
            own = {"prompt_ids": [1, 2], "ids": [64, 65], "logprobs": [-0.5, -3.0]}
            body = {"version": 1, "path": str(tmp_path / "w"), "expected": own}
            reply_status, answer = await w.http("POST", "/v1/runs/r/versions", body)
            assert (reply_status, "python -m prorl.trainer.untie" in answer["message"]) == (
                503,
                tied,
            )


async def test_a_run_that_ended_gives_its_servers_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pool or named: whoever loads weights then is not overruled, and the next run says so."""
    monkeypatch.setattr(publish, "WATCH_S", 0.05)
    async with servers(2) as (ours, named), running_gateway(tmp_path, backends=(ours.url,)) as w:
        named.serves = True
        await w.run()
        await w.run("other", backends=[named.url])
        assert (await say(w, "/w/1"))[0] == 201
        body = {"path": "/w/o"}
        assert (await w.http("POST", "/v1/runs/other/versions", body))[0] == 201
        for run in ("r", "other"):
            assert (await w.http("DELETE", f"/v1/runs/{run}"))[0] in (200, 202)
        label = ours.version
        await asyncio.sleep(0.5)
        num_requests = [len(server.paths) for server in (ours, named)]
        ours.version = named.version = "somebody's"
        await asyncio.sleep(1.0)
        assert [len(server.paths) for server in (ours, named)] == num_requests
        assert not w.core.state.balancer.fenced
        ours.version = label
        await w.run("second")
        view = (await w.http("GET", "/v1/runs/second"))[1]
        assert view["start"] == [label.rpartition(":")[0]], "the first run's weights are its base"
        (row,) = StoredRun(w.config.run_directory("second")).sql("from versions").to_pylist()
        assert (row["version"], row["label"], row["loaded_servers"]) == (0, label, [ours.url])


async def test_a_backend_that_refuses_is_fenced_and_reported_until_it_takes_them(
    tmp_path: Path,
) -> None:
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
        w.worker("init") as init,
    ):
        await w.run()
        model_servers[0].refuses = True
        status, answer = await say(w, "/w/1")
        assert (status, list(answer["failed"])) == (201, [model_servers[0].url])
        assert not model_servers[0].paused, "a failed update must not leave it paused"
        states = {
            backend["name"]: backend["state"]
            for backend in (await w.http("GET", "/v1/status"))[1]["backends"]
        }
        assert states == {model_servers[0].url: "fenced", model_servers[1].url: "ready"}
        await w.submit(*(group(str(i)) for i in range(4)))
        await init.take(4)
        backends = {
            (await w.http("GET", f"/v1/runs/r/rollouts/{i}"))[1]["backend"] for i in range(4)
        }
        assert backends == {model_servers[1].url}
        model_servers[0].refuses = False
        assert await say(w, "/w/1", version=1) == (
            200,
            {"run_id": "r", "version": 1, "failed": {}, "pending": False, "verified": False},
        )
        assert model_servers[0].number == "1"
        assert model_servers[1].paths.count("/update_weights") == 1, "who has them is left alone"


async def test_without_any_updated_backend_nothing_is_published_and_the_id_is_spent(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        server.refuses = True
        assert (await say(w, "/w/1"))[0] == 503
        assert (await w.view())["version"] == 0
        assert (await say(w, "/w/other", version=1))[0] == 409
        server.refuses = False
        assert (await say(w, "/w/1", version=1))[0] == 201
        assert (await say(w, "/w/2"))[1]["version"] == 2


async def test_a_backend_that_lost_its_weights_gets_them_again_after_a_restart_of_the_gateway_too(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,):
        async with running_gateway(tmp_path, backends=(server.url,)) as w:
            await w.run()
            await say(w, "/w/1")
            await say(w, "/w/2")
        server.version = "0"
        async with running_gateway(tmp_path, backends=(server.url,)) as w:
            assert (await w.view())["version"] == 2
            await until(lambda: server.number == "2")
            assert server.path == "/w/2"
            assert (await say(w, "/w/3"))[1]["version"] == 3


async def test_an_id_issued_before_a_crash_is_not_issued_again(tmp_path: Path) -> None:
    async with servers(1) as (server,):
        async with running_gateway(tmp_path, backends=(server.url,)) as w:
            await w.run()
            server.refuses = True
            assert (await say(w, "/w/1"))[0] == 503
            w.crash()
        server.refuses = False
        async with running_gateway(tmp_path, backends=(server.url,)) as w:
            assert (await w.view())["version"] == 0
            assert (await say(w, "/w/1b"))[1]["version"] == 2


@pytest.mark.parametrize("freezes_at", ["before", "/update_weights"])
async def test_a_frozen_server_stalls_no_publication_and_gets_nothing_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freezes_at: str
) -> None:
    monkeypatch.setattr(probes, "LOADING_S", 0.2)
    async with (
        servers(2) as model_servers,
        running_gateway(tmp_path, backends=urls(model_servers)) as w,
    ):
        await w.run()
        frozen, well = model_servers
        frozen.silent, frozen.freezes_at = freezes_at == "before", freezes_at
        async with asyncio.timeout(60):
            status, answer = await say(w, "/w/1")
        assert (status, list(answer["failed"])) == (201, [frozen.url])
        assert (await w.view())["version"] == 1
        assert well.number == "1"
        assert frozen.url in w.core.state.balancer.fenced, "nothing before it has them"


async def test_a_slow_publication_is_answered_and_polled(
    tmp_path: Path,
) -> None:
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        await w.run()
        publisher, run = w.served.gateway.publisher, w.core.run("r")
        first = await publisher.publish(run, 1, "/w/1", wait_s=0.0)
        assert (first.version, first.pending) == (1, True)
        assert (await say(w, "/w/1", version=1))[0] == 201
        assert server.paths.count("/update_weights") == 1, "one load for both"


async def test_who_joins_late_gets_nothing_before_it_has_the_newest_weights(
    tmp_path: Path,
) -> None:
    async with servers(2) as (first, late), running_gateway(tmp_path, backends=(first.url,)) as w:
        await w.run()
        assert (await say(w, "/w/1"))[0] == 201
        late.refuses = True
        w.served.gateway.publisher.joined(late.url)
        w.core.set_backend(late.url, "ready")
        assert w.core.state.balancer.state(late.url) == "fenced"
        late.refuses = False
        await until(lambda: w.core.state.balancer.state(late.url) == "ready")
        assert (late.path, late.number) == ("/w/1", "1")


async def test_who_comes_back_gets_nothing_before_it_has_the_newest_weights(
    tmp_path: Path,
) -> None:
    """It was started anew meanwhile, and nothing was published: only its return says so."""
    async with servers(1) as (server,), running_gateway(tmp_path, backends=(server.url,)) as w:
        server.serves = True
        await w.run()
        assert (await say(w, "/w/1"))[0] == 201
        health, balancer = w.core.watched.health(server.url), w.core.state.balancer
        server.version, server.refuses = "0", True
        w.core.watched.reported(server.url, BackendFault.REFUSED, 1, 1, "reset")
        assert health.is_out
        async with asyncio.timeout(120):
            while health.is_out:
                assert balancer.state(server.url) != "ready"
                await asyncio.sleep(0.001)
            assert balancer.state(server.url) == "fenced"
            server.refuses = False
            await until(lambda: balancer.state(server.url) == "ready")
        assert server.number == "1"
