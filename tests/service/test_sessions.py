"""Sessions, not names, are identities: who was replaced, or counts as dead, changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.control import (
    Claim,
    CommitPart,
    CommittedRollout,
    ControlRow,
    Handout,
    Kind,
    Payload,
    Started,
    Welcome,
    from_batch,
    to_batch,
)
from prorl.errors import FencedError
from prorl.protocols import Channel
from prorl.service.core.lifecycle import Event, EventKind
from prorl.service.core.state import RolloutRecord
from prorl.types import AttemptKey, RolloutState
from tests.service.running_gateway import CHAIN, GatewayHarness, Worker, group, running_gateway
from tests.waiting import until

KINDS = pytest.mark.parametrize("kind", ["local", "flight"])


def say(channel: Channel, payload: Payload, *, seq: int, key: AttemptKey | None = None) -> None:
    of = key._asdict() if key else {"run_id": "r"}
    channel.send(to_batch([ControlRow.of(payload, seq=seq, stage="run", **of)]))


async def received_rows(channel: Channel) -> list[ControlRow]:
    rows: list[ControlRow] = []
    async with asyncio.timeout(30):
        while (batch := await channel.receive()) is not None:
            rows += from_batch(batch)
    return rows


@KINDS
async def test_a_replaced_store_commits_nothing_and_its_replies_reach_nobody(
    tmp_path: Path, kind: str
) -> None:
    async with running_gateway(tmp_path, kind) as w, w.worker("init") as init:
        (key,) = await w.leased(init)
        frozen = await w.dial("store", incarnation="first")
        await until(lambda: w.core.state.store is not None)
        w.core.changes.send(w.core.state.store, ControlRow(kind=Kind.REPLY, re=77))
        async with w.worker("store") as store:
            row = CommittedRollout(rollout_id=0, attempt=key.attempt, reward=1.0)
            say(frozen, CommitPart(part="late", rollouts=(row,)), seq=2)
            await received_rows(frozen)
            await store.ask(Handout(), "r")
            assert (await w.view())["commits"] == 0
            assert 77 not in [row.re for row in store.received]
        await frozen.close()


async def test_who_counts_as_dead_holds_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init:
        (key,) = await w.leased(init)
        frozen = await w.dial("run", incarnation="first")
        await until(lambda: w.core.state.of_role("run"))
        w.core.workers.handle_disconnect(w.core.state.of_role("run")[0])
        say(frozen, Started(), seq=2, key=key)
        await received_rows(frozen)
        record = w.core.run("r").rollouts[0]
        assert record.life.state is RolloutState.LEASED
        assert {worker.name for worker in record.holders} == {"init-0"}
        await frozen.close()


@KINDS
async def test_an_earlier_incarnation_that_wakes_up_ends_itself(tmp_path: Path, kind: str) -> None:
    async with (
        running_gateway(tmp_path, kind) as w,
        w.worker("run") as frozen,
        w.worker("run") as later,
    ):
        with pytest.raises(FencedError, match="another incarnation of run-0 has taken our place"):
            async with asyncio.timeout(30):
                await frozen.control.wait()
        (present,) = w.core.state.of_role("run")
        assert present.incarnation == later.incarnation


async def test_a_lease_on_another_incarnations_stream_is_not_the_present_ones(
    tmp_path: Path,
) -> None:
    """INIT was replaced, its earlier incarnation's lease stream is still open: nobody holds the
    lease.
    """
    async with running_gateway(tmp_path) as w, w.worker("init", "init-0") as later:
        await w.run()
        await w.submit(group())
        (key,) = await later.take()
        record = w.core.run("r").rollouts[0]
        record.holders.clear()
        w.served.gateway.leases._sent([key], {"worker": "init-0", "incarnation": "earlier"})
        assert not record.holders
        w.served.gateway.leases._sent([key], {"worker": "init-0", "incarnation": later.incarnation})
        assert {worker.incarnation for worker in record.holders} == {later.incarnation}


async def claim(w: GatewayHarness, key: AttemptKey, incarnation: str) -> Channel:
    """The next incarnation of a chain, which comes with the journal of an attempt."""
    claims = (Claim(*key, 0),)
    return await w.dial(CHAIN, incarnation=incarnation, can_resume=True, claims=claims)


async def welcome(channel: Channel) -> Welcome:
    async with asyncio.timeout(30):
        while (batch := await channel.receive()) is not None:
            for row in from_batch(batch):
                if row.kind is Kind.WELCOME:
                    return row.read(Welcome)
    raise AssertionError("the stream ended without a welcome")


async def test_the_next_incarnation_has_the_attempt_again(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker(CHAIN) as chain:
        (key,) = await w.leased(chain)
        record = w.core.run("r").rollouts[key.rollout_id]
        await until(lambda: record.lease_confirmed)
        first = await claim(w, key, "first")
        assert (await welcome(first)).adopted == (Claim(*key, 1),)
        await first.close()
        await until(lambda: "chain-0" not in w.core.state.workers)
        assert record.life.state is RolloutState.RUNNING, "its next incarnation is waited for"
        second = await claim(w, key, "second")
        assert (await welcome(second)).adopted == (Claim(*key, 2),)
        assert (record.life.attempt, record.life.worker_losses) == (key.attempt, 0)
        assert {worker.incarnation for worker in record.holders} == {"second"}
        await second.close()


async def attempt_without_holder(
    w: GatewayHarness, chain: Worker
) -> tuple[AttemptKey, RolloutRecord]:
    """Returns a running attempt whose chain has come back once and has gone again."""
    (key,) = await w.leased(chain)
    record = w.core.run("r").rollouts[key.rollout_id]
    await until(lambda: record.lease_confirmed)
    first = await claim(w, key, "first")
    await welcome(first)
    await first.close()
    await until(lambda: not w.core.state.of_role("run"))
    return key, record


async def test_an_attempt_that_a_dead_store_had_reserved_goes_on_from_its_journal(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w, w.worker(CHAIN) as chain:
        key, record = await attempt_without_holder(w, chain)
        # As the log has it after a kill of stages and store between the reservation and the row.
        assert w.core.rollouts.apply(record, Event(kind=EventKind.RESERVE, attempt=key.attempt))
        second = await claim(w, key, "second")
        assert (await welcome(second)).adopted == (Claim(*key, 2),)
        assert record.life.state is RolloutState.RUNNING
        assert (record.life.attempt, record.life.worker_losses) == (key.attempt, 0)
        await second.close()


async def test_a_next_incarnation_that_claims_nothing_is_waited_for_no_longer(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w, w.worker(CHAIN) as chain:
        key, record = await attempt_without_holder(w, chain)
        second = await claim(w, key._replace(attempt=9), "second")
        assert (await welcome(second)).adopted == ()
        assert record.life.worker_losses == 1
        await second.close()
