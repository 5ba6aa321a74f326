"""The Stage host with scripted operators, over both networks: slots, acks, cancels, drains,
failures.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from prorl.control import Payload, Started
from prorl.errors import BackendError
from prorl.flight import Inlet, Outlet, this_incarnation
from prorl.graph import GRAPH
from prorl.linux import crashes
from prorl.schema import EDGES
from prorl.schema.columns import (
    RanColumns,
    ran_columns,
    ready_columns,
    scored_columns,
)
from prorl.schema.rows import Added, Row, stack
from prorl.stages.host import Growth, StageHost
from prorl.types import (
    NO_FAILURE,
    AttemptKey,
    Failure,
    FailureCode,
    RewardPart,
    SandboxRef,
    Score,
    Stage,
)
from tests.edge_rows import leased_batch, put, ran_row
from tests.flight.conftest import Net
from tests.flight.test_edge import take
from tests.flight.work_rows import key, lease, leased, ran, ready, trajectory
from tests.storage.scored_rows import turn
from tests.waiting import until

Work = Callable[[Row], Awaitable[Added]]


async def finish(row: Row) -> Added:
    """Adds what each operator adds when all goes well."""
    if row.batch.schema.equals(EDGES["lease"]):
        return ready_columns(sandbox=SandboxRef(), prompt=(), tools=(), init_s=0.0)
    if row.batch.schema.equals(EDGES["ready"]):
        return ran_columns(trajectory(), run_s=0.0)
    return scored_columns(
        score=Score(parts=(RewardPart(name="r", value=1.0),)), failure=NO_FAILURE, eval_s=0.0
    )


class Scripted:
    """An operator that does what `work` says; holds rows while `gate` is closed."""

    def __init__(self, stage: Stage, work: Work = finish) -> None:
        self.stage = stage
        self.work = work
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_working = self.most_working = 0
        self.released: list[int] = []

    async def __call__(self, row: Row) -> Added:
        self.num_working += 1
        self.most_working = max(self.most_working, self.num_working)
        try:
            await self.gate.wait()
            return await self.work(row)
        finally:
            self.num_working -= 1

    def unfinished(self, failure: Failure) -> Added | None:
        if self.stage is not Stage.EVAL:
            return None
        return scored_columns(score=None, failure=failure, eval_s=0.0)

    async def release(self, row: Row) -> None:
        self.released.append(row.value("rollout_id"))


class Bench:
    """One stage between an Outlet that feeds it and an Inlet that takes from it."""

    def __init__(self, net: Net, operator: Scripted, slots: int, finished_bytes: int) -> None:
        self.events: list[tuple[str, int, str]] = []
        self.acked: list[AttemptKey] = []
        self.upstream = Outlet(GRAPH.takes(operator.stage), on_acked=self.acked.extend)
        self.inlet = Inlet(
            net.network,
            GRAPH.takes(operator.stage),
            this_incarnation(roles={"run": 1}, worker="w"),
            slots=slots,
        )
        self.stage = StageHost(
            operator, self.inlet, self.emit, slots=slots, finished_bytes=finished_bytes
        )
        self.downstream = Inlet(
            net.network,
            GRAPH.row(operator.stage).gives,
            this_incarnation(roles={"run": 1}, worker="next"),
            slots=100,
        )

    def emit(self, payload: Payload, key: AttemptKey, *, stage: str, code: str = "") -> None:
        self.events.append((payload.kind.value, key.rollout_id, code))

    def ended(self) -> list[tuple[str, int, str]]:
        return [event for event in self.events if event[0] != "started"]


@asynccontextmanager
async def bench(
    net: Net,
    operator: Scripted,
    slots: int = 3,
    finished_bytes: int = 1 << 20,
    connect: bool = True,
) -> AsyncIterator[Bench]:
    parts = Bench(net, operator, slots, finished_bytes)
    up = await net.network.listen(net.name("up"), {parts.upstream.path: parts.upstream.route})
    down = await net.network.listen(
        net.name("down"), {parts.stage.outlet.path: parts.stage.outlet.route}
    )
    parts.inlet.set_upstreams([up])
    if connect:
        parts.downstream.set_upstreams([down])
    running = asyncio.ensure_future(parts.stage.run())
    try:
        yield parts
    finally:
        await parts.inlet.close()
        await parts.downstream.close()
        await asyncio.wait_for(running, 30)


async def test_never_more_rows_in_work_than_slots(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    operator.gate.clear()
    async with bench(net, operator) as parts:
        for n in range(10):
            await put(parts.upstream, ready(n))
        await until(lambda: operator.num_working == 3)
        await asyncio.sleep(0.03)
        operator.gate.set()
        assert len(await take(parts.downstream, 10)) == 10
    assert operator.most_working == 3
    assert [kind for kind, _, _ in parts.events] == ["started"] * 10


async def test_init_slots_free_when_run_takes_the_row(net: Net) -> None:
    operator = Scripted(Stage.INIT)
    async with bench(net, operator, slots=2, connect=False) as parts:
        parts.upstream.send(leased(0, 1, 2, 3))
        await until(lambda: len(parts.stage.in_hand()) == 2)
        await asyncio.sleep(0.03)
        assert parts.upstream.num_waiting == 2
        parts.downstream.set_upstreams([net.name("down")])
        assert len(await take(parts.downstream, 4)) == 4
        await until(lambda: parts.stage.in_hand() == [])


async def test_run_and_eval_slots_free_at_the_end_of_the_work(net: Net) -> None:
    operator = Scripted(Stage.EVAL)
    async with bench(net, operator, slots=2, connect=False) as parts:
        for n in range(6):
            await put(parts.upstream, ran(n))
        await until(lambda: len(parts.stage.in_hand()) == 6)
        assert parts.acked == []


async def test_finished_bytes_hold_back_the_work(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    async with bench(net, operator, slots=2, finished_bytes=1, connect=False) as parts:
        for n in range(9):
            await put(parts.upstream, ready(n))
        await until(lambda: len(parts.stage.in_hand()) == 3)
        await asyncio.sleep(0.03)
        assert len(parts.stage.in_hand()) == 3
        parts.downstream.set_upstreams([net.name("down")])
        for _ in range(9):
            (row,) = await take(parts.downstream, 1)
            parts.downstream.ack([row.key])
        await until(lambda: parts.stage.in_hand() == [])


async def test_eval_acks_run_when_its_own_downstream_acked(net: Net) -> None:
    async with bench(net, Scripted(Stage.EVAL)) as parts:
        await put(parts.upstream, ran(1))
        await take(parts.downstream, 1)
        await asyncio.sleep(0.03)
        assert parts.acked == []
        parts.downstream.ack([key(1)])
        await until(lambda: parts.acked == [key(1)])
        assert parts.upstream.buffered_bytes == 0


async def test_errors_of_operators_are_their_own_row_only(net: Net) -> None:
    async def work(row: Row) -> Added:
        match row.value("rollout_id"):
            case 0:
                raise KeyError("a bug of ours")
            case 1:
                raise BackendError(FailureCode.BACKEND_PROTOCOL, "lied")
            case _:
                return await finish(row)

    operator = Scripted(Stage.RUN, work)
    async with bench(net, operator) as parts:
        for n in range(3):
            await put(parts.upstream, ready(n))
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]
        await until(lambda: len(parts.ended()) == 2)
        assert sorted(parts.ended()) == [
            ("failed", 0, "stage_error"),
            ("failed", 1, "backend_protocol"),
        ]
        assert sorted(operator.released) == [0, 1]


@pytest.mark.parametrize("slots", [1, 3])
async def test_a_result_that_cannot_be_sent_ends_its_own_row_only(net: Net, slots: int) -> None:
    async def work(row: Row) -> Added:
        added = await finish(row)
        assert isinstance(added, RanColumns)
        bad = row.value("rollout_id") == 1
        return replace(added, artifact=object()) if bad else added  # type: ignore[arg-type]

    operator = Scripted(Stage.RUN, work)
    async with bench(net, operator, slots) as parts:
        parts.upstream.send(stack([Row(ready(n), 0) for n in range(3)]))
        assert sorted(row.key for row in await take(parts.downstream, 2)) == [key(0), key(2)]
        await until(lambda: parts.ended() == [("failed", 1, "stage_error")])
        assert operator.released == [1]
        assert sorted(parts.stage.in_hand()) == [key(0), key(2)]


async def test_rows_that_end_together_become_a_single_message_in_their_order() -> None:
    growth, added = Growth(), ran_columns(trajectory(), run_s=0.0)
    grown = await asyncio.gather(*(growth(Row(ready(n), 0), added) for n in range(5)))
    assert all(row.batch is grown[0].batch for row in grown)
    assert [(row.place, row.value("rollout_id")) for row in grown] == [(n, n) for n in range(5)]
    later = await growth(Row(ready(9), 0), added)
    assert (later.batch.num_rows, later.value("rollout_id")) == (1, 9)


async def test_a_row_that_ends_in_the_turn_of_its_cancellation_is_released(net: Net) -> None:
    """INIT, between the operator's end and the conversion of what it added."""
    operator = Scripted(Stage.INIT)

    async def work(row: Row) -> Added:
        asyncio.get_running_loop().call_soon(lambda: parts.stage.cancel(key(1)))
        return await finish(row)

    operator.work = work
    async with bench(net, operator) as parts:
        parts.upstream.send(leased(1))
        await until(lambda: operator.released == [1])
        assert parts.ended() == [("released", 1, "")]
        assert parts.stage.in_hand() == []
        assert parts.stage.outlet.num_waiting == 0


async def test_a_failed_row_is_reported_and_goes_on_if_it_has_turns(net: Net) -> None:
    async def work(row: Row) -> Added:
        turns = (turn(0),) if row.value("rollout_id") == 1 else ()
        failure = Failure(code=FailureCode.SANDBOX_LOST, message="gone")
        return ran_columns(replace(trajectory(), turns=turns, failure=failure), run_s=0.0)

    async with bench(net, Scripted(Stage.RUN, work)) as parts:
        await put(parts.upstream, ready(0))
        await put(parts.upstream, ready(1))
        assert [row.key for row in await take(parts.downstream, 1)] == [key(1)]
        parts.downstream.ack([key(1)])
        await until(lambda: parts.stage.in_hand() == [])
        assert sorted(parts.ended()) == [
            ("failed", 0, "sandbox_lost"),
            ("failed", 1, "sandbox_lost"),
        ]


async def test_eval_reports_no_row_that_failed_before(net: Net) -> None:
    failed = ran_row(
        ready(1),
        replace(trajectory(), failure=Failure(code=FailureCode.BACKEND_UNAVAILABLE)),
        run_s=0.0,
    )

    async def work(row: Row) -> Added:
        return scored_columns(score=None, failure=NO_FAILURE, eval_s=0.0)

    async with bench(net, Scripted(Stage.EVAL, work)) as parts:
        await put(parts.upstream, failed)
        await take(parts.downstream, 1)
        assert parts.events == []


async def test_a_cancelled_row_is_released_and_its_slot_is_free(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    operator.gate.clear()
    async with bench(net, operator, slots=1) as parts:
        await put(parts.upstream, ready(1))
        await put(parts.upstream, ready(2))
        await until(lambda: operator.num_working == 1)
        parts.stage.cancel(key(1))
        parts.stage.cancel(key(1))
        parts.stage.cancel(key(99))
        await until(lambda: parts.ended() == [("released", 1, "")])
        operator.gate.set()
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]
        assert operator.released == [1]


async def test_a_cancelled_error_of_a_rows_own_code_is_reported(net: Net) -> None:
    async def work(row: Row) -> Added:
        if row.value("rollout_id") == 1:
            raise asyncio.CancelledError
        return await finish(row)

    async with bench(net, Scripted(Stage.RUN, work), slots=1) as parts:
        await put(parts.upstream, ready(1))
        await put(parts.upstream, ready(2))
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]
        assert parts.ended() == [("failed", 1, "stage_error")]


async def test_a_row_that_is_cancelled_before_its_first_step_frees_its_slot(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    operator.gate.clear()
    async with bench(net, operator, slots=1) as parts:
        emit = parts.stage._emit

        def cancel_at_once(
            payload: Payload, key: AttemptKey, *, stage: str, code: str = ""
        ) -> None:
            emit(payload, key, stage=stage, code=code)
            if isinstance(payload, Started) and key.rollout_id == 1:
                asyncio.get_running_loop().call_soon(parts.stage.cancel, key)

        parts.stage._emit = cancel_at_once
        await put(parts.upstream, ready(1))
        await put(parts.upstream, ready(2))
        await until(lambda: parts.ended() == [("released", 1, "")])
        operator.gate.set()
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]
        assert parts.stage.in_hand() == [key(2)]


async def test_the_step_of_a_row_is_marked_with_its_rollout(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a death in it is charged to this rollout alone."""
    page = crashes.page()
    marks: list[str] = []

    async def work(row: Row) -> Added:
        marks.append(crashes.read(page))
        return await finish(row)

    with mmap.mmap(page, crashes.PAGE_BYTES) as shared:
        monkeypatch.setattr(crashes, "_page", shared)
        async with bench(net, Scripted(Stage.RUN, work)) as parts:
            await put(parts.upstream, ready(1))
            await put(parts.upstream, ready(2))
            await take(parts.downstream, 2)
        monkeypatch.undo()
    os.close(page)
    assert marks == ["run/1/1", "run/2/1"]


async def test_a_row_that_no_worker_survives_is_not_touched(net: Net) -> None:
    operator = Scripted(Stage.EVAL)
    async with bench(net, operator) as parts:
        parts.stage._quarantine_reason = lambda key: (
            "killed" if key.rollout_id == 1 else "",
            False,
        )
        await put(parts.upstream, ran(1))
        await put(parts.upstream, ran(2))
        rows = {row.key: row.row for row in await take(parts.downstream, 2)}
        assert parts.ended() == [("failed", 1, "eval_failed")]
        codes = {key: row.value("eval_failure_code") for key, row in rows.items()}
        assert codes == {key(1): "eval_failed", key(2): ""}
        assert rows[key(1)].value("messages") == rows[key(2)].value("messages")


async def test_a_rollout_that_ended_workers_is_our_failure_and_all_of_a_run_the_tasks(
    net: Net,
) -> None:
    async with bench(net, Scripted(Stage.RUN)) as parts:
        parts.stage._quarantine_reason = lambda key: (
            "run-0 SIGKILL, in think",
            key.rollout_id == 2,
        )
        await put(parts.upstream, ready(1))
        await until(lambda: parts.ended() == [("failed", 1, "stage_error")])
        await put(parts.upstream, ready(2))
        await until(lambda: parts.ended()[1:] == [("failed", 2, "bad_task")])


async def test_init_does_not_begin_again_what_has_ended_workers(net: Net) -> None:
    async with bench(net, Scripted(Stage.INIT)) as parts:
        parts.stage._quarantine_reason = lambda key: (
            "SIGKILL" if key.rollout_id == 1 else "",
            False,
        )
        parts.upstream.send(leased_batch([lease(1), lease(2)]))
        await until(lambda: parts.ended() == [("failed", 1, "stage_error")])
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]


async def test_an_undelivered_ready_row_is_released_when_cancelled(net: Net) -> None:
    operator = Scripted(Stage.INIT)
    async with bench(net, operator, connect=False) as parts:
        parts.upstream.send(leased(1, 2))
        await until(lambda: parts.stage.outlet.num_waiting == 2)
        parts.stage.cancel(key(1))
        await until(lambda: operator.released == [1])
        assert parts.ended() == [("released", 1, "")]
        parts.downstream.set_upstreams([net.name("down")])
        assert [row.key for row in await take(parts.downstream, 1)] == [key(2)]


async def test_a_draining_stage_finishes_what_it_has_and_takes_nothing(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    operator.gate.clear()
    async with bench(net, operator, slots=2) as parts:
        for n in range(4):
            await put(parts.upstream, ready(n))
        await until(lambda: operator.num_working == 2)
        parts.stage.drain()
        await asyncio.sleep(0.03)
        operator.gate.set()
        for name, *_ in await take(parts.downstream, 2):
            parts.downstream.ack([name])
        await asyncio.wait_for(parts.stage.wait_empty(), 30)
        assert parts.upstream.num_waiting == 2
        assert parts.ended() == []


async def test_stats_count_what_happens(net: Net) -> None:
    operator = Scripted(Stage.RUN)
    operator.gate.clear()
    async with bench(net, operator, slots=2) as parts:
        await put(parts.upstream, ready(1))
        await until(lambda: operator.num_working == 1)
        await asyncio.sleep(0.05)
        stats = parts.stage.stats()
        assert (stats.slots, stats.busy, stats.done, stats.failed) == (2, 1, 0, 0)
        assert stats.busy_s >= 0.04
        operator.gate.set()
        await take(parts.downstream, 1)
        assert parts.stage.stats().done == 1
