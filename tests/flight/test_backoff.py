"""Waits between dials."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prorl.flight.backoff import Backoff

FOREVER_S = 3600.0


async def _long(location: str) -> Backoff:
    """One whose next wait takes half an hour at least."""
    backoff = Backoff(location, FOREVER_S)
    backoff._next_s = FOREVER_S
    return backoff


async def test_who_waits_for_a_socket_goes_on_when_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    backoff = await _long(f"grpc+unix://{path}")
    waiting = asyncio.ensure_future(backoff.wait())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    path.touch()
    await asyncio.wait_for(waiting, 30)
    # It may be bound and not listen yet: the next wait is short, too.
    await asyncio.wait_for(backoff.wait(), 30)


async def test_a_socket_that_is_there_and_refuses_is_waited_out(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    path.touch()
    for location in (f"grpc+unix://{path}", "grpc+tls://host:1", "local://gateway"):
        waiting = asyncio.ensure_future((await _long(location)).wait())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()


async def test_waits_grow_to_the_last_and_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "refuses.sock"
    path.touch()
    backoff, seen = Backoff(f"grpc+unix://{path}", 0.05), list[float]()
    for _ in range(3):
        await backoff.wait()
        seen.append(backoff._next_s)
    assert seen == [0.04, 0.05, 0.05]
    backoff.reset()
    assert backoff._next_s == 0.02


async def test_a_socket_that_never_comes_is_dialled_all_the_same(tmp_path: Path) -> None:
    await asyncio.wait_for(Backoff(f"grpc+unix://{tmp_path}/never", 0.05).wait(), 30)
