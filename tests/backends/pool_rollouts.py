"""Rollouts of several turns over a pool of real servers: what the service needs, and what must hold
of everything that was stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prorl.backends.embedded import TOY
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.flight.trace import REQUESTED, Mark, read
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json, Task
from tests.backends.real_servers import Server
from tests.backends.wire_tap import Call
from tests.integration.run_checks import rows

TURNS = 6
TEXT_ONLY_AGENT = f"{Path(__file__).with_name('text_only_agent.py')}:TextOnlyAgent"


def config(root: Path, kind: str, pool: Sequence[Server], slots: int = 64) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "root": root,
            "backends": tuple(server.url for server in pool),
            "sandbox": {"kind": kind},
            "tokenizer": str(TOY),
            "run": {"slots": slots},
            "load_code": True,
            "trace": True,
        }
    )


async def submit(client: Client, count: int, max_tokens: int = 24, turns: int = TURNS) -> None:
    limits: Json = {"max_turns": turns, "max_tokens": 480, "run_s": 120}
    await asyncio.to_thread(
        client.create_run,
        run_id="r",
        agent=TEXT_ONLY_AGENT,
        limits=limits,
        sampling={"max_tokens": max_tokens},
    )
    tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"Count from {i}.") for i in range(count)]
    await asyncio.to_thread(client.submit, "r", tasks, 1, key="w", last=True)


async def until_out(client: Client, url: str, limit_s: float) -> float:
    """Seconds until the gateway gives a server nothing."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        status = await asyncio.to_thread(client.status)
        (backend,) = [backend for backend in status["backends"] if backend["name"] == url]
        if backend["state"] == "ejected":
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise AssertionError(f"{backend} after {limit_s} s")


async def until_busy(pool: Iterable[Server], calls: int) -> None:
    async with asyncio.timeout(240):
        while any(len(server.tap.calls()) < calls for server in pool):
            await asyncio.sleep(0.2)


def check_nothing_charged(
    stored: StoredRun, count: int, turns: int = TURNS, stop: str = "max_turns"
) -> None:
    """0 failed, 0 masked, 0 attempts spent."""
    ends = rows(
        stored,
        "select status, valid, stop_reason, attempt, num_turns, count(*) as n from rollouts"
        " group by all",
    )
    expected = {"status": "completed", "valid": True, "stop_reason": stop}
    assert ends == [{**expected, "attempt": 1, "num_turns": turns, "n": count}], ends


def check_exact(stored: StoredRun, calls: Iterable[Call]) -> int:
    """Each stored sequence is, id for id and logprob for logprob, what servers were asked and said;
    how many calls had to be continued elsewhere.
    """
    calls_by_rollout: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.name.startswith("r/"):
            calls_by_rollout[int(call.name.split("/")[1])].append(call)
    continued = 0
    for row in rows(
        stored, "select rollout_id, token_ids, logprobs, span_end, span_kind from sequences"
    ):
        continued += _check_sequence(row, sorted(calls_by_rollout[row["rollout_id"]], key=_order))
    return continued


def _order(call: Call) -> tuple[int, float]:
    return len(call.prompt), call.at


def _check_sequence(row: dict[str, Any], calls: Sequence[Call]) -> int:
    ids = row["token_ids"]
    kinds = np.repeat(row["span_kind"], np.diff([0, *row["span_end"]]))
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[kinds != 0] = row["logprobs"]
    covered = np.zeros(len(ids), bool)
    starts = [*(len(call.prompt) for call in calls[1:]), len(ids)]
    for call, until in zip(calls, starts, strict=True):
        start = len(call.prompt)
        end = min(until, start + len(call.ids))
        assert ids[:start] == call.prompt, "a server saw other ids"
        assert ids[start:end] == call.ids[: end - start], "a server said other ids"
        expected = np.array(call.logprobs[: end - start]).astype(np.float32)
        np.testing.assert_array_equal(logprobs[start:end], expected)
        covered[start:end] = True
    np.testing.assert_array_equal(covered, kinds != 0, "sampled tokens are those that servers said")
    return sum(not call.is_whole for call in calls)


def request_marks(root: Path) -> list[Mark]:
    """Every model call that RUN made of a server (`edge`), also those that the server never saw."""
    return [mark for mark in read(root / "trace", 0.0) if mark.event == REQUESTED]


def p90_s(stored: StoredRun, calls: Iterable[Mark], names: Collection[str]) -> float:
    """p90 of `run_s` of rollouts all whose calls were made of these servers.

    Not by the backend of their turns: that is who ended a turn, which may have waited for another.
    """
    elsewhere = {call.key.rollout_id for call in calls if call.edge not in names}
    runs = rows(stored, "select rollout_id, run_s from rollouts")
    return float(np.quantile([r["run_s"] for r in runs if r["rollout_id"] not in elsewhere], 0.9))


def check_not_called_since(calls: Iterable[Mark], name: str, since_s: float) -> None:
    """Nothing was asked of a server from this moment of the monotonic clock on."""
    late = [call for call in calls if call.edge == name and call.at_s > since_s]
    assert not late, f"{len(late)} calls to {name}, until {late[-1].at_s - since_s:.2f} s too late"
