"""Fixtures of the flight tests: one body over both networks, and nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prorl.flight import FlightNetwork, LocalNetwork


@dataclass(frozen=True)
class Net:
    """A network and names to listen at."""

    network: FlightNetwork | LocalNetwork
    name: Callable[[str], str]


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
    """A network of each kind; every test body runs over both."""
    if request.param == "local":
        async with LocalNetwork() as local:
            yield Net(local, lambda name: name)
    else:
        async with FlightNetwork(token="secret") as flight:
            yield Net(flight, lambda name: f"grpc+unix://{tmp_path}/{name}.sock")
    await asyncio.sleep(0)
