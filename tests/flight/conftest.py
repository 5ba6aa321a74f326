"""Fixtures of the flight tests: one body over both kinds of edge; nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prorl.flight import FlightNetwork
from prorl.protocols import Channel


@dataclass(frozen=True)
class Net:
    """A network and names to listen at."""

    network: FlightNetwork
    name: Callable[[str], str]


class Sockets(FlightNetwork):
    """A network that dials through the socket what it serves itself, as another process would."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._other = FlightNetwork(*args, **named)

    async def dial(self, *args: Any) -> Channel:
        return await self._other.dial(*args)

    async def close(self) -> None:
        await super().close()
        await self._other.close()


def flight_threads() -> list[str]:
    """Names of stream threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flight-")]


def num_sockets() -> int:
    """Open sockets of this process."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum("socket:" in link for link in links)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if a stream thread outlives its network."""
    yield
    assert flight_threads() == []


@pytest.fixture(params=["local", "flight"])
async def net(request: pytest.FixtureRequest, tmp_path: Path, no_leaks: None) -> AsyncIterator[Net]:
    """Both kinds of dial, in memory and through the socket; every test body runs over both."""
    kind = FlightNetwork if request.param == "local" else Sockets
    async with kind(token="secret") as network:
        yield Net(network, lambda name: f"grpc+unix://{tmp_path}/{name}.sock")
    await asyncio.sleep(0)
