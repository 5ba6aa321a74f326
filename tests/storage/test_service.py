"""The store process's parts together, against the real gateway: stream, decisions, cursors,
restarts, replay.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from prorl.cli.commands.export import export
from prorl.client.client import Client
from prorl.client.fetch import FlightSource
from prorl.control import ControlRow, Handout, KeptGroup, Kind, RefusalReason
from prorl.errors import ConflictError, SchemaError, UserError
from prorl.flight import FlightNetwork
from prorl.flight.ticket import Ticket
from prorl.flight.wire import call_options
from prorl.linux.procfs import descendants
from prorl.schema import MAX_BATCH_BYTES, STREAM
from prorl.schema.rows import row_hashes
from prorl.storage.files.layout import MANIFEST, RunDir
from prorl.storage.read.catalog import query
from prorl.storage.read.verify import verify
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay
from prorl.types import AttemptKey
from tests.service.running_gateway import TOKEN, GatewayHarness, group, running_gateway
from tests.storage.store_pipeline import client, directory, pipeline, store
from tests.waiting import until

GROUPS = 6


@pytest.fixture
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    async with running_gateway(tmp_path, getattr(request, "param", "local")) as made:
        yield made


on_each_network = pytest.mark.parametrize("service", ["local", "flight"], indirect=True)


async def submit(service: GatewayHarness, count: int = GROUPS, **config: object) -> None:
    """A finished submission of `count` groups of 4 in a DAPO run that streams."""
    await service.run(**{"filter": "dapo", "delivery": "stream", **config})  # type: ignore[arg-type]
    await service.submit(*(group(f"t{i}", n=4) for i in range(count)), last=True)


def stream(
    trainer: Client, cursor: str | None = None, max_groups: int = 1
) -> list[tuple[str, list[str]]]:
    """(cursor after, row hashes) of each batch until the end."""
    batches = trainer.stream("r", cursor=cursor, max_groups=max_groups, wait_s=5.0, advantages=None)
    return [(batch.cursor, row_hashes(batch.arrow)) for batch in batches]


@asynccontextmanager
async def replay(where: Path, hot: Path) -> AsyncIterator[str]:
    """Location of a replay."""
    order, index = await asyncio.to_thread(open_replay, where)
    endpoint = Endpoint(hot, 1 << 30)
    endpoint.add(order, index)
    async with FlightNetwork(token=TOKEN) as network:
        yield await network.listen("grpc://127.0.0.1:0", {}, endpoint.reads())
    endpoint.close()


@on_each_network
async def test_a_run_is_filtered_streamed_committed_and_replayed(
    service: GatewayHarness, tmp_path: Path
) -> None:
    async with store(service) as made, pipeline(service):
        await submit(service)
        with client(made.location) as trainer:
            live = await asyncio.to_thread(stream, trainer)
            assert [cursor for cursor, _ in live] == ["r@1", "r@2", "r@3"]
            await asyncio.to_thread(trainer.commit, live[-1][0])
            assert (await asyncio.to_thread(trainer.status))["cursor"] == "r@3"
        await service.until(lambda view: view["state"] == "finished")
    assert verify(directory(service)) == []
    kept = query(
        directory(service), "select group_id from deliveries order by delivery_seq"
    ).to_pylist()
    assert [row["group_id"] for row in kept] == [0, 2, 4]
    shutil.copytree(directory(service), tmp_path / "copy")
    async with replay(tmp_path / "copy", tmp_path / "hot") as location:
        with client(location) as trainer:
            assert await asyncio.to_thread(stream, trainer) == live
            assert await asyncio.to_thread(stream, trainer, "r@1") == live[1:]
            await asyncio.to_thread(trainer.commit, "r@2")
            assert await asyncio.to_thread(stream, trainer) == live[2:]


@on_each_network
async def test_a_second_store_continues_where_the_first_stopped(service: GatewayHarness) -> None:
    await submit(service)
    async with pipeline(service):
        async with store(service) as first:
            with client(first.location) as trainer:
                before = await asyncio.to_thread(
                    lambda: next(iter(trainer.stream("r", max_groups=1, advantages=None)))
                )
        async with store(service) as second:
            with client(second.location) as trainer:
                everything = await asyncio.to_thread(stream, trainer, "r@0")
                await asyncio.to_thread(trainer.commit, everything[-1][0])
    assert everything[0] == (before.cursor, row_hashes(before.arrow))
    assert len(everything) == 3
    assert verify(directory(service)) == []


@on_each_network
async def test_what_a_dead_store_handed_out_keeps_its_place(service: GatewayHarness) -> None:
    """The log has the hand-out, no part does, and nobody heard the answer."""
    async with pipeline(service):
        async with store(service):
            await submit(service)
            await service.until(lambda view: view["groups"].get("kept") == 3)
        async with service.worker("store") as dying:
            backwards = tuple(KeptGroup(group, 0) for group in (4, 0, 2))
            await dying.ask(Handout(groups=backwards), "r")
        async with store(service) as second:
            with client(second.location) as trainer:
                batches = trainer.stream("r", cursor="r@0", max_groups=1, advantages=None)
                served = await asyncio.to_thread(
                    lambda: [batch.arrow.column("group_id")[0].as_py() for batch in batches]
                )
    assert served == [4, 0, 2]
    order = query(directory(service), "select group_id from deliveries order by delivery_seq")
    assert order.column("group_id").to_pylist() == [4, 0, 2]


async def test_a_finished_run_that_was_read_is_closed_and_served_from_its_directory(
    service: GatewayHarness,
) -> None:
    quick = service.config.store.model_copy(update={"close_after_s": 0.0, "keep_replaced_s": 0.0})
    service.config = service.config.model_copy(update={"store": quick})
    async with store(service) as made, pipeline(service):
        await submit(service)
        with client(made.location) as trainer:
            live = await asyncio.to_thread(stream, trainer)
            await service.until(lambda view: view["state"] == "finished")
            assert set(made.runs) == {"r"}, "its trainer has not said that it has all"
            await asyncio.to_thread(trainer.commit, live[-1][0])
            await until(lambda: not made.runs)
            assert await asyncio.to_thread(stream, trainer, "r@0") == live
    assert len(list((directory(service) / "commits").iterdir())) == 1, "compacted to the end"
    assert verify(directory(service)) == []


async def test_of_a_finished_run_nothing_stays_in_the_store(service: GatewayHarness) -> None:
    quick = service.config.store.model_copy(update={"close_after_s": 0.0, "keep_replaced_s": 0.0})
    service.config = service.config.model_copy(update={"store": quick})
    before = set(descendants(os.getpid()))
    async with store(service) as made, pipeline(service):
        await submit(service)
        await until(lambda: "r" in made.runs)
        run = weakref.ref(made.runs["r"])
        with client(made.location) as trainer:
            live = await asyncio.to_thread(stream, trainer)
            await asyncio.to_thread(trainer.commit, live[-1][0])
        await until(lambda: not made.runs)
        await until(
            lambda: not {t.name for t in threading.enumerate() if t.name.endswith((" r_0", " r"))}
        )
        await until(
            lambda: all("tidy" in command(pid) for pid in set(descendants(os.getpid())) - before)
        )
        gc.collect()
        assert run() is None, "its index, its facts, its order, its filter"
        open_paths = {os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()}
        assert not {path for path in open_paths if path.startswith(str(directory(service)))}


def command(pid: int) -> str:
    """Returns the command line of a process; `tidy` for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() or "tidy"
    except OSError:
        return "tidy"


def open_files() -> list[str]:
    """Descriptors that are still open."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


@on_each_network
async def test_a_run_is_compacted_while_it_is_written_and_streamed(service: GatewayHarness) -> None:
    quick = {"compact_every_commits": 2, "keep_replaced_s": 0.0, "flush_s": 0.001}
    store_config = service.config.store.model_copy(update=quick)
    service.config = service.config.model_copy(update={"store": store_config})
    async with store(service) as made, pipeline(service):
        await submit(service, count=24)
        with client(made.location) as trainer:
            live = await asyncio.to_thread(stream, trainer)
            run = RunDir(directory(service))
            await until(lambda: run.compacted().last)
            assert await asyncio.to_thread(stream, trainer, "r@0") == live
            await asyncio.to_thread(trainer.commit, live[-1][0])
        await service.until(lambda view: view["state"] == "finished")
    assert verify(directory(service)) == []
    async with store(service) as second:
        with client(second.location) as trainer:
            assert await asyncio.to_thread(stream, trainer, "r@0") == live


async def test_a_pack_of_a_killed_store_is_removed_by_the_next_start(
    service: GatewayHarness,
) -> None:
    async with pipeline(service):
        async with store(service):
            await submit(service)
            await service.until(lambda view: view["groups"].get("kept") == 3)
        pack = directory(service) / "turns" / "pack-dead-0000.parquet"
        pack.write_bytes(b"its compaction was killed before the commit")
        half = directory(service) / "groups" / ".tmp-1-pack-dead-0001.parquet"
        half.write_bytes(b"as it died")
        async with store(service) as second:
            while not (run := second.runs.get("r")) or not run.ready.is_set():
                await asyncio.sleep(0.01)
            assert not pack.exists()
            assert not half.exists()
    assert verify(directory(service)) == []


async def test_groups_go_out_oldest_version_first(service: GatewayHarness) -> None:
    async with (
        store(service) as made,
        pipeline(
            service, reward=lambda group_id, i: float(i), version=lambda group_id: 10 - group_id
        ),
    ):
        await submit(service)
        await service.until(lambda view: view["groups"].get("kept") == GROUPS)
        with client(made.location) as trainer:
            await asyncio.to_thread(stream, trainer, None, GROUPS)
    ids = (
        query(directory(service), "select group_id from deliveries order by delivery_seq")
        .column("group_id")
        .to_pylist()
    )
    assert ids == [5, 4, 3, 2, 1, 0]


async def test_reads_without_a_plan(service: GatewayHarness) -> None:
    async with store(service) as made, pipeline(service, reward=lambda group_id, i: float(i)):
        await submit(service, 3)
        await service.until(lambda view: view["groups"].get("kept") == 3)
        with FlightSource(made.location, TOKEN)._client as plain:

            def get(**ticket: object) -> pa.Table:
                read_ticket = Ticket(run="r", **ticket)  # type: ignore[arg-type]
                return plain.do_get(
                    fl.Ticket(read_ticket.dumps()), call_options(TOKEN, 10)
                ).read_all()

            two = await asyncio.to_thread(
                lambda: get(max_groups=2, columns=("delivery_seq", "reward"))
            )
            assert two.column_names == ["delivery_seq", "reward"]
            assert two.column("delivery_seq").to_pylist() == [0] * 4 + [1] * 4
            assert two.schema.metadata[b"prorl.cursor"] == b"r@2"
            assert two.schema.metadata[b"prorl.end"] == b"false"
            last = await asyncio.to_thread(lambda: get(cursor="r@2", layout="dense"))
            assert [len(row["loss_mask"]) for row in last.to_pylist()] == [20] * 4
            small = await asyncio.to_thread(lambda: get(cursor="r@0", max_bytes=1))
            assert small.num_rows == 4
            whole = await asyncio.to_thread(lambda: get(cursor="r@0"))
            assert whole.schema.equals(STREAM)
            assert [batch.num_rows for batch in whole.to_batches()] == [12]
            assert whole.nbytes < MAX_BATCH_BYTES
            nothing = await asyncio.to_thread(lambda: get(cursor="r@3", wait_s=0.0))
            assert nothing.num_rows == 0


async def test_what_a_trainer_may_not_ask_for(service: GatewayHarness) -> None:
    async with store(service) as made, pipeline(service):
        await submit(service, 1)
        source = FlightSource(made.location, TOKEN)

        def ask() -> None:
            body = {"run": "r", "consumer": "primary", "cursor": "other@1"}
            with pytest.raises(ConflictError, match="belongs to run"):
                source.action("commit", body)
            with pytest.raises(ConflictError):
                source.action("commit", {**body, "cursor": "r@5"})
            with pytest.raises(UserError, match="columns nothing"):
                source.fetch(Ticket(run="r", cursor="r@0", columns=("nothing",)))
            with pytest.raises(UserError, match="not a JSON object"):
                source.action("commit", b"[]")
            source.close()

        await asyncio.to_thread(ask)


async def test_a_run_with_a_foreign_directory_fails_alone(service: GatewayHarness) -> None:
    """It ended the store, again after each start, and so the service with all its runs."""
    await submit(service)
    foreign = directory(service) / "commits" / "0000000001.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    async with store(service) as made, pipeline(service):
        await service.until(lambda view: view["state"] == "failed")
        assert "knows 0 commits" in (await service.view())["stalled"]
        await service.run("other")
        await service.submit(group("t"), run_id="other", last=True)
        await service.until(lambda view: view["state"] == "finished", "other")
        with client(made.location) as trainer, pytest.raises(ConflictError, match="0 commits"):
            await asyncio.to_thread(stream, trainer)
    assert [path.name for path in foreign.parent.iterdir()] == [foreign.name]


async def test_a_run_of_another_version_is_refused_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stopped the service. Its place in the log stays: the prorl that wrote it goes on."""
    async with running_gateway(tmp_path) as w, store(w), pipeline(w):
        for name in ("open", "finished", "other"):
            await w.run(name, delivery="stream")
            await w.submit(group("t"), run_id=name, last=name == "finished")
        await w.until(lambda view: view["state"] == "finished", "finished")
        config = w.config
    manifests = [Path(config.run_directory(name), MANIFEST) for name in ("open", "finished")]
    current = [path.read_bytes() for path in manifests]
    for path in manifests:
        old = orjson.loads(path.read_bytes()) | {"schema_version": 2, "code_version": "0.0.9"}
        path.write_bytes(orjson.dumps(old))
    shutil.copytree(config.run_directory("finished"), config.root / "unknown")
    mend = r"written by prorl 0.0.9 \(schema 2\); .*; read it with that version"
    async with (
        running_gateway(tmp_path, store={"keep_replaced_s": 0.1}) as w,
        store(w) as made,
        pipeline(w),
    ):
        for name in ("open", "finished"):
            assert f"run {name} is not served" in caplog.text
            status, answer = await w.http("GET", f"/v1/runs/{name}")
            assert status == 409
            assert re.search(mend, str(answer)), answer
            status, _ = await w.http("POST", "/v1/runs", {"run_id": name, "delivery": "stream"})
            assert status == 409
        await w.submit(group("more"), run_id="other", last=True)
        await w.until(lambda view: view["state"] == "finished", "other")
        await asyncio.sleep(0.2)  # `_clear` looks at every run of the root
        with client(made.location) as trainer:
            for name in ("open", "finished", "unknown"):
                with pytest.raises((ConflictError, SchemaError, UserError), match=mend):
                    await asyncio.to_thread(partial(next, trainer.stream(name)))
            assert len(await asyncio.to_thread(lambda: list(trainer.stream("other")))) == 2
    for path, content in zip(manifests, current, strict=True):
        path.write_bytes(content)
    async with running_gateway(tmp_path) as w, store(w) as made, pipeline(w):
        await w.submit(group("more"), run_id="open", last=True)
        await w.until(lambda view: view["state"] == "finished", "open")
        with client(made.location) as trainer:
            assert len(await asyncio.to_thread(lambda: list(trainer.stream("finished")))) == 1


def fails_for_the_last(group_id: int, sample_index: int) -> float | None:
    """Fails the last of four members; of group 0 two."""
    return None if sample_index == 3 or (group_id, sample_index) == (0, 2) else sample_index % 2


async def test_what_cannot_be_scored_is_stored_and_is_missing_in_its_group(
    service: GatewayHarness, tmp_path: Path
) -> None:
    """It was sampled anew, and the tokens of a reward that raises were thrown away."""
    async with store(service) as made, pipeline(service, fails_for_the_last):
        await submit(service, 2)
        await service.until(lambda view: view["state"] == "finished")
        with client(made.location) as trainer:
            served = await asyncio.to_thread(stream, trainer)
    run = directory(service)
    assert verify(run) == []
    assert query(
        run,
        "select status, attempt, valid, failure_class, failure_code, failure_message,"
        " reward is null as lacks, count(*) as n, count(distinct num_sampled) as s"
        " from rollouts group by all order by n",
    ).to_pylist() == [
        {
            "status": "failed",
            "attempt": 1,
            "valid": False,
            "lacks": True,
            "n": 3,
            "s": 1,
            "failure_class": "infra",
            "failure_code": "grader_error",
            "failure_message": "exact: it raised",
        },
        {
            "status": "completed",
            "attempt": 1,
            "valid": True,
            "lacks": False,
            "n": 5,
            "s": 1,
            "failure_class": "",
            "failure_code": "",
            "failure_message": "",
        },
    ]
    counts = "select count(*) as n, count(reward) as rewards from sequences"
    assert query(run, counts).to_pylist() == [{"n": 8, "rewards": 5}]
    logs = "select content from messages where role = 'grader' group by all"
    assert query(run, logs).to_pylist() == [{"content": "Traceback: in exact"}]
    groups = query(
        run, "select group_id, kept, num_members, num_valid from groups where event = 'decided'"
    )
    assert sorted(row["num_valid"] for row in groups.to_pylist()) == [2, 3]
    assert sorted(len(rows) for _, rows in served) == [2, 3]
    async with replay(run, tmp_path / "hot") as location:
        with client(location) as trainer:
            assert await asyncio.to_thread(stream, trainer) == served
    assert export("r", tmp_path / "all.jsonl", format_="trl", all_=True, root=str(run.parent)) == 0
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 5


async def test_reserving_an_attempt_that_could_not_be_scored_is_refused_as_committed(
    service: GatewayHarness,
) -> None:
    async with store(service), pipeline(service, lambda group, sample: None):
        await service.run()
        await service.submit(group("t", n=2), last=True)
        await service.until(lambda view: view["state"] == "finished")
        keys = [AttemptKey("r", rollout, 1) for rollout in range(2)]
        answer = service.core.commits.reserve(service.core.state.store, keys)
    assert [refusal.reason for refusal in answer.refused] == [RefusalReason.COMMITTED] * 2


async def test_a_reward_that_fails_for_the_first_eight_ends_the_run(
    service: GatewayHarness,
) -> None:
    async with store(service), pipeline(service, lambda group, sample: None):
        await service.run(max_open_groups=2)
        await service.submit(*(group(f"t{i}", n=4) for i in range(50)), last=True)
        view = await service.until(lambda view: view["state"] == "cancelled")
    for words in ("first 8 rollouts", "exact: it raised", "Traceback: in exact"):
        assert words in view["stalled"]
    assert 8 <= view["counts"]["failed"] <= 16
    assert sum(view["counts"].values()) == 200


async def test_a_reward_that_fails_for_seven_of_eight_does_not(service: GatewayHarness) -> None:
    async with store(service), pipeline(service, lambda g, s: 1.0 if g % 2 and not s else None):
        await service.run()
        await service.submit(*(group(f"t{i}", n=4) for i in range(6)), last=True)
        view = await service.until(lambda view: view["state"] == "finished")
    assert (view["counts"]["failed"], view["counts"]["completed"], view["stalled"]) == (21, 3, "")


@on_each_network
async def test_a_store_that_can_hear_no_more_ends_loudly(service: GatewayHarness) -> None:
    """A handler's error once ended the control stream only: the process lived and the run hung."""

    async def receive_nonsense() -> None:
        async with store(service) as made:
            (worker,) = service.core.state.of_role("store")
            service.core.changes.send(worker, ControlRow(kind=Kind.RUN, run_id="r", payload="{}"))
            await service.served.gateway.durable()
            with pytest.raises(SchemaError):
                await made.control.wait()
            await asyncio.sleep(0.1)

    with pytest.raises(ExceptionGroup) as raised:
        await receive_nonsense()
    assert raised.group_contains(SchemaError)


async def test_a_finished_run_ends_its_filter_before_its_compaction_ends(tmp_path: Path) -> None:
    """The filter has ten threads, and a compaction on a busy machine takes minutes."""
    settings = {"close_after_s": 0.0, "keep_replaced_s": 600.0}

    def has_filter() -> bool:
        return any(thread.name.startswith("filter r_") for thread in threading.enumerate())

    async with running_gateway(tmp_path, store=settings) as w, store(w) as made, pipeline(w):
        await w.run(delivery="store", filter="dapo")
        await w.submit(group("t0", n=2))
        await until(has_filter, "a group is decided")
        await w.submit(group("t1", n=2), last=True)
        await w.until(lambda view: view["state"] == "finished")
        await until(lambda: not has_filter(), "the filter has ended")
        assert "r" in made.runs
