"""Whoever does not belong to a service is refused over HTTPS and over Flight, in one line each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prorl.client.client import Client
from prorl.client.http import Http
from prorl.config import ServiceConfig
from prorl.errors import ProrlError
from prorl.flight import FlightNetwork
from prorl.net.bearer import Keys, keys_of, signing_key
from prorl.net.join import Join, new_join
from prorl.net.tls import Authority, Credentials
from prorl.schema import CONTROL
from prorl.service.serve import serving
from tests.integration.test_outside import three_ports
from tests.service.running_gateway import TOKEN, settings

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")


@dataclass
class Shut:
    """A service reached from outside, and who could join it."""

    config: ServiceConfig
    authority: Authority

    def join(self, role: str, days: float = 1.0) -> Join:
        """A good join file's content, of so many days."""
        assert self.config.listener is not None
        root = self.config.root
        token = Keys(TOKEN, signing_key(root)).issue(role)[1]
        return new_join(root, role, self.config.listener.url, token, days)

    async def over_http(self, join: Join) -> str:
        """Returns the message for somebody who makes a run."""
        http = Http(join.url, join.token, retry_s=0.2, credentials=join.credentials)
        client = Client(http=http, credentials=join.credentials)
        with pytest.raises(ProrlError) as caught:
            await asyncio.to_thread(client.create_run, run_id="r")
        return str(caught.value)

    async def over_flight(self, join: Join) -> str:
        """Returns the message for somebody who dials the control stream."""
        assert self.config.listener is not None
        async with FlightNetwork(join.token, join.credentials) as network:
            with pytest.raises(ProrlError) as caught:
                await network.dial(self.config.listener.gateway, "control", {}, CONTROL, CONTROL)
        return str(caught.value)


@asynccontextmanager
async def shut(tmp_path: Path, server_role: str = "service") -> AsyncIterator[Shut]:
    """A gateway with a certificate of this role."""
    config = settings(tmp_path, listen=f"127.0.0.1:{three_ports()}")
    authority = Authority.of(config.tls_dir)
    signing_key(config.root)
    own: Credentials = replace(authority.credentials(server_role), role="service")
    async with (
        FlightNetwork(TOKEN, own, keys_of(config)) as network,
        serving(config, network, credentials=own),
    ):
        yield Shut(config, authority)


async def lines(service: Shut, join: Join) -> tuple[str, str]:
    """Both, each of which is one line."""
    both = await service.over_http(join), await service.over_flight(join)
    assert all("\n" not in line and len(line) < 300 for line in both), both
    return both


async def test_another_authority(tmp_path: Path) -> None:
    async with shut(tmp_path) as service:
        stranger = Authority.of(tmp_path / "other").credentials("trainer")
        join = replace(service.join("trainer"), authority=stranger.authority)
        for line in await lines(service, join):
            assert "another authority" in line
        join = replace(service.join("trainer"), certificate=stranger.certificate, key=stranger.key)
        for line in await lines(service, join):
            assert "certificate was refused" in line


@pytest.mark.parametrize(
    ("server", "role", "days", "expected"),
    [
        ("service", "trainer", -1.0, "our own certificate ended"),
        ("node", "trainer", 1.0, "not one of a prorl service"),  # of the right authority
        ("service", "viewer", 1.0, "as viewer"),
    ],
)
async def test_a_certificate_that_will_not_do(
    tmp_path: Path, server: str, role: str, days: float, expected: str
) -> None:
    async with shut(tmp_path, server) as service:
        for line in await lines(service, service.join(role, days)):
            assert expected in line


async def test_no_certificate(tmp_path: Path) -> None:
    async with shut(tmp_path) as service:
        assert service.config.listener is not None
        with pytest.raises(ProrlError, match="join file"):
            Http(service.config.listener.url, TOKEN, retry_s=0.2)
        async with FlightNetwork(TOKEN) as network:
            with pytest.raises(ProrlError, match="without a certificate"):
                await network.dial(service.config.listener.gateway, "control", {}, CONTROL, CONTROL)


async def test_a_wrong_token(tmp_path: Path) -> None:
    async with shut(tmp_path) as service:
        http, flight = await lines(service, replace(service.join("trainer"), token="wrong"))
        assert "refused the token: a wrong bearer token" in http
        assert "refused the bearer token: a wrong bearer token" in flight
