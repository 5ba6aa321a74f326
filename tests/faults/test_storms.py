"""SIGKILL storms: each process of the chain is killed over and over while sandboxes do work, and
nothing may be left after any kill.

PRORL_KILLS is the number of kills of each process for pyns; the other kinds get a fifth (`make
test-kills` runs 100 and 20). Every round says what the agent, the kernel and the disk still have:
processes, mounts, sockets, folders, control groups. The kill falls at a random moment of a busy
sandbox; in every other round another sandbox is just being started.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prorl.client.client import Client
from prorl.deploy.running import client_of, service, signals
from prorl.errors import SandboxError
from prorl.sandbox.client import ConnectedSandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.supervisor.root import box_dir
from prorl.supervisor.service import Supervisor
from prorl.types import Json, SandboxRef, SandboxSpec, Task
from tests.faults.leftovers import Leftovers, Watched, tool_server
from tests.integration.services import APART, settings, slots
from tests.sandbox.conftest import Sandboxd, end, folder, kind, start_daemon  # noqa: F401 - fixtures
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]

_serial = itertools.count()
KILLS = int(os.environ.get("PRORL_KILLS", "3"))
SPEC = SandboxSpec()
PATIENCE_S = 240.0
"""Struck again the moment that it is back, `service` may be away at each try of 20 s."""
WORK = (
    "mkdir -p made; setsid nohup sleep 300.{mark} >/dev/null 2>&1 & (setsid bash -c 'while :; do"
    " sleep 0.2{mark}; done' &) ; echo busy; i=0; while :; do i=$((i+1)); echo $i > made/$((i%50));"
    " (sleep 0.0{mark} &); sleep 0.01{mark}; done"
)
"""Two daemons and a shell that forks and writes without end."""


def kills_of(name: str) -> int:
    """Returns how often each process is killed for this kind."""
    return KILLS if name == "pyns" else max(1, KILLS // 5)


class Storm:
    """One storm's figures, told at its end."""

    def __init__(self, request: pytest.FixtureRequest, kind_name: str, victim: str) -> None:
        self._request, self._what = request, f"{kind_name} {victim}"
        self._total, self._waits, self._begin = Leftovers(), [0.0], time.monotonic()
        self.kills = 0
        self.random = random.Random(self._what)

    def mark(self) -> str:
        """Digits that are in no other command line of this machine."""
        return f"{os.getpid()}{next(_serial):05}"

    def note(self, leftovers: Leftovers, seconds: float) -> None:
        """After one kill."""
        self.kills += 1
        self._total += leftovers
        self._waits.append(seconds)
        assert leftovers.total == 0, f"{self._what}, kill {self.kills}: {leftovers}"

    def tell(self) -> None:
        """One line on the terminal."""
        line = (
            f"storm {self._what}: {self.kills} kills, left: {self._total}; all gone after"
            f" {max(self._waits):.2f} s at most"
        )
        capture = self._request.config.pluginmanager.get_plugin("capturemanager")
        assert capture is not None
        with capture.global_and_fixture_disabled():
            print(f"\n{line}; {time.monotonic() - self._begin:.0f} s", flush=True)


@asynccontextmanager
async def storm(
    request: pytest.FixtureRequest, kind_name: str, victim: str
) -> AsyncIterator[Storm]:
    """Tells its figures whatever happens."""
    figures = Storm(request, kind_name, victim)
    try:
        yield figures
    finally:
        figures.tell()


@asynccontextmanager
async def two_at_work(host: UnixSandboxHost, mark: str) -> AsyncIterator[list[SandboxRef]]:
    """Two sandboxes of two rollouts whose agents are in the middle of something."""
    async with AsyncExitStack() as stack:
        refs, calls = [], []
        for number in (1, 2):
            ref = await host.start(f"run/{number}/1", "run", SPEC)
            sandbox = await stack.enter_async_context(host.connect(ref))
            await sandbox.put("busy.sh", WORK.format(mark=mark).encode())
            calls.append(asyncio.create_task(work(sandbox)))
            refs.append(ref)
        try:
            yield refs
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def work(sandbox: ConnectedSandbox) -> None:
    """Ends with the sandbox or the test."""
    try:
        await sandbox.call("bash", {"command": ". ./busy.sh"}, 300.0)
    except SandboxError:
        pass


async def is_busy(watched: Watched, at_least: int) -> None:
    """Until the agents' daemons run."""
    for _ in range(2000):
        if len(watched.agents()) >= at_least:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the agents never began")


def watch(daemon: Sandboxd, ref: SandboxRef, mark: str) -> Watched:
    """Everything that hangs on this daemon."""
    return Watched(Path(ref.socket_path).parent.name, daemon.root, mark)


async def start_sandbox(host: UnixSandboxHost, is_due: bool) -> None:
    """A start that the kill may fall into."""
    if is_due:
        try:
            await host.start("run/3/1", "run", SPEC)
        except SandboxError:
            pass


async def test_sandboxd(request: pytest.FixtureRequest, kind: str, folder: Path) -> None:  # noqa: F811
    """Every other time the next sandboxd has this root, else any other root: both clear up."""
    async with storm(request, kind, "sandboxd") as figures:
        for number in range(kills_of(kind)):
            mark = figures.mark()
            place = folder / f"{number}"
            place.mkdir(mode=0o711)
            daemon = await start_daemon(kind, place)
            async with two_at_work(daemon.host, mark) as refs:
                watched = watch(daemon, refs[0], mark)
                await is_busy(watched, 4)
                starting = asyncio.create_task(start_sandbox(daemon.host, number % 2 == 1))
                await asyncio.sleep(figures.random.uniform(0, 0.1))
                watched.remember(daemon.process.pid)
                daemon.process.kill()
                await daemon.process.wait()
                await starting
                alone, seconds = await watched.until_none(processes_only=True)
            await daemon.host.close()
            assert alone.total == 0, f"kill {number}: without anybody's help {alone}"
            if number % 4 >= 2:
                place = folder / f"{number}-other"
                place.mkdir(mode=0o711)
            after = await start_daemon(kind, place)
            leftovers, more = await watched.until_none(daemon=watched.root != after.root)
            await end(after)
            figures.note(leftovers + watched.count_leftovers(daemon=True), seconds + more)


async def test_zygote(request: pytest.FixtureRequest, kind: str, folder: Path) -> None:  # noqa: F811
    """Every other time in the middle of a start; sandboxd goes on with another zygote."""
    daemon = await start_daemon(kind, folder)
    async with storm(request, kind, "zygote") as figures:
        for number in range(kills_of(kind)):
            mark = figures.mark()
            async with two_at_work(daemon.host, mark) as refs:
                watched = watch(daemon, refs[0], mark)
                await is_busy(watched, 4)
                zygote = (await daemon.host.status())["zygote_pid"]
                starting = asyncio.create_task(start_sandbox(daemon.host, number % 2 == 1))
                await asyncio.sleep(figures.random.uniform(0, 0.1))
                watched.remember(zygote)
                os.kill(zygote, signal.SIGKILL)
                await starting
                await daemon.host.stop_owner("run/3/1")
                leftovers, seconds = await watched.until_none()
            assert (await daemon.host.status())["live"] == 0
            figures.note(leftovers, seconds)
    await end(daemon)


@pytest.mark.parametrize("victim", ["launcher", "tool server"])
async def test_killing_a_process_ends_its_own_sandbox_only(
    request: pytest.FixtureRequest,
    kind: str,  # noqa: F811
    folder: Path,  # noqa: F811
    victim: str,
) -> None:
    """Under one sandboxd, whose own things must stay flat; the neighbour goes on."""
    daemon = await start_daemon(kind, folder)
    async with storm(request, kind, victim) as figures:
        for number in range(kills_of(kind)):
            mark = figures.mark()
            async with two_at_work(daemon.host, mark) as refs:
                watched = watch(daemon, refs[0], mark)
                await is_busy(watched, 4)
                entries = {
                    entry["id"]: entry["pid"] for entry in (await daemon.host.status())["sandboxes"]
                }
                launcher = entries[refs[0].sandbox_id]
                target = launcher if victim == "launcher" else tool_server(launcher)
                watched.remember(launcher)
                starting = asyncio.create_task(start_sandbox(daemon.host, number % 2 == 1))
                await asyncio.sleep(figures.random.uniform(0, 0.1))
                os.kill(target, signal.SIGKILL)
                await starting
                await until(lambda: is_alone(daemon.host, refs), "sandboxd hears of it")
                assert watched.agents(), "the neighbour goes on"
                await daemon.host.stop(refs[1])
                await daemon.host.stop_owner("run/3/1")
                leftovers, seconds = await watched.until_none()
            assert (await daemon.host.status())["live"] == 0
            figures.note(leftovers, seconds)
    await end(daemon)


async def is_alone(host: UnixSandboxHost, refs: list[SandboxRef]) -> bool:
    """Returns whether the second of two incarnations and the first does not."""
    living = {entry["id"] for entry in (await host.status())["sandboxes"]}
    assert refs[1].sandbox_id in living
    return refs[0].sandbox_id not in living


def tasks(wave: int) -> list[Task]:
    """Programs that take a while in RUN's sandbox and in EVAL's."""
    prompt = 'def nine() -> int:\n    """Nine."""\n'
    data = {
        "prompt": prompt,
        "entry_point": "nine",
        "test": "def check(candidate):\n    assert candidate() == 9\n",
        "canonical_solution": "    import time\n    time.sleep(0.3)\n    return 9\n",
    }
    return [
        Task(task_id=f"nine/{wave}/{number}", env="code", prompt=prompt, data=data)
        for number in range(6)
    ]


@pytest.mark.parametrize("victim", ["worker-0", "eval-0", "service"])
async def test_stages(
    request: pytest.FixtureRequest,
    kind: str,  # noqa: F811
    tmp_path: Path,
    victim: str,
) -> None:
    """RUN or EVAL dies while it holds rollouts, apart or with all that is `service`: after the wave
    no sandbox is left.
    """
    root = tmp_path / "root"
    layout = {"workers": 0} if victim == "service" else APART
    config = settings(root, kind, "scripted:oracle?delay_s=0.1", **{**slots(4), **layout})
    async with (
        storm(request, kind, victim) as figures,
        signals() as stop,
        service(config, stop) as running,
    ):
        assert isinstance(running, Supervisor)
        client = client_of(running, PATIENCE_S)
        await asyncio.to_thread(
            client.create_run, run_id="r", limits={"max_attempts": 99, "max_worker_losses": 99}
        )
        host = UnixSandboxHost(str(running.config.sandbox_socket))
        ref = await host.start("other/1/1", "run", SPEC)
        watched = Watched(
            Path(ref.socket_path).parent.name, box_dir(root.resolve()), "no such mark"
        )
        await host.stop(ref)
        for number in range(kills_of(kind)):
            await asyncio.to_thread(client.submit, "r", tasks(number), 1, key=f"w{number}")
            child = running.children[victim]
            await holds_work(host, victim, figures.random)
            for entry in (await host.status())["sandboxes"]:
                watched.remember(entry["pid"])
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: all_done(client, running), "the wave ends")
            leftovers, seconds = await watched.until_none()
            figures.note(leftovers, seconds)
        await host.close()
    assert not box_dir(root).exists()


async def holds_work(host: UnixSandboxHost, victim: str, chance: random.Random) -> None:
    """Until the stage has an attempt in hand: RUN reserves EVAL's sandbox when it begins, and stops
    its own when it ends.
    """
    expected = {"eval"} if victim == "eval-0" else {"run", "eval"}

    async def busy() -> bool:
        purposes: dict[str, set[str]] = {}
        for entry in (await host.status())["sandboxes"]:
            purposes.setdefault(entry["owner"], set()).add(entry["purpose"])
        return expected in purposes.values()

    await until(busy, f"{victim} holds work")
    await asyncio.sleep(chance.uniform(0, 0.02 if victim == "eval-0" else 0.3))


async def all_done(client: Client, running: Supervisor) -> bool:
    """Returns whether no rollout is open.

    The supervisor is told of commits: without any, deaths in a row would be a crash loop.
    """
    view: dict[str, Json] = await asyncio.to_thread(client.run, "r")
    running.note_commits(int(view["commits"]))
    return not any(
        value
        for name, value in view["counts"].items()
        if name in ("queued", "leased", "running", "reserved")
    )
