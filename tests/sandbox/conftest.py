"""A sandboxd in a process of its own, as the service runs it, for each kind that works on this
machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.kinds.engine_support import program
from prorl.sandbox.node.probe import probe_kind
from prorl.sandbox.spawn import command
from prorl.types import SandboxRef, SandboxSpec
from tests.sandbox import small_image
from tests.waiting import until

KINDS = (
    "pyns",
    "local",
    pytest.param("apptainer", marks=pytest.mark.apptainer),
)
IMAGE_KINDS = tuple(kind for kind in KINDS if kind != "local")


@cache
def _reason(kind: str) -> str:
    with ThreadPoolExecutor(1) as pool:  # a loop of its own, also when a test's loop is running
        verdict = pool.submit(asyncio.run, probe_kind(kind)).result()
    return "" if verdict.works else f"{kind}: {verdict.reason}"


def why_not(kind: str) -> str:
    """Returns why a kind cannot be tested here, empty when it can; a failure where PRORL_REQUIRE
    names the kind (CI must not skip quietly).
    """
    reason = _reason(kind)
    if reason and kind in os.environ.get("PRORL_REQUIRE", "").split(","):
        pytest.fail(
            f"PRORL_REQUIRE asks for a kind that does not work here: {reason}", pytrace=False
        )
    return reason


class Sandboxd:
    """A running daemon: its process, socket, root, and a client."""

    def __init__(
        self, process: asyncio.subprocess.Process, root: Path, host: UnixSandboxHost
    ) -> None:
        self.process, self.root, self.host = process, root, host


async def start_daemon(
    kind: str, folder: Path, *, prefix: Sequence[str] = (), **settings: Any
) -> Sandboxd:
    """Spawn sandboxd and wait for its `ready`; `prefix` stands before Python's command line."""
    argv = [*prefix, *command(folder, kind, **{"warm": 0, **settings})]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    root = Path(settings.get("root", folder / "root"))
    return Sandboxd(process, root, UnixSandboxHost(str(folder / "sd")))


async def until_live(host: UnixSandboxHost, count: int) -> None:
    """Wait until so many sandboxes are there."""

    async def is_so() -> bool:
        return bool((await host.status())["live"] == count)

    await until(is_so, f"{count} live")


async def end(daemon: Sandboxd) -> None:
    """SIGTERM, and nothing may be left."""
    await daemon.host.close()
    if daemon.process.returncode is None:
        daemon.process.terminate()
    await daemon.process.wait()
    assert list(daemon.root.glob("live/*")) == []


@contextmanager
def short_folder(mode: int = 0o711) -> Iterator[Path]:
    """One that other uids may pass through (pytest's own are deep and private)."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-", dir="/tmp") as name:
        Path(name).chmod(mode)
        yield Path(name)


async def is_usable(host: UnixSandboxHost, owner: str) -> SandboxRef:
    """A new sandbox starts and answers."""
    ref = await host.start(owner, "run", SandboxSpec())
    async with host.connect(ref) as sandbox:
        assert (await sandbox.call("bash", {"command": "echo on"}, 20.0)).output == "on\n"
    return ref


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind in turn; one that does not work here is skipped with the reason."""
    name = str(request.param)
    if why_not(name):
        pytest.skip(why_not(name))
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(kind: str) -> AsyncIterator[Sandboxd]:
    with short_folder() as made:
        daemon = await start_daemon(kind, made)
        yield daemon
        await end(daemon)


@pytest_asyncio.fixture(loop_scope="module")
async def sandboxd(shared: Sandboxd) -> AsyncIterator[Sandboxd]:
    """The module's daemon; every sandbox of the test ends with the test."""
    yield shared
    sandboxes = (await shared.host.status())["sandboxes"]
    await asyncio.gather(
        *(shared.host.stop(SandboxRef(sandbox_id=entry["id"])) for entry in sandboxes)
    )
    assert (await shared.host.status())["live"] == 0


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_folder(0o755) as made:
        yield made


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    return small_image.make_image(place)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path / "images")
    made.open()
    return made


@pytest.fixture(scope="module")
def sif(base: Path) -> Path:
    if why_not("apptainer"):
        pytest.skip(why_not("apptainer"))
    path = base.parent / "image.sif"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(base.parent),
        "APPTAINER_CONFIGDIR": str(base.parent / "state"),
    }
    subprocess.run(
        [program(), "-s", "build", str(path), str(base)],
        check=True,
        env=environment,
        capture_output=True,
    )
    return path
