"""The gateway as its workers and clients see it: real streams, real HTTP, a real log."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prorl.control import (
    CommitCursor,
    CommitPart,
    CommittedRollout,
    ControlRow,
    Failed,
    GroupComplete,
    Handout,
    Hello,
    Kind,
    Leaving,
    Reserve,
    Rows,
    RunNews,
    Started,
    Stats,
    Terminal,
    Welcome,
    from_batch,
    to_batch,
)
from prorl.errors import ConflictError, FencedError
from prorl.flight import FlightNetwork, this_incarnation
from prorl.schema import CONTROL
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.rollouts import FIRST_RETRY_S
from prorl.types import FailureCode
from tests.service.running_gateway import (
    CHAIN,
    TOKEN,
    GatewayHarness,
    Worker,
    group,
    handout,
    running_gateway,
    settings,
)

KINDS = pytest.mark.parametrize("kind", ["local", "flight"])


async def finish(w: GatewayHarness, store, keys, part: str) -> None:  # type: ignore[no-untyped-def]
    """Commit attempts with everything that the log wants stored."""
    run = w.core.run("r")
    await store.commit("r", part, keys, outbox_upto=run.outbox.end)


@KINDS
async def test_a_run_from_submit_to_finished(tmp_path: Path, kind: str) -> None:
    async with (
        running_gateway(tmp_path, kind) as w,
        w.worker("init") as init,
        w.worker("run") as run,
        w.worker("store") as store,
    ):
        await w.run()
        await w.submit(group("a", n=2), group("b", n=2), last=True)
        keys = await init.take(4)
        assert sorted(key.rollout_id for key in keys) == [0, 1, 2, 3]
        for key in keys:
            run.say(Started(), key)
        await store.commit("r", "p1", keys)
        complete = await store.hear(Kind.GROUP_COMPLETE, 2)
        assert [len(row.read(GroupComplete).members) for row in complete] == [2, 2]
        await store.decide("r", 0, 1)
        await finish(w, store, [], "p2")
        assert [row.read(RunNews).state for row in await store.hear(Kind.RUN, 2)][1] == "finished"
        view = await w.until(lambda v: v["state"] == "finished")
        assert view["counts"]["completed"] == 4
        assert view["mean_reward"] == 1.0
        assert not w.core.state.runs["r"].groups, "what is settled must leave memory"


@KINDS
async def test_a_dead_worker_costs_an_attempt_and_its_late_writes_are_fenced(
    tmp_path: Path, kind: str
) -> None:
    async with running_gateway(tmp_path, kind) as w, w.worker("store") as store:
        await w.run()
        await w.submit(group())
        async with w.worker(CHAIN) as chain:
            (first,) = await chain.take()
            chain.say(Started(), first)
            await w.until(lambda v: v["counts"]["running"] == 1)
        async with w.worker("init", "init-1") as init:
            (second,) = await init.take()
            assert second == first._replace(attempt=2)
            answer = await store.ask(Reserve(attempts=(first, second)))
        assert answer.granted == (second,)
        assert answer.refused == ((first, "fenced"),)
        late = CommittedRollout(rollout_id=0, attempt=1, reward=1.0)
        with pytest.raises(FencedError):
            await store.ask(CommitPart(part="p", rollouts=(late,)), "r")


async def test_a_row_of_an_untrainable_failure_is_never_committed(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        (key,) = await w.leased(init)
        await store.ask(Reserve(attempts=(key,)))
        code = FailureCode.EVAL_FAILED
        row = CommittedRollout(rollout_id=0, attempt=1, reward=0.0, failure_code=code)
        with pytest.raises(FencedError):
            await store.ask(CommitPart(part="p", rollouts=(row,)), "r")
        assert (await w.view())["counts"]["completed"] == 0


async def test_a_superseded_worker_is_stopped(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("run") as run:
        (first,) = await w.leased(init)
        init.say(Failed(), first, code="sandbox_start")
        await init.take()
        run.say(Started(), first)
        (stop,) = await run.hear(Kind.CANCEL)
        assert stop.key == first


@pytest.mark.parametrize(("skip_invalid", "others"), [(False, "cancelled"), (True, "leased")])
async def test_the_first_prompt_that_is_too_long_ends_the_run(
    tmp_path: Path, skip_invalid: bool, others: str
) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store"):
        await w.run(skip_invalid=skip_invalid)
        await w.submit(group("first", n=1), group("second", n=7))
        keys = await init.take(8)
        init.say(Failed(message="a prompt of 9 tokens"), keys[0], code="prompt_too_long")
        view = await w.until(lambda v: v["counts"]["failed"] == 1)
        assert view["counts"][others] == 7
        mend = "task 'first': a prompt of 9 tokens, or leave out such tasks with skip_invalid"
        assert (mend in w.core.run("r").life.problem) is not skip_invalid


@KINDS
async def test_cancel_reaches_the_holder_and_the_store(tmp_path: Path, kind: str) -> None:
    async with (
        running_gateway(tmp_path, kind) as w,
        w.worker("init") as init,
        w.worker("store") as store,
    ):
        keys = await w.leased(init, n=2)
        status, answer = await w.http("DELETE", f"/v1/runs/r/rollouts/{keys[0].rollout_id}")
        assert (status, answer["state"]) == (200, "cancelled")
        stop, *_ = await init.hear(Kind.CANCEL)
        assert stop.key == keys[0]
        (ended,) = await store.hear(Kind.TERMINAL)
        assert ended.read(Terminal).rollout_id == keys[0].rollout_id
        assert ended.read(Terminal).failure_code == "cancelled"
        assert (await w.http("DELETE", "/v1/runs/r"))[1]["counts"]["cancelled"] == 2
        await store.hear(Kind.GROUP_COMPLETE)


async def test_a_commit_in_flight_beats_a_cancellation(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        keys = await w.leased(init)
        await store.ask(Reserve(attempts=(keys[0],)))
        assert (await w.http("DELETE", "/v1/runs/r/rollouts/0"))[1]["state"] == "reserved"
        await store.commit("r", "p", keys)
        assert (await w.http("GET", "/v1/runs/r/rollouts/0"))[1]["state"] == "completed"


async def test_a_store_that_dies_with_a_reservation_lets_the_cancellation_through(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("run") as run:
        keys = await w.leased(init)
        run.say(Started(), keys[0])
        async with w.worker("store") as store:
            await store.ask(Reserve(attempts=(keys[0],)))
            await w.http("DELETE", "/v1/runs/r/rollouts/0")
        await w.until(lambda v: v["counts"]["cancelled"] == 1)


async def test_retries_end_as_failed_with_a_row_for_the_store(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        await w.run(limits={"max_attempts": 2})
        await w.submit(group())
        failed_at = float("-inf")
        for attempt in (1, 2):
            (key,) = await init.take()
            assert key.attempt == attempt
            assert time.monotonic() - failed_at > FIRST_RETRY_S / 2, "it rests before that"
            failed_at = time.monotonic()
            init.say(Failed(message="no image"), key, code="sandbox_start")
        (ended,) = await store.hear(Kind.TERMINAL)
        terminal = ended.read(Terminal)
        assert (terminal.status, terminal.failure_code) == ("failed", "sandbox_start")
        assert terminal.failure_message == "no image"


async def test_commit_answers_the_same_to_the_same_part(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        keys = await w.leased(init, n=2)
        first = await store.commit("r", "p", keys[:1])
        assert await store.commit("r", "p", keys[:1]) == first
        assert (await store.commit("r", "q", keys[1:])).commit_seq == first.commit_seq + 1
        again = await store.ask(Reserve(attempts=(keys[0],)))
        assert again.refused == ((keys[0], "committed"),)


async def test_restart_keeps_what_workers_claim_and_leases_the_rest_again(tmp_path: Path) -> None:
    async with FlightNetwork(token=TOKEN) as away:
        config = settings(tmp_path)
        run, store = Worker(away, config, "run", "run-0"), Worker(away, config, "store", "store-0")
        async with running_gateway(tmp_path, "flight") as w, w.worker("init") as init:
            for worker in (run, store):
                await worker.__aenter__()
            await w.run()
            await w.submit(group(n=3))
            keys = sorted(await init.take(3))
            run.attempts = keys[:2]
            for key in run.attempts:
                run.say(Started(), key)
            await store.commit("r", "p", keys[:1])
            await w.until(lambda v: v["counts"]["running"] == 1)
            w.crash()
        async with running_gateway(tmp_path, "flight") as w, w.worker("init", "init-1") as init:
            (again,) = await init.take()
            assert again == keys[2]._replace(attempt=2)
            assert run.of(Kind.WELCOME)[-1].read(Welcome).refused == (keys[0],), (
                "it is committed, nobody need hold it"
            )
            assert (await store.hear(Kind.RUN, 1))[-1].read(RunNews).num_commits == 1
            await store.commit("r", "q", [keys[1], again])
            assert (await w.view())["counts"]["completed"] == 3
            await run.control.close()
            await store.control.close()


async def test_a_store_learns_everything_that_is_not_stored(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init:
        await w.run()
        await w.submit(group("a", n=2), group("b"))
        await w.http("DELETE", "/v1/runs/r/groups/0")
        async with w.worker("store", "store-0") as store:
            (decide,) = await store.hear(Kind.GROUP_COMPLETE)
            ended = await store.hear(Kind.TERMINAL, 2)
            rows = await store.hear(Kind.ROWS)
            assert [task.task_id for task in rows[0].read(Rows).tasks] == ["a", "b"]
            assert [row.read(Terminal).rollout_id for row in ended] == [0, 1]
            assert rows[0].seq < ended[0].seq < ended[1].seq < decide.seq
            await store.ask(CommitPart(part="p", terminals=(0, 1), outbox_upto=ended[1].seq), "r")
        async with w.worker("store", "store-0") as store:
            assert (await store.hear(Kind.GROUP_COMPLETE))[0].seq == decide.seq, "not decided"
            assert not store.of(Kind.TERMINAL)
            assert not store.of(Kind.ROWS)
            await store.decide("r", 0, kept=False)
        async with w.worker("store", "store-0") as store:
            news = (await store.hear(Kind.RUN))[0].read(RunNews)
            assert [row.part for row in news.unpublished] == ["p"]
            (event,) = (await store.hear(Kind.ROWS))[0].read(Rows).events
            assert (event.event, event.kept) == ("decided", False)
            assert not store.of(Kind.GROUP_COMPLETE)
            await store.commit("r", "q", [key for key in await init.take() if key.rollout_id == 2])
            await store.hear(Kind.GROUP_COMPLETE)


async def test_groups_before_a_conflict_in_a_request_reach_the_store_too(tmp_path: Path) -> None:
    """Another client took a key after this request was checked: what the log has, it has whole."""
    async with running_gateway(tmp_path) as w, w.worker("store") as store:
        await w.run()
        run, accept = w.core.run("r"), w.core.acceptance
        mine = accept.check(run, [group("a", key="a"), group("b", key="b")], {})
        accept.groups(run, accept.check(run, [group("other", key="b")], {}))
        with pytest.raises(ConflictError, match="'b' was used"):
            accept.groups(run, mine)
        await w.served.gateway.durable()
        control_rows = await store.hear(Kind.ROWS)
        tasks = [task.task_id for row in control_rows for task in row.read(Rows).tasks]
        assert tasks == ["other", "a"] == [g.task_id for g in run.groups.values()]


async def test_a_store_knows_the_runs_before_it_hears_its_first_answer(tmp_path: Path) -> None:
    """Else a trainer that asks at once finds an open run closed, and its stream at the end."""
    async with running_gateway(tmp_path) as w:
        await w.run()
        identity = this_incarnation(roles={"store": 8}, worker="store-0", location="at-store")
        handout = ControlRow.of(Handout(), run_id="r")
        channel = await w.network.dial(
            w.config.gateway_flight, "control", msgspec.to_builtins(identity), CONTROL, CONTROL
        )
        channel.send(to_batch([replace(ControlRow.of(identity), seq=1), replace(handout, seq=2)]))
        kinds: list[Kind] = []
        async with asyncio.timeout(30):
            while Kind.REPLY not in kinds:
                batch = await channel.receive()
                assert batch is not None
                kinds += [row.kind for row in from_batch(batch)]
        await channel.close()
        assert kinds.index(Kind.WELCOME) < kinds.index(Kind.RUN) < kinds.index(Kind.REPLY)


async def test_cursors_move_backpressure_only_for_primary_and_never_ahead(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        await w.run(delivery="stream", max_uncommitted_groups=2)
        await w.submit(*(group(str(i)) for i in range(4)))
        keys = await init.take(2)
        await store.commit("r", "p", keys)
        await store.decide("r", 0, 1)
        await store.ask(handout([[0, 0], [1, 0]]), "r")
        with pytest.raises(ConflictError, match="r@3"):
            await store.ask(CommitCursor(consumer="primary", seq=3), "r")
        await store.ask(CommitCursor(consumer="observer", seq=2), "r")
        await asyncio.sleep(0.3)
        assert (await w.view())["counts"]["queued"] == 2, "a stalled trainer stalls the pipeline"
        await store.ask(CommitCursor(consumer="primary", seq=1), "r")
        assert len(await init.take(1)) == 1
        await store.ask(CommitCursor(consumer="primary", seq=0), "r")
        assert (await w.view())["cursors"] == {"primary": 1, "observer": 2}, "a late commit"


async def test_waiting_without_workers_ends_as_queue_deadline(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run(limits={"queue_s": 0.2})
        await w.submit(group(n=3))
        view = await w.until(lambda v: v["counts"]["failed"] == 3)
        assert (await w.http("GET", "/v1/runs/r/rollouts/0"))[1]["failure_code"] == "queue_deadline"
        assert view["groups"]["open"] == 1, "the store has still to decide it"


async def test_a_broken_lease_stream_loses_only_unacknowledged_leases(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "flight") as w:
        await w.run()
        await w.submit(group(n=2))
        async with w.worker("init") as init:
            assert init.inlet is not None
            leases = await init.inlet.take()
            init.control.emit(Started(), leases[0].key, stage="init")
            await init.inlet.close()
            await w.until(lambda v: v["counts"]["leased"] == 2)
            await asyncio.sleep(0.5)
            assert leases[0].key in {
                record.key for record in w.core.state.workers["init-0"].in_flight
            }


async def test_nonsense_is_answered_not_fatal(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        channel = await w.dial("eval")
        for row in (
            ControlRow.of(Stats(), seq=2),
            ControlRow(kind=Kind.PROPOSE, seq=3, run_id="r"),
            ControlRow.of(CommitCursor(consumer="x", seq=0), seq=4, run_id="unknown"),
            ControlRow.of(Leaving(), seq=5),
        ):
            channel.send(to_batch([row]))
        replies: list[tuple[Kind, int, str]] = []
        while (Kind.REPLY, 4, "not_found") not in replies:
            batch = await channel.receive()
            assert batch is not None
            replies += [(row.kind, row.re, row.code) for row in from_batch(batch)]
        assert replies[0] == (Kind.REPLY, 3, "invalid") or replies[0] == (Kind.WELCOME, 1, "")
        assert {
            (Kind.WELCOME, 1, ""),
            (Kind.REPLY, 3, "invalid"),
            (Kind.REPLY, 4, "not_found"),
        } <= set(replies)
        await channel.close()
        assert (await w.http("GET", "/healthz"))[0] == 200


async def test_a_stream_that_does_not_begin_with_hello_or_is_of_another_version_is_refused(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w:
        for first in (
            ControlRow(kind=Kind.STATS, seq=1),
            ControlRow.of(Hello(worker="x", roles={"boss": 1}, schema_version=SCHEMA_VERSION)),
            ControlRow.of(Hello(worker="x", roles={"run": 1}, schema_version=SCHEMA_VERSION + 1)),
            ControlRow(kind=Kind.HELLO, payload='{"worker": "x", "roles": {"run": 1}}'),
        ):
            channel = await w.network.dial(
                w.config.gateway_flight, "control", {"worker": "x"}, CONTROL, CONTROL
            )
            channel.send(to_batch([first]))
            assert await channel.receive() is None
            await channel.close()
        assert not w.core.state.workers
