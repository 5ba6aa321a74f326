"""Decisions of a run's groups: only what the filter says decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from prorl.control import Decision, GroupComplete, Propose
from prorl.filters import GroupDecision
from prorl.schema import ROLLOUTS
from prorl.storage.serve import decide
from prorl.storage.serve.filter_process import FilterLostError
from prorl.storage.serve.history import History
from prorl.storage.serve.replay import FactBook
from tests.storage.test_filter import group


class _Lost:
    """A filter whose process is lost three times before it says a word."""

    def __init__(self) -> None:
        self.num_calls = 0

    def decide(self, groups: Sequence[GroupComplete], *_: object) -> list[GroupDecision]:
        self.num_calls += 1
        if self.num_calls <= 3:
            raise FilterLostError("its process was killed")
        return [GroupDecision(group.group_id, kept=False, reason="told") for group in groups]

    def close(self) -> None:
        """Nothing to close."""


class _Log:
    """The control log: what was proposed."""

    def __init__(self) -> None:
        self.proposed: list[Decision] = []

    async def request(self, payload: Any, *, run_id: str) -> Any:
        assert isinstance(payload, Propose)
        self.proposed += payload.decisions
        return payload


def nothing(rollout_id: int) -> pa.Table:
    """Returns what an earlier incarnation stored of a rollout."""
    return ROLLOUTS.empty_table()


def stored(*groups: int) -> pa.Table:
    """Rows of `rollouts` with a sequence each."""
    row = {"status": "completed", "min_version": 0, "num_tokens": 1, "num_sampled": 1}
    return pa.Table.from_pylist([{**row, "group_id": g, "num_sequences": 1} for g in groups])


async def test_a_group_waits_until_the_commits_of_its_members_are_reported() -> None:
    """A store that comes back may hear of the end before the answer to its own commit."""
    log, facts = _Log(), FactBook()
    control: Any = log
    decider = decide.Decider("r", "none", facts, control, History(), nothing)
    deciding = asyncio.create_task(decider.run())
    decider.complete(group(0, 0, 1))
    await asyncio.sleep(0.1)
    assert log.proposed == []
    facts.add(stored(0, 0))
    decider.note_committed(ROLLOUTS.empty_table())
    decider.drain()
    async with asyncio.timeout(30):
        await deciding
    decider.close()
    assert [(decision.group_id, decision.kept) for decision in log.proposed] == [(0, True)]


async def test_a_lost_filter_is_called_again_and_drops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, log, facts = _Lost(), _Log(), FactBook()
    monkeypatch.setattr(decide, "GroupFilter", lambda name: chosen)
    monkeypatch.setattr(decide, "AGAIN_S", 0.01)
    control: Any = log
    facts.add(stored(0, 0, 1, 1))
    decider = decide.Decider("r", "select 1", facts, control, History(), nothing)
    decider.complete(group(0, 0, 1))
    decider.complete(group(1, 1, 1))
    decider.drain()
    async with asyncio.timeout(30):
        await decider.run()
    decider.close()
    assert [(decision.group_id, decision.reason) for decision in log.proposed] == [
        (0, "told"),
        (1, "told"),
    ]
    assert chosen.num_calls == 4


async def test_a_run_with_a_filter_that_does_not_compile_still_gets_decisions() -> None:
    log, facts = _Log(), FactBook()
    control: Any = log
    decider = decide.Decider("r", "select 1 as nothing", facts, control, History(), nothing)
    decider.complete(group(0, 0))
    decider.complete(group(1, 1))
    facts.add(stored(0, 1))
    decider.drain()
    async with asyncio.timeout(60):
        await decider.run()
    decider.close()
    assert [decision.kept for decision in log.proposed] == [False, False]
    assert log.proposed[0].reason == "filter_error: filter gives nothing INTEGER"
