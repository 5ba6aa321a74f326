"""sandboxd's end of the network's proxy: what it is told by the configuration, and its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from prorl.config import NetworkConfig, ServiceConfig, parse
from prorl.errors import ConfigError, UnavailableError
from prorl.sandbox.client import ConnectedSandbox
from prorl.sandbox.spawn import spawned
from prorl.supervisor.specs import child_specs
from prorl.types import Json, SandboxSpec
from tests.sandbox.conftest import end, start_daemon, why_not
from tests.waiting import until

CONNECT = r"""exec 3<>/dev/tcp/127.0.0.1/3128
printf 'CONNECT 127.0.0.2:%d HTTP/1.1\r\nHost: x\r\n\r\n' >&3
read -r _ status _ <&3; echo "$status"
"""


async def test_a_proxy_that_is_killed_is_started_again_with_what_was_open(folder: Path) -> None:
    if why_not("pyns"):
        pytest.skip(why_not("pyns"))
    async with await asyncio.start_server(_hold, "127.0.0.2", 0) as server:
        port = server.sockets[0].getsockname()[1]
        network = {"mode": "public", "mirrors": [["127.0.0.2", port]]}
        daemon = await start_daemon("pyns", folder, network=network)
        ref = await daemon.host.start("r/1/1", "run", SandboxSpec(network_mode="public"))
        async with daemon.host.connect(ref) as sandbox:
            assert await _status(sandbox, port) == "200"
            first = (await daemon.host.status())["proxy_pid"]
            os.kill(first, signal.SIGKILL)

            async def is_back() -> bool:
                return (await daemon.host.status())["proxy_pid"] not in (0, first)

            await until(is_back, "another proxy")
            assert await _status(sandbox, port) == "200"
        await end(daemon)


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _status(sandbox: ConnectedSandbox, port: int) -> str:
    return (await sandbox.exec(["bash", "-c", CONNECT % port], 60.0)).output.strip()


async def test_a_kind_without_a_loopback_of_its_own_is_granted_no_network() -> None:
    with pytest.raises(UnavailableError, match="sandboxes of kind local have no network"):
        async with spawned("local", network={"mode": "public"}):
            pass


def test_sandboxd_hears_where_the_service_is_and_no_password_is_on_its_command_line() -> None:
    upstream = "http://user:secret@proxy.internal:3128"
    network = {"mode": "public", "upstream": upstream, "closed_hosts": ["10.0.0.9", "a.b:5"]}
    values = {"sandbox": {"network": network}, "backends": ["http://gpu-1:8000", "scripted:noop"]}
    config = parse(ServiceConfig, values, "test")
    (spec,) = (spec for spec in child_specs(config, "file") if spec.name == "sandboxd")
    settings = json.loads(spec.args[0])["network"]
    assert settings["closed"] == [["gpu-1", 8000], ["10.0.0.9", 0], ["a.b", 5]]
    assert "secret" not in " ".join(spec.args)
    assert upstream in spec.env.values()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"mode": "host"}, "one of 'no-network', 'allowlist' or"),
        ({"allowed_hosts": ["a.org"]}, "mode: allowlist beside allowed_hosts"),
        ({"mode": "allowlist", "allowed_hosts": ["10.0.0.0/8"]}, "'10.0.0.0/8' is an address"),
        ({"mirrors": ["http://pypi.internal/simple"]}, "expected HOST or HOST:PORT"),
        ({"closed_hosts": ["*.internal"]}, "expected HOST or HOST:PORT"),
        ({"upstream": "socks5://proxy:1080"}, "http://[USER:PASSWORD@]HOST:PORT"),
    ],
)
def test_an_invalid_setting_is_refused_in_a_single_line(values: Json, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(NetworkConfig, values, "test")
    assert problem in str(caught.value)
