"""HTTP: identity of submissions, clear refusals, the token, the limits."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
from pathlib import Path

import aiohttp
import jsonschema
import orjson
import pytest

from prorl.client import connect
from prorl.config import RunConfig
from prorl.errors import TaskError
from prorl.service.http.guard import MAX_BODY_BYTES
from prorl.service.serve import bind
from prorl.service.submissions import by_model, check_env_exists
from prorl.task_json import task_from_row
from prorl.types import Json, Task
from tests.service.running_gateway import TOKEN, group, running_gateway


def task(**changes: Json) -> Json:
    return {"task": {"task_id": "t", "env": "noop", "prompt": "p"}, **changes}


def long(prompt: str) -> Json:
    return {"task": {"task_id": "t", "env": "math", "prompt": prompt, "data": {"answer": "1"}}}


async def test_the_same_key_from_fifty_clients_at_once_is_a_single_group(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        answers = await asyncio.gather(
            *(
                w.http("POST", "/v1/runs/r/groups", {"groups": [task(key="k", n=3)]})
                for _ in range(50)
            )
        )
        assert sorted({status for status, _ in answers}) == [200, 202]
        assert {answer["groups"][0]["group_id"] for _, answer in answers} == {0}
        assert sum(answer["groups"][0]["created"] for _, answer in answers) == 1
        assert (await w.view())["counts"]["queued"] == 3
        status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": [task(key="k", n=4)]})
        assert (status, answer["code"]) == (409, "conflict")


async def test_a_batch_is_refused_whole_and_names_the_row(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        cases: list[tuple[Json, int, str]] = [
            ([task(), {"task": {"task_id": "x", "env": "nope", "prompt": ""}}], 422, "groups[1]"),
            ([task(), task(n=0)], 422, "groups.1.n"),
            ([long("x" * 16385)], 422, "at most 16,384: limits.max_tokens = 16,384"),
            ([task(key="a"), task(key="a", n=2)], 409, "groups[1]"),
            ([task(colour="red")], 422, "unknown key `groups.0.colour`"),
            ([], 422, "groups"),
            (
                [{"task": {"task_id": "x", "env": "math", "prompt": "", "data": {}}}],
                422,
                "groups[0] (task 'x')",
            ),
        ]
        for groups, expected, says in cases:
            status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": groups})
            assert (status, says in answer["message"]) == (expected, True), answer
            assert answer["request_id"]
        assert (await w.view())["counts"]["queued"] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task_id": "a\0b"}, "holds NUL"),
        ({"data": {"x": [1.0, {"y": float("nan")}]}}, "nan in its data"),
        ({"data": {"x": float("-inf")}}, "-inf in its data"),
    ],
)
async def test_what_would_be_stored_otherwise_than_sent_is_refused(
    tmp_path: Path, changes: Json, says: str
) -> None:
    """Else NaN is null in the log and a NUL ends a name in half of the tools that read it."""
    async with running_gateway(tmp_path) as w:
        await w.run()
        values = {"task_id": "t", "env": "noop", "prompt": "p", **changes}
        body: Json = {"groups": [{"task": values}]}
        status, answer = await w.http("POST", "/v1/runs/r/groups", body)
        assert (status, says in answer["message"], "\n" in answer["message"]) == (422, True, False)
        with pytest.raises(TaskError, match=says), connect("http://127.0.0.1:1") as client:
            client.submit("r", [values])
        with pytest.raises(TaskError, match=says):
            task_from_row(values)


async def test_a_run_that_is_there_with_another_config_says_which_keys_differ(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run(limits={"run_s": 10.0}, seed=2)
        body = {"run_id": "r", "limits": {"run_s": 20.0}, "seed": 2, "filter": "dapo"}
        status, answer = await w.http("POST", "/v1/runs", body)
        assert status == 409
        assert "other filter, limits.run_s;" in answer["message"], answer


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_p": 0.9, "temperature": 0.7}, "top_p 1 and top_k 0"),
        ({"temperature": 0.0}, "a temperature above 0"),
        ({"temperature": 1.0}, "the run's 0.7"),
        ({"max_tokens": 9}, "the run's 0.7"),  # what is not said is the default, 1
        ({"temperature": 0.7, "max_tokens": 9}, ""),
    ],
)
async def test_a_run_that_trains_takes_no_group_of_another_distribution(
    sampling: Json, expected: str, tmp_path: Path
) -> None:
    """Its logprobs would not be the policy's own, or a trainer's ratios those of another one."""
    async with running_gateway(tmp_path) as w:
        await w.run("trains", delivery="stream", sampling={"temperature": 0.7})
        await w.run("stored")
        groups = [task(sampling=sampling)]
        status, reply = await w.http("POST", "/v1/runs/trains/groups", {"groups": groups})
        assert status == (422 if expected else 202), reply
        assert expected in reply.get("message", ""), reply
        assert (await w.http("POST", "/v1/runs/stored/groups", {"groups": groups}))[0] == 202
        body = {"run_id": "greedy", "delivery": "stream", "sampling": {"temperature": 0}}
        status, reply = await w.http("POST", "/v1/runs", body)
        assert (status, "a temperature above 0" in reply["message"]) == (422, True), reply


def test_a_thinking_model_has_default_budgets_for_its_thoughts() -> None:
    """With 1,024 tokens most first thoughts were cut off, and 300 s end those of 9,000."""
    thinks = {"thinks": True}
    unsaid = by_model(RunConfig(run_id="r"), thinks)
    assert (unsaid.sampling.max_tokens, unsaid.limits.run_s) == (16384, 1800.0)
    values: Json = {"sampling": {"max_tokens": 99}, "limits": {"run_s": 7, "max_tokens": 5000}}
    config = RunConfig.model_validate({"run_id": "r", **values})
    assert by_model(config, thinks) == config
    codex = by_model(RunConfig(run_id="r", agent="codex"), {"thinks": False})
    assert (codex.limits.max_turns, codex.limits.run_s, codex.journal) == (200, 1800.0, "off")
    few = RunConfig.model_validate({"run_id": "r", "agent": "codex", "limits": {"max_turns": 3}})
    assert by_model(few, thinks).limits.max_turns == 3
    assert by_model(RunConfig(run_id="r"), {"thinks": False}).sampling.max_tokens == 4096
    assert "max_tokens" not in unsaid.limits.model_fields_set, "no claim on a server's context"


async def test_ten_thousand_groups_in_a_single_request(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        accepted = await w.submit(*(group(f"t{i}", n=2) for i in range(10_000)), last=True)
        assert [entry["group_id"] for entry in accepted] == list(range(10_000))
        assert (await w.view())["counts"]["queued"] == 20_000


async def test_runs_are_idempotent_by_name_and_config(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        body = {"run_id": "a", "seed": 3}
        assert [(await w.http("POST", "/v1/runs", body))[0] for _ in range(2)] == [201, 200]
        assert (await w.http("POST", "/v1/runs", {"run_id": "a", "seed": 4}))[0] == 409
        assert (await w.http("POST", "/v1/runs", {"run_id": "../x"}))[0] == 422
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "b", "agent": "nobody"})
        assert (status, "unknown agent 'nobody'" in answer["message"]) == (422, True), answer
        assert [run["run_id"] for run in (await w.http("GET", "/v1/runs"))[1]["runs"]] == ["a"]
        manifest = orjson.loads((w.config.root / "a" / "manifest.json").read_bytes())
        assert manifest["config"]["seed"] == 3


async def test_code_named_by_its_place_is_not_loaded_unless_the_service_says_so(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "b", "agent": "os:abort"})
        assert (status, "does not load" in answer["message"]) == (422, True), answer
        body = {"groups": [{"task": {"task_id": "x", "env": "os:abort", "prompt": ""}}]}
        status, answer = await w.http("POST", "/v1/runs/r/groups", body)
        assert (status, "does not load" in answer["message"]) == (422, True), answer
        assert (await w.view())["counts"]["queued"] == 0
    task = Task(task_id="x", env="prorl.envs.noop:NoopEnv", prompt="")
    pending_check = check_env_exists(load_code=True)(task, lambda env, messages, tools: None)
    assert pending_check is not None
    await pending_check


async def test_a_directory_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        (w.config.root / "mine").mkdir()
        (w.config.root / "mine" / "thesis.txt").write_text("years")
        assert (await w.http("POST", "/v1/runs", {"run_id": "mine"}))[0] == 409
        assert [path.name for path in (w.config.root / "mine").iterdir()] == ["thesis.txt"]
        (w.config.root / "newer").mkdir()
        (w.config.root / "newer" / "manifest.json").write_text(
            '{"schema_version": 99, "config": {}}'
        )
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "newer"})
        assert (status, "read it with that version" in answer["message"]) == (422, True)


async def test_a_run_without_its_directory_is_not_resumed(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        assert (await w.http("POST", "/v1/runs", {"run_id": "a"}))[0] == 201
        shutil.rmtree(w.config.root / "a")
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "a"})
        assert (status, "choose another run_id" in answer["message"]) == (409, True), answer


async def test_a_run_needs_a_backend(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=()) as w:
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "a"})
        assert (status, "no backend" in answer["message"]) == (422, True)
        assert (await w.http("POST", "/v1/backends", {"name": "scripted:noop"}))[0] == 201
        assert (await w.http("POST", "/v1/runs", {"run_id": "a"}))[0] == 201
        assert (await w.http("DELETE", "/v1/backends?name=other"))[0] == 404
    async with running_gateway(tmp_path, backends=()) as w:
        (backend,) = (await w.http("GET", "/v1/status"))[1]["backends"]
        assert backend == {
            "name": "scripted:noop",
            "state": "ready",
            "in_flight": 0,
            "in_pool": True,
            "reason": "",
            "busy_replies": 0,
            "refused_replies": 0,
            "cached_share": None,
            "reused_share": None,
        }


async def test_a_filter_that_does_not_bind_is_refused_when_the_run_is_made(
    tmp_path: Path,
) -> None:
    body = {"run_id": "r", "filter": "copy rollouts to 'x'", "backends": ["scripted:noop"]}
    async with running_gateway(tmp_path) as w:
        status, answer = await w.http("POST", "/v1/runs", body)
        assert (status, answer["code"]) == (422, "invalid"), answer
        assert not (tmp_path / "r").exists()


async def test_after_last_only_existing_groups_are_accepted(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        await w.submit(group(key="k"))
        assert await w.submit(last=True) == [], "without a group, too"
        assert (await w.submit(group(key="k")))[0]["created"] is False
        assert (await w.http("POST", "/v1/runs/r/groups", {"groups": [task(key="new")]}))[0] == 409


async def test_bodies_are_bounded_whatever_the_header_says(tmp_path: Path) -> None:
    async def endless() -> object:
        while True:
            yield b" " * (MAX_BODY_BYTES // 2)

    async with (
        running_gateway(tmp_path) as w,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session,
    ):
        async with session.post(
            w.served.http + "/v1/runs", data=io.BytesIO(b"x" * (MAX_BODY_BYTES + 1))
        ) as answer:
            assert (answer.status, (await answer.json())["code"]) == (413, "too_large")
        await w.run()
        for path in ("/v1/runs", "/v1/runs/r/groups"):
            async with session.post(w.served.http + path, data=endless()) as answer:
                assert (answer.status, (await answer.json())["code"]) == (413, "too_large")


async def test_unknown_things_are_404_and_wrong_methods_405(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        for path in ("/v1/runs/x", "/v1/runs/r/groups/7", "/v1/runs/r/rollouts/7", "/v1/nothing"):
            status, answer = await w.http("GET", path)
            assert (status, answer["code"]) == (404, "not_found")
        assert (await w.http("PUT", "/v1/runs"))[0] == 405


async def test_openapi_names_every_route_and_resolves(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        _, document = await w.http("GET", "/v1/openapi.json")
        assert "/v1/runs/{run_id}/groups" in document["paths"]
        names = set(document["components"]["schemas"])
        used = {ref.split("/")[-1] for ref in _refs(document)}
        assert used <= names
        assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        error = document["components"]["schemas"]["ErrorBody"]
        ids = [r["operationId"] for methods in document["paths"].values() for r in methods.values()]
        assert {"create_run", "submit_groups", "publish_version", "get_status"} <= set(ids)
        assert len(ids) == len(set(ids)), "each is a method of a generated client"
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                statuses = {int(code) for code in route["responses"]}
                assert statuses >= {401, 403, 404, 409, 422, 429, 500, 503, 507}, (path, method)
                shape = route["responses"]["409"]["content"]["application/json"]["schema"]
                assert shape == {"$ref": "#/components/schemas/ErrorBody"}
        for path in ("/v1/runs", "/v1/runs/{run_id}/groups", "/v1/runs/{run_id}/versions"):
            assert {"200", "202"} <= set(document["paths"][path]["post"]["responses"]), path
        answers = {
            (method, path): [
                answer["content"]["application/json"]["schema"]
                for status, answer in route["responses"].items()
                if status[0] == "2"
            ]
            for path, methods in document["paths"].items()
            for method, route in methods.items()
        }
        free = {("get", "/v1/openapi.json"), ("get", "/metrics")}
        assert all("$ref" in shape for key in answers.keys() - free for shape in answers[key])
        _, answer = await w.http("GET", "/v1/runs/nobody")
        assert set(answer) == set(error["properties"]) == set(error["required"])


async def test_what_is_sent_has_the_shape_that_openapi_shows(tmp_path: Path) -> None:
    requests = [
        ("POST", "/v1/runs", "/v1/runs", {"run_id": "r"}),
        (
            "POST",
            "/v1/runs/{run_id}/groups",
            "/v1/runs/r/groups",
            {"groups": [group("t", n=2).model_dump(mode="json")]},
        ),
        ("POST", "/v1/runs/{run_id}/versions", "/v1/runs/r/versions", {"version": 1}),
        *(("GET", path, path, None) for path in ("/v1/runs", "/v1/status", "/v1/node", "/healthz")),
        ("GET", "/v1/runs/{run_id}", "/v1/runs/r", None),
        *(
            (method, f"/v1/runs/{{run_id}}/{what}s/{{{what}_id}}", f"/v1/runs/r/{what}s/0", None)
            for method in ("GET", "DELETE")
            for what in ("group", "rollout")
        ),
        ("GET", "/v1/backends", "/v1/backends", None),
        ("PUT", "/v1/backends", "/v1/backends", {"backends": ["scripted:oracle"]}),
        ("POST", "/v1/backends", "/v1/backends", {"name": "scripted:noop"}),
        ("DELETE", "/v1/backends", "/v1/backends?name=scripted:noop", None),
        ("POST", "/v1/nodes/{node}/drain", "/v1/nodes/local/drain", {}),
        ("DELETE", "/v1/runs/{run_id}", "/v1/runs/r", None),
    ]
    async with running_gateway(tmp_path) as w, w.worker("store"), w.worker("run"):
        _, document = await w.http("GET", "/v1/openapi.json")
        shapes = document["components"]["schemas"]
        for shape in shapes.values():
            shape.setdefault("additionalProperties", False)
        for method, route, path, body in requests:
            status, answer = await w.http(method, path, body)
            assert 200 <= status < 300, (method, path, answer)
            response = document["paths"][route][method.lower()]["responses"][str(status)]
            schema = response["content"]["application/json"]["schema"]
            jsonschema.validate(answer, {**schema, "components": {"schemas": shapes}})


async def test_no_answer_sends_to_the_host_that_the_request_named(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "host": "elsewhere.example"}
    async with running_gateway(tmp_path) as w, aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"{w.served.http}/v1/runs/", allow_redirects=False) as answer:
            assert answer.status == 404
        async with session.put(f"{w.served.http}/v1/runs") as answer:
            assert (answer.status, bool(answer.headers["allow"])) == (405, True)


def _refs(value: Json) -> list[str]:
    if isinstance(value, dict):
        return [v for k, v in value.items() if k == "$ref"] + [
            ref for v in value.values() for ref in _refs(v)
        ]
    return [ref for v in value for ref in _refs(v)] if isinstance(value, list) else []


def test_answers_never_wait_for_an_ack() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP, (
                "what asyncio looks at before it sets TCP_NODELAY"
            )


async def test_a_value_that_columns_cannot_hold_is_refused_in_a_single_line(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        task = {"task_id": "t", "env": "noop", "prompt": "x"}
        for body, text in (
            ({"task": {**task, "data": {"x": "y" * (5 << 20)}}}, "at most 4,194,304"),
            ({"task": task, "extra": {"x": "y" * (1 << 20)}}, "`extra` takes 1,048,584 bytes"),
        ):
            status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": [body]})
            assert (status, text in answer["message"]) == (422, True), answer
            assert "groups[0] (task 't')" in answer["message"]
        # JSON columns hold integers of any size, columns and SQLite those of 64 bits
        for long in (2**63, 2**64, -(2**63) - 1, 10**400):
            exact: Json = {"task": {**task, "data": {"x": [long]}}, "extra": {"x": long}}
            status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": [exact]})
            assert status == 202, answer
            for name in ("top_k", "max_tokens"):
                hot: Json = {"task": task, "sampling": {name: long}}
                status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": [hot]})
                assert (status, f"sampling.{name}" in answer["message"]) == (422, True), answer
            for name in ("version", "trained"):
                status, answer = await w.http("POST", "/v1/runs/r/versions", {name: long})
                assert (status, name in answer["message"]) == (422, True), answer
        for path in ("groups", "rollouts"):
            for number in (2**63, 2**64, -1):
                assert (await w.http("GET", f"/v1/runs/r/{path}/{number}"))[0] in (404, 422)
                assert (await w.http("DELETE", f"/v1/runs/r/{path}/{number}"))[0] in (404, 422)
        for name in ("token", "control.db", "control.lock", "tls"):
            status, answer = await w.http("POST", "/v1/runs", {"run_id": name})
            assert (status, "expected none of" in answer["message"]) == (422, True), answer
        (w.config.root / "notes").write_text("somebody's file")
        status, answer = await w.http("POST", "/v1/runs", {"run_id": "notes"})
        assert (status, "choose another run_id" in answer["message"]) == (409, True), answer


async def test_a_full_queue_is_429_and_accepts_nothing_of_the_request(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, max_queued_rollouts=1000) as w:
        await w.run()
        first = await w.submit(*(group(f"{i}", key=f"k{i}") for i in range(1000)))
        body = [group("a").model_dump(mode="json")]
        status, answer = await w.http("POST", "/v1/runs/r/groups", {"groups": body})
        assert (status, answer["code"]) == (429, "queue_full"), answer
        assert (await w.view())["counts"]["queued"] == 1000
        again = await w.submit(*(group(f"{i}", key=f"k{i}") for i in range(1000)))
        assert [entry["group_id"] for entry in again] == [entry["group_id"] for entry in first]
