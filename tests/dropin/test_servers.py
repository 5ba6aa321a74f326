"""Clients written from the two protocols' own descriptions, against a real service."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pytest
from aiohttp import ClientSession, ClientTimeout

from prorl.client import connect
from prorl.config import ServiceConfig
from prorl.deploy.running import service, signals
from prorl.dropin.nemo_gym import TASK_INDEX
from prorl.dropin.rollouts import MAX_IDLE_RUNS
from prorl.schema.sequences import read_sequences
from prorl.storage.read.catalog import StoredRun
from prorl.task_json import task_to_json
from prorl.tasks import load_tasks
from prorl.types import Json, Sequence
from tests.integration.run_checks import rows
from tests.waiting import until

WORKERS = 70
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ORACLE = "scripted:oracle"


class Spoken(NamedTuple):
    """A drop-in server, and a client of it."""

    url: str
    root: Path
    http: ClientSession

    async def post(self, path: str, body: Json = None, status: int = 200) -> Json:
        data = io.BytesIO(json.dumps(body).encode())  # aiohttp warns of a MiB in one piece
        headers = {"content-type": "application/json"}
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def get(self, path: str, status: int = 200) -> Json:
        async with self.http.get(self.url + path) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    @property
    def stored(self) -> list[StoredRun]:
        return [StoredRun(path.parent) for path in self.root.glob("*/manifest.json")]

    async def num_requested(self) -> int:
        """Rollouts that the service was ever asked for."""
        with connect(self.root) as client:  # in a thread: the service is on this loop
            status = await asyncio.to_thread(client.status)
        return sum(sum(run["counts"].values()) for run in status["runs"])

    def states(self) -> dict[str, int]:
        if not self.stored:
            return {}
        counts = rows(self.stored[0], "select status, count(*) as n from rollouts group by 1")
        return {row["status"]: row["n"] for row in counts}


@asynccontextmanager
async def serving(root: Path, kind: str, policy: str = ORACLE) -> AsyncIterator[Path]:
    """The root of a service, which `spoken` speaks for."""
    config = ServiceConfig.model_validate(
        {
            "root": root,
            "workers": 0,
            "backends": (policy,) if policy else (),
            "sandbox": {"kind": kind},
            "run": {"slots": 70},
            "store": {"flush_s": 0.1},
        }
    )
    async with signals() as stop, service(config, stop):
        yield root


@asynccontextmanager
async def spoken(name: str, root: Path) -> AsyncIterator[Spoken]:
    """A drop-in server beside a service."""
    words = ["-m", "prorl.dropin", name, str(root), "--service", str(root)]
    more = ["--port", "0", "--parent", str(os.getpid())]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, *more), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    try:
        async with ClientSession(timeout=ClientTimeout(120)) as http:
            yield Spoken(url, root, http)
    finally:
        process.terminate()
        await process.wait()


def shop(n: int) -> list[dict[str, Json]]:
    return [orjson.loads(task_to_json(task)) for task in load_tasks(f"shop:train?n={n}&seed=3")]


def sequences(stored: StoredRun) -> dict[int, Sequence]:
    """Returns the sequence of each rollout; each has one."""
    table = stored.read("sequences").combine_chunks()
    ids = table.column("rollout_id").to_pylist()
    sequences_read = [
        sequence for part in table.to_struct_array().chunks for sequence in read_sequences(part)
    ]
    return dict(zip(ids, sequences_read, strict=True))


def of_ids(sequences: dict[int, Sequence], ids: list[int]) -> Sequence:
    """The stored sequence that begins with these ids."""
    return next(
        sequence
        for sequence in sequences.values()
        if sequence.token_ids_L[: len(ids)].tolist() == ids
    )


async def test_prorl_agent_at_seventy_workers(tmp_path: Path, sandbox_kind: str) -> None:
    """The client acts as ProRL Agent's GRPO trainer: start, many `/process`, stop; messages are
    joined, masked by role.
    """
    async with serving(tmp_path, sandbox_kind), spoken("prorl-agent", tmp_path) as server:
        await server.post("/clear_llm_server")
        await server.post("/process", {"instance": {}, "sampling_params": {}}, status=503)
        await server.post("/start")
        await server.post("/start", status=400)

        async def process(index: int, instance: Json) -> Json:
            body = {
                "instance": {**instance, "trajectory_id": index},
                "sampling_params": {
                    "model": "hosted_vllm/x",
                    "temperature": 0.7,
                    "max_iterations": 9,
                    "max_output_tokens": 900,
                    "max_model_len": 4000,
                },
            }
            return await server.post("/process", body)

        results = await asyncio.gather(*(process(*message) for message in enumerate(shop(WORKERS))))
        assert (await server.get("/status"))["pending_jobs"] == 0
        await server.post("/cancel", {"job_id": "of nobody"})
        await server.post("/stop")
        await server.get("/status", status=503)
        (stored,) = server.stored
        kept = sequences(stored)
        assert len(kept) == WORKERS
        for index, result in enumerate(results):
            assert result["trajectory_id"] == index
            assert result["success"]
            assert result["finish"]
            assert (result["resolved"], result["score"], result["error"]) == (True, 1.0, None)
            messages = result["messages"]
            assert [message["role"] for message in messages][-1] == "assistant"
            assert {"tool", "user"} <= {message["role"] for message in messages}
            ids = [token for message in messages for token in message["token_ids"]]
            sequence = of_ids(kept, ids)
            spoke = [message for message in messages if message["role"] == "assistant"]
            reported_logprobs = np.array(
                [x for message in spoke for x in message["logprobs"]], np.float32
            )
            assert np.array_equal(reported_logprobs, sequence.logprobs_C)
            assert sum(len(message["token_ids"]) for message in spoke) == len(sequence.logprobs_C)
            before = 0
            for message in messages:
                if message["role"] == "assistant":
                    assert message["input_ids"] == ids[:before]
                    assert message["content"] or message["tool_calls"]
                before += len(message["token_ids"])
        turns = rows(stored, "select distinct temperature from turns")
        assert [round(row["temperature"], 3) for row in turns] == [0.7]


async def test_prorl_agent_ends_what_nobody_waits_for(tmp_path: Path, sandbox_kind: str) -> None:
    slow = f"{ORACLE}?delay_s=600"
    async with serving(tmp_path, sandbox_kind, slow), spoken("prorl-agent", tmp_path) as server:
        for number, how in enumerate(("closed", "cancelled", "stopped"), 1):
            await server.post("/start", status=200 if number == 1 else 400)
            body = {"instance": shop(1)[0], "sampling_params": {}, "job_id": how}
            asking = asyncio.ensure_future(server.post("/process", body))

            async def is_requested(number: int = number) -> bool:
                return await server.num_requested() == number

            await until(is_requested, "it is asked for")
            if how == "closed":
                asking.cancel()
            elif how == "cancelled":
                await server.post("/cancel", {"job_id": how})
            else:
                await server.post("/stop")
            with suppress(asyncio.CancelledError):
                assert (await asking).keys() == {"error"}
            ended = {"cancelled": number}
            await until(lambda ended=ended: server.states() == ended, how)  # type: ignore[misc]


async def test_prorl_agent_reserves_a_job_id_before_it_waits(
    tmp_path: Path, sandbox_kind: str
) -> None:
    slow = f"{ORACLE}?delay_s=600"
    async with serving(tmp_path, sandbox_kind, slow), spoken("prorl-agent", tmp_path) as server:
        await server.post("/start")
        instance = shop(1)[0]
        body = {"instance": instance, "sampling_params": {}, "job_id": "same"}
        other = {**body, "instance": {**instance, "trajectory_id": 1}}

        async def until_requested(number: int) -> None:
            async def is_requested() -> bool:
                return await server.num_requested() == number

            await until(is_requested, f"{number} are asked for")

        same = [asyncio.ensure_future(server.post("/process", body)) for _ in range(3)]
        await until_requested(1)
        another = asyncio.ensure_future(server.post("/process", other))
        await until_requested(2)
        assert (await server.get("/status"))["pending_jobs"] == 2
        same[0].cancel()  # the two others still wait for the job
        await server.post("/cancel", {"job_id": "nobody's"})
        assert (await server.get("/status"))["pending_jobs"] == 2
        await server.post("/cancel", {"job_id": "same"})
        for answer in (*same[1:], another):
            assert (await answer).keys() == {"error"}
        await until(lambda: server.states() == {"cancelled": 2}, "both are cancelled")
        again = asyncio.ensure_future(server.post("/process", body))
        await until_requested(3)
        again.cancel()
        await until(lambda: server.states() == {"cancelled": 3}, "nobody waits for the third")
        assert (await server.get("/status"))["pending_jobs"] == 0


async def test_runs_that_no_request_needs_end(tmp_path: Path, sandbox_kind: str) -> None:
    """Each other limit is a run; of the idle ones a few stay open, and an ended one is replaced."""
    async with serving(tmp_path, sandbox_kind), spoken("prorl-agent", tmp_path) as server:
        await server.post("/start")

        async def process(turns: int) -> None:
            params = {"max_iterations": turns}
            done = await server.post(
                "/process", {"instance": shop(1)[0], "sampling_params": params}
            )
            assert done["resolved"]

        for turns in (*range(20, 20 + MAX_IDLE_RUNS + 3), 20):
            await process(turns)
        with connect(server.root) as client:

            async def are_few() -> bool:
                status = await asyncio.to_thread(client.status)
                open_runs = [run for run in status["runs"] if run["state"] == "open"]
                return len(open_runs) <= MAX_IDLE_RUNS

            await until(are_few, "idle runs end")
        assert len(server.stored) == MAX_IDLE_RUNS + 4  # the first of them had been ended


async def test_wrong_types_are_the_clients_mistake(tmp_path: Path, sandbox_kind: str) -> None:
    row = shop(1)[0]
    async with serving(tmp_path, sandbox_kind):
        async with spoken("prorl-agent", tmp_path) as server:
            await server.post("/start")
            good = {"instance": row, "sampling_params": {}}
            wrong: dict[str, Json]
            for wrong in (
                {"instance": "x"},
                {"instance": None},
                {"instance": []},
                {"instance": {}},
                {"instance": {**row, "prompt": 7}},
                {"instance": {**row, "data": "x"}},
                {"instance": {**row, "env": ["math"]}},
                {"sampling_params": "x"},
                {"sampling_params": []},
                {"sampling_params": {"temperature": "hot"}},
                {"sampling_params": {"max_iterations": {"a": 1}}, "job_id": "a"},
                {"sampling_params": {"max_model_len": [1]}},
                {"sampling_params": {"max_model_len": 10**30}, "job_id": "a"},
                {"job_id": 7},
            ):
                body = await server.post("/process", {**good, **wrong}, status=422)
                assert body["detail"], wrong
            await server.post("/cancel", {"job_id": 7}, status=422)
            await server.post("/add_llm_server", {"address": 7}, status=422)
            assert (await server.get("/status"))["pending_jobs"] == 0
        async with spoken("nemo-gym", tmp_path) as server:
            good = {**row, "responses_create_params": {"input": row["prompt"]}}
            for wrong in (
                {"responses_create_params": "x"},
                {"responses_create_params": {"input": 7}},
                {"responses_create_params": {"input": [7]}},
                {"responses_create_params": {"input": row["prompt"], "top_p": "x"}},
                {"agent": 7},
                {"data": []},
            ):
                body = await server.post("/run", {**good, **wrong}, status=422)
                assert body["detail"], wrong
            verified: Json
            for verified in (7, [7], [{}], [{"reward": "x"}], [{"reward": 1, TASK_INDEX: {}}]):
                await server.post("/aggregate_metrics", {"verify_responses": verified}, status=422)


async def test_prorl_agent_knows_only_servers_that_are_there(
    tmp_path: Path, sandbox_kind: str
) -> None:
    async with serving(tmp_path, sandbox_kind, ""), spoken("prorl-agent", tmp_path) as server:
        await server.post("/add_llm_server", {"address": "http://127.0.0.1:9/v1"}, status=422)
        await server.post("/add_llm_server", {"address": ORACLE})
        await server.post("/start")
        body = {"instance": shop(1)[0], "sampling_params": {}}
        assert (await server.post("/process", body))["resolved"]
        reply_body = await server.post("/clear_llm_server")
        assert reply_body == {"status": "Cleared all LLM server addresses"}


async def test_nemo_gym_at_seventy_workers(tmp_path: Path, sandbox_kind: str) -> None:
    """The client acts as NeMo RL: each call's prompt goes on with what came before."""
    async with serving(tmp_path, sandbox_kind), spoken("nemo-gym", tmp_path) as server:

        async def run(index: int, row: dict[str, Json]) -> Json:
            params = {"input": [{"role": "user", "content": row["prompt"]}], "temperature": 0.9}
            return await server.post(
                "/run", {**row, "responses_create_params": params, "_ng_task_index": index // 2}
            )

        done = await asyncio.gather(*(run(*run_args) for run_args in enumerate(shop(WORKERS))))
        (stored,) = server.stored
        kept = sequences(stored)
        for index, row in enumerate(done):
            assert (row["reward"], row["_ng_task_index"]) == (1.0, index // 2)
            seen: list[int] = []
            items = row["response"]["output"]
            for item in items:
                if "prompt_token_ids" in item:
                    assert item["prompt_token_ids"][: len(seen)] == seen
                    assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
                    seen = item["prompt_token_ids"] + item["generation_token_ids"]
            assert len(seen) == len(of_ids(kept, seen).token_ids_L[: len(seen)])
            calls = {
                run_args["call_id"] for run_args in items if run_args["type"] == "function_call"
            }
            answers = {
                run_args["call_id"]
                for run_args in items
                if run_args["type"] == "function_call_output"
            }
            assert calls
            assert calls == answers
            assert items[-1]["content"][0]["text"]
        metrics = await server.post("/aggregate_metrics", {"verify_responses": done})
        assert metrics["agent_metrics"] == {"mean/reward": 1.0}
        assert len(metrics["group_level_metrics"]) == WORKERS // 2


async def test_what_failed_by_us_is_nobodys_reward(tmp_path: Path, sandbox_kind: str) -> None:
    """A backend that always fails: an error in each protocol, and no 0."""
    broken = "scripted:faulty?error=1"
    row = shop(1)[0]
    async with serving(tmp_path, sandbox_kind, broken):
        async with spoken("nemo-gym", tmp_path) as server:
            params = {"input": row["prompt"]}
            body = await server.post("/run", {**row, "responses_create_params": params}, status=503)
            assert body["detail"]
        async with spoken("prorl-agent", tmp_path) as server:
            await server.post("/start")
            result = await server.post("/process", {"instance": row, "sampling_params": {}})
            assert not result["success"]
            assert result["messages"] == []
            assert result["filter"]
