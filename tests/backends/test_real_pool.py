"""Two real vLLM servers and two embedded ones behind one pool; one is killed and one is frozen in
the middle of rollouts of six turns. And a sole vLLM that is away for a minute.

`make test-vllm`; figures are printed with `-s`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from tests.backends.pool_rollouts import (
    check_exact,
    check_not_called_since,
    check_nothing_charged,
    config,
    p90_s,
    request_marks,
    submit,
    until_busy,
    until_out,
)
from tests.backends.real_servers import NEEDS_VLLM, Server, embedded, serving, vllm
from tests.integration.run_checks import check_complete

pytestmark = NEEDS_VLLM

ROLLOUTS = 64
DEAD_S, FROZEN_S = 1.0, 3.0


async def undisturbed(root: Path, kind: str, pool: list[Server]) -> float:
    """The same rollouts with nobody hurt; their p90."""
    async with signals() as stop, service(config(root, kind, pool), stop) as running:
        client = client_of(running)
        await submit(client, ROLLOUTS)
        await asyncio.wait_for(follow(client, running, "r", ROLLOUTS, quiet=True), 300)
    stored = check_complete(root / "r", ROLLOUTS)
    check_nothing_charged(stored, ROLLOUTS)
    return p90_s(stored, request_marks(root), [server.url for server in pool])


async def test_a_killed_and_a_frozen_server_of_four_cost_nothing(
    tmp_path: Path, sandbox_kind: str
) -> None:
    made = [vllm(tmp_path, "vllm-0"), vllm(tmp_path, "vllm-1")]
    pool = [*made, embedded(tmp_path, "embedded-0"), embedded(tmp_path, "embedded-1")]
    killed, others, frozen = pool[0], pool[1:3], pool[3]
    async with serving(*pool):
        before_s = await undisturbed(tmp_path / "calm", sandbox_kind, pool)
        before = {server.name: len(server.tap.calls()) for server in pool}
        root = tmp_path / "root"
        async with signals() as stop, service(config(root, sandbox_kind, pool), stop) as running:
            client = client_of(running)
            await submit(client, ROLLOUTS)
            finished = asyncio.ensure_future(follow(client, running, "r", ROLLOUTS, quiet=True))
            await until_busy(pool, max(before.values()) + 16)
            killed.strike(signal.SIGKILL)
            killed_at = time.monotonic()
            dead_s = await until_out(client, killed.url, 20)
            frozen.strike(signal.SIGSTOP)
            struck = time.monotonic()
            frozen_s = await until_out(client, frozen.url, 30)
            await asyncio.wait_for(finished, 300)
            late = [call for call in frozen.tap.calls() if call.at > struck + FROZEN_S]
            status = await asyncio.to_thread(client.status)
            # A server that thaws begins calls that nobody waits for: they would be the latest.
            calls = [call for server in pool for call in server.tap.calls()[before[server.name] :]]
            frozen.strike(signal.SIGCONT)
        stored = check_complete(root / "r", ROLLOUTS)
        check_nothing_charged(stored, ROLLOUTS)
        continued = check_exact(stored, calls)
        asks = request_marks(root)
        after_s = p90_s(stored, asks, [server.url for server in others])
    print(
        f"dead: out after {dead_s:.2f} s, frozen: {frozen_s:.2f} s; {continued} calls continued"
        " elsewhere,"
        f" {len(calls)} calls equal to the wire; p90 of rollouts on the others {after_s:.2f} s,"
        f" undisturbed {before_s:.2f} s"
    )
    assert continued > 0
    assert not late, "work for a frozen server"
    check_not_called_since(asks, killed.url, killed_at + DEAD_S)
    check_not_called_since(asks, frozen.url, struck + FROZEN_S)
    assert {server["state"] for server in status["backends"] if server["name"] == killed.url} == {
        "ejected"
    }
    assert dead_s < DEAD_S
    assert frozen_s < FROZEN_S


@pytest.mark.timeout(1500)
async def test_a_sole_vllm_that_is_away_for_a_minute_fails_none_of_a_thousand(
    tmp_path: Path, sandbox_kind: str
) -> None:
    count, turns, away_s = 1000, 2, 60.0
    server = vllm(tmp_path)
    async with serving(server):
        root = tmp_path / "root"
        async with signals() as stop, service(config(root, sandbox_kind, [server]), stop) as run:
            client = client_of(run)
            await submit(client, count, max_tokens=12, turns=turns)
            finished = asyncio.ensure_future(follow(client, run, "r", count, quiet=True))
            await until_busy([server], 100)
            server.strike(signal.SIGKILL)
            struck = time.monotonic()
            out_s = await until_out(client, server.url, 20)
            await asyncio.sleep(away_s - (time.monotonic() - struck))
            counts = (await asyncio.to_thread(client.run, "r"))["counts"]
            await server.launch()
            await server.ready()
            back_s = time.monotonic() - struck
            await asyncio.wait_for(finished, 900)
        stored = check_complete(root / "r", count)
        check_nothing_charged(stored, count, turns)
        check_exact(stored, server.tap.calls())
    print(f"out after {out_s:.2f} s, away for {back_s:.0f} s; while it was away: {counts}")
    assert counts["failed"] == 0
    assert counts["queued"] > count // 2
