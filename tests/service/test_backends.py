"""`/v1/backends`: asked before they count, refused in one line, remembered over restarts; and who
waits when nobody serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl.backends import open_backend
from prorl.backends.server import TokenServer
from prorl.cli.app import dispatch
from prorl.control import Assigned, BackendStatus, CallTotals, Failover, Kind, Started, Stats
from prorl.envs import get_env
from prorl.errors import FencedError
from prorl.net.bearer import keys_of, signing_key
from prorl.service.http.metrics import exposition
from prorl.testing import RENDERER
from prorl.tokenizer import ByteTokenizer
from prorl.types import AttemptKey, BackendFault, Json
from tests.service.running_gateway import TOKEN, GatewayHarness, group, running_gateway
from tests.waiting import until


@asynccontextmanager
async def served(policy: str = "scripted:random", context: int = 1 << 20) -> AsyncIterator[str]:
    """A model server that passes every question, or samples raw logprobs."""
    backend = open_backend(policy, RENDERER, get_env)
    async with TokenServer(backend, ByteTokenizer(), model="toy", max_model_len=context) as server:
        yield server.url


async def names(w: GatewayHarness) -> dict[str, str]:
    backends: Json = (await w.http("GET", "/v1/backends"))[1]["backends"]
    return {backend["name"]: backend["state"] for backend in backends}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("not a url", "not a url"),
        (f"http://{'x' * 64}.org", "label"),
        ("http://", "HOST"),
        ("http://h:99999", "ort"),
        ("http://h:1/v1", "/v1"),
        ("http://user:pw@h:1", "HOST"),
        ("scripted:nobody", "nobody"),
        ("embedded:/models/a", "http://"),
        ("http://127.0.0.1:9", "start the model server"),
    ],
)
async def test_an_unusable_backend_is_refused_in_a_single_line_and_not_added(
    tmp_path: Path, name: str, expected: str
) -> None:
    async with running_gateway(tmp_path) as w:
        for method, path, body in (
            ("POST", "/v1/backends", {"name": name}),
            ("PUT", "/v1/backends", {"backends": ["scripted:noop", name]}),
            ("POST", "/v1/runs", {"run_id": "r", "backends": [name]}),
        ):
            status, answer = await w.http(method, path, body)
            assert status == 422, answer
            assert expected in answer["message"]
            assert "\n" not in answer["message"]
        assert list(await names(w)) == ["scripted:oracle"]
        assert (await w.http("GET", "/v1/runs"))[1]["runs"] == []


async def test_a_trainers_token_names_no_server_that_the_pool_lacks(tmp_path: Path) -> None:
    """Else it has the service's host ask any URL; the owner may, and anybody one of the pool."""
    signing_key(tmp_path / "root")
    async with (
        served() as inside,
        served() as other,
        running_gateway(tmp_path, backends=(inside,)) as w,
    ):
        keys = keys_of(w.config)
        for role, name, status in (
            ("trainer", other, 403),
            ("trainer", inside, 201),
            ("owner", other, 201),
        ):
            token = TOKEN if role == "owner" else keys.issue(role)[1]
            body: Json = {"run_id": f"{role}-{status}", "backends": [name]}
            reply_status, answer = await w.http("POST", "/v1/runs", body, token)
            assert reply_status == status, answer
            assert status == 201 or "the pool, which is the owner's" in answer["message"]


async def test_raw_logprobs_another_model_and_another_vocabulary_are_refused(
    tmp_path: Path,
) -> None:
    async with served("scripted:random?raw=1") as raw, served() as good:
        async with running_gateway(tmp_path) as w:
            status, answer = await w.http("POST", "/v1/backends", {"name": raw})
            assert (status, "processed_logprobs" in answer["message"]) == (422, True)
            assert (await w.http("POST", "/v1/backends", {"name": good}))[0] == 201
        async with running_gateway(tmp_path, model="other") as w:
            await w.http("DELETE", f"/v1/backends?name={good}")
            status, answer = await w.http("POST", "/v1/backends", {"name": good})
            assert (status, "'toy'" in answer["message"]) == (422, True)


async def test_a_run_that_wants_a_longer_context_than_its_servers_have_is_refused(
    tmp_path: Path,
) -> None:
    async with served(context=512) as short, running_gateway(tmp_path, backends=(short,)) as w:
        run_body: Json = {"run_id": "r", "limits": {"max_tokens": 513}}
        status, answer = await w.http("POST", "/v1/runs", run_body)
        assert status == 422
        assert all(part in answer["message"] for part in (short, "512", "513", "--max-model-len"))
        for name, limits in (("fits", {"max_tokens": 512}), ("unsaid", {})):
            run_body = {"run_id": name, "limits": limits}
            assert (await w.http("POST", "/v1/runs", run_body))[0] == 201


async def test_a_server_that_takes_no_weights_is_refused_before_a_token_is_sampled(
    tmp_path: Path,
) -> None:
    """The server is as vLLM before 0.27, or outside of its developer mode: no `/weight_info`."""
    async with served() as old, running_gateway(tmp_path, backends=(old,)) as w:
        run_body: Json = {"run_id": "r", "delivery": "stream"}
        status, answer = await w.http("POST", "/v1/runs", run_body)
        assert status == 422, answer
        words = ("takes no weights", "vLLM 0.27 or later", "VLLM_SERVER_DEV_MODE=1", "`store`")
        assert all(word in answer["message"] for word in words)
        assert "\n" not in answer["message"]
        assert not (tmp_path / "root/r").exists()
        assert (await w.http("POST", "/v1/runs", {"run_id": "r"}))[0] == 201
    (tmp_path / "other").mkdir()
    async with served() as old, running_gateway(tmp_path / "other") as w:
        assert (await w.http("POST", "/v1/runs", run_body))[0] == 201
        status, answer = await w.http("POST", "/v1/backends", {"name": old})
        assert (status, "takes no weights" in answer["message"]) == (422, True)


async def test_a_server_added_while_runs_are_open_is_checked_against_their_vocabularies(
    tmp_path: Path,
) -> None:
    async with served(context=512) as short, running_gateway(tmp_path) as w:
        long: Json = {"run_id": "long", "limits": {"max_tokens": 513}}
        assert (await w.http("POST", "/v1/runs", long))[0] == 201
        for method, path, body in (
            ("POST", "/v1/backends", {"name": short}),
            ("PUT", "/v1/backends", {"backends": [short]}),
        ):
            status, answer = await w.http(method, path, body)
            assert (status, "--max-model-len" in answer["message"]) == (422, True)
        assert list(await names(w)) == ["scripted:oracle"]


async def test_simultaneous_replacements_of_the_pool_do_not_mix(tmp_path: Path) -> None:
    """Not both lists together: what was there is read and replaced in one go."""
    async with served() as first, served() as two, running_gateway(tmp_path) as w:
        pools = [[first], [two, "scripted:noop"]]
        requests = (w.http("PUT", "/v1/backends", {"backends": pool}) for pool in pools)
        assert [status for status, _ in await asyncio.gather(*requests)] == [200, 200]
        assert sorted(await names(w)) in [sorted(pool) for pool in pools]


async def test_the_last_pool_stands_over_restarts(tmp_path: Path) -> None:
    """The log's word stands over the config's."""
    more: Json = {"backends": ("scripted:oracle", "scripted:noop")}
    async with served() as url:
        async with running_gateway(tmp_path, **more) as w:
            assert (await w.http("POST", "/v1/backends", {"name": f"{url}/"}))[0] == 201
            await w.http("DELETE", "/v1/backends?name=scripted:oracle")
            await w.http("DELETE", "/v1/backends?name=scripted:noop&drain=true")
        async with running_gateway(tmp_path, **more) as w:
            assert await names(w) == {"scripted:noop": "draining", url: "ready"}
            pool = {"backends": ["scripted:random", url]}
            assert (await w.http("PUT", "/v1/backends", pool))[0] == 200
        async with running_gateway(tmp_path, **more) as w:
            assert await names(w) == {"scripted:random": "ready", url: "ready"}
            assert (await w.http("POST", "/v1/backends", {"name": "scripted:oracle"}))[0] == 201
        async with running_gateway(tmp_path, **more) as w:
            assert "scripted:oracle" in await names(w)


async def test_an_attempt_that_lost_its_backend_waits_and_is_neither_charged_nor_ended(
    tmp_path: Path,
) -> None:
    async with (
        served() as primary,
        served() as two,
        running_gateway(tmp_path, backends=(primary, two)) as w,
        w.worker("init") as init,
        w.worker("run") as run,
    ):
        (backend_status,) = [row.read(BackendStatus) for row in await run.hear(Kind.BACKENDS)][:1]
        assert (backend_status.unreachable, set(backend_status.keyed)) == ((), {primary, two})
        await w.run()
        await w.submit(group("a"))
        (key,) = await init.take(1)
        run.say(Started(), key)
        first = (await rollout(w))["backend"]
        other = {primary: two, two: primary}[first]

        def lost(
            backend: str, trouble: BackendFault = BackendFault.ERROR, **more: Json
        ) -> Failover:
            return Failover(attempt=key, backend=backend, trouble=trouble, **more)

        assert await run.ask(lost(first), "r") == Assigned(backend=other), "not to who failed it"
        assert await run.ask(lost(first), "r") == Assigned(backend=other), "said again: what stands"
        w.core.state.serves[primary] = w.core.state.serves[two] = ("r", 2)
        w.core.state.balancer.fence(first)
        assignment = asyncio.ensure_future(run.ask(lost(other, min_version=2), "r"))
        assert (await assignment).backend == other, "the sole one that is able, though it failed"
        seen = await rollout(w)
        assert (seen["state"], seen["attempt"], seen["infra_failures"]) == ("running", 1, 0)
        stale = AttemptKey("r", key.rollout_id, 7)
        with pytest.raises(FencedError):
            await run.ask(Failover(attempt=stale, backend=primary, trouble=BackendFault.ERROR), "r")


async def rollout(w: GatewayHarness) -> Json:
    return (await w.http("GET", "/v1/runs/r/rollouts/0"))[1]


async def test_with_nobody_well_nothing_is_leased_and_nobody_fails(tmp_path: Path) -> None:
    async with (
        served() as url,
        running_gateway(tmp_path, backends=(url,)) as w,
        w.worker("init") as init,
        w.worker("run") as run,
    ):
        await w.run()
        await w.submit(group("a"), group("b"))
        (key, _) = await init.take(2)
        w.core.watched.tried = lambda *_: None  # it does not come back by itself
        lost = Failover(attempt=key, backend=url, trouble=BackendFault.REFUSED, message="reset")
        assignment = asyncio.ensure_future(run.ask(lost, "r"))
        unavailable = [
            row.read(BackendStatus).unreachable for row in await run.hear(Kind.BACKENDS, 2)
        ]
        assert unavailable[-1] == (url,), "told to RUN at once"
        await w.submit(group("c"))
        view = await w.view()
        assert (view["counts"]["queued"], view["counts"]["failed"]) == (1, 0)
        assert not assignment.done()
        w.core.watched.health(url).back(0.0)
        w.core.state.balancer.restore(url)
        w.served.gateway.wake()
        assert (await assignment).backend == url
        assert len(await init.take(1)) == 1


async def test_the_command_changes_the_pool_and_shows_prefix_reuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    async with served() as url, running_gateway(tmp_path) as w, w.worker("run") as run:
        run.stats = Stats(
            backends={url: CallTotals(prompt=400, cached=150, reusable=200, reused=150)}
        )
        await until(lambda: w.core.state.workers["run-0"].status.stats.get("run") == run.stats)
        where = ("--url", w.served.http)

        async def cli(*argv: str) -> tuple[int, str]:
            code = await asyncio.to_thread(dispatch, ["backends", *argv, *where])
            return code, " ".join(capsys.readouterr()).strip()

        assert (await cli("add", url))[0] == 0
        code, output = await cli()
        assert code == 0
        assert all(part in output for part in (url, "75%", "scripted:oracle"))
        await w.run()
        reuse = CallTotals(prompt=400, cached=150, reusable=200, reused=150)
        run.stats = Stats(backends=run.stats.backends, runs={"r": reuse})
        await until(lambda: w.core.state.workers["run-0"].status.stats.get("run") == run.stats)
        (run_status,) = (await w.http("GET", "/v1/status"))[1]["runs"]
        assert (run_status["reused_share"], run_status["cached_share"]) == (0.75, 0.375)
        text = exposition(w.core, 0, "0").decode()
        assert f'prorl_backend_reused_tokens_total{{backend="{url}"}} 150.0' in text
        assert 'prorl_run_reusable_tokens_total{run="r"} 200.0' in text
        assert (await cli("set", url))[0] == 0
        assert list(await names(w)) == [url]
        assert (await cli("drain", url))[0] == 0
        assert await names(w) == {url: "draining"}
        for words, why in (
            (("rm", "http://nobody:1"), "not in the pool"),
            (("add", "nonsense"), "http://HOST:PORT"),
            (("add",), "at least one"),
        ):
            code, printed = await cli(*words)
            assert (code, why in printed, "\n" in printed) == (2, True, False), printed
