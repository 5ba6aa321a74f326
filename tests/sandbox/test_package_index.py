"""pip installs a package from this machine's own index, from inside a sandbox, by the proxy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import pytest

from prorl.types import SandboxSpec
from tests.sandbox.conftest import end, short_folder, start_daemon, why_not

PACKAGE = "iniconfig"
"""Small, of pure Python, and a package that pytest itself is installed with."""


class Index(NamedTuple):
    url: str
    cert: str
    hosts: tuple[str, ...]
    """Of the index, and of the files that it links to."""


def _pip(*words: str) -> str:
    argv = [sys.executable, "-m", "pip", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


@cache
def index() -> Index | str:
    """The index that pip is configured for, or why there is none."""
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    url = _pip("config", "get", "global.index-url") or own.stdout.strip()
    if not url:
        return "this Python has no pip"
    page = f"{url.rstrip('/')}/{PACKAGE}/"
    try:
        with urllib.request.urlopen(page, timeout=20) as answer:
            text = answer.read().decode("utf-8", "replace")
    except OSError as error:
        return f"pip's index does not answer: {error}"
    links = [part.partition('"')[0] for part in text.split('href="')[1:]]
    hosts = dict.fromkeys(urlsplit(urljoin(page, link)).netloc for link in ("", *links))
    return Index(url, _pip("config", "get", "global.cert"), tuple(hosts))


@pytest.mark.parametrize(
    "kind", ["pyns", pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.slow])]
)
@pytest.mark.parametrize("mode", ["allowlist", "no-network"])
async def test_pip_installs_from_inside_where_the_task_may(kind: str, mode: str) -> None:
    if why_not(kind):
        pytest.skip(why_not(kind))
    pip_index = await asyncio.to_thread(index)
    if isinstance(pip_index, str):
        pytest.skip(pip_index)
    env = {"PIP_INDEX_URL": pip_index.url, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    env |= {"PIP_CERT": pip_index.cert} if pip_index.cert else {}
    mirrors = [_target(host) for host in pip_index.hosts]
    network = {"mode": "public", "mirrors": mirrors, "env": env}
    spec = SandboxSpec(network_mode=mode, address_bytes=1 << 40)
    with short_folder() as folder:
        daemon = await start_daemon(kind, folder, network=network)
        ref = await daemon.host.start("r/1/1", "run", spec)
        async with daemon.host.connect(ref) as sandbox:
            install = f"{sys.executable} -m pip install --no-deps --target there {PACKAGE}"
            done = await sandbox.call("bash", {"command": install}, 100.0)
            show = f"PYTHONPATH=there python3 -c 'import {PACKAGE} as p; print(p.__file__)'"
            imported = await sandbox.call("bash", {"command": show}, 30.0)
        await end(daemon)
    if mode == "no-network":
        assert done.exit_code != 0
    else:
        assert done.exit_code == 0, done.output
        assert Path(imported.output.strip()).parts[-3:-1] == ("there", PACKAGE)


def _target(host: str) -> list[object]:
    name, _, port = host.partition(":")
    return [name, int(port or 443)]
