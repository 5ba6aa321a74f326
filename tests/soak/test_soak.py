"""A service under sixty faults in five minutes, with real tools and a streaming consumer: nothing
lost, nothing twice, nothing left.

SIGKILL and SIGSTOP of every kind of process while the run works, a model server that goes away, a
disk that is full. Which fault strikes when follows from the seed, which is printed, and so is the
table at the end. `PRORL_SOAK_FAULTS`, `PRORL_SOAK_ROLLOUTS`, `PRORL_SOAK_S` make it longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prorl.backends import open_backend
from prorl.backends.server import TokenServer
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread, service, signals
from prorl.envs import get_env
from prorl.errors import ProrlError, UnavailableError
from prorl.linux.procfs import descendants
from prorl.supervisor.service import Supervisor
from prorl.testing import RENDERER
from prorl.tokenizer import ByteTokenizer
from prorl.types import Json, Task
from tests.integration.checks import check_complete, check_nothing_left, rows

FAULTS = int(os.environ.get("PRORL_SOAK_FAULTS", "60"))
ROLLOUTS = int(os.environ.get("PRORL_SOAK_ROLLOUTS", "500"))
SECONDS = float(os.environ.get("PRORL_SOAK_S", "300"))
SEED = int(os.environ.get("PRORL_SOAK_SEED", str(random.SystemRandom().randrange(10**6))))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(int(4 * SECONDS) + 600)]

N, WAVE = 2, 12
DISK_BYTES = 256 << 20
PROCESSES = ("gateway", "sandboxd", "init-0", "run-0", "run-1", "eval-0", "eval-1", "store")


@dataclass
class Table:
    """What struck and how long it took until the process was back."""

    struck: Counter[str] = field(default_factory=Counter)
    back_s: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"seed {SEED}", "fault                 times  back after s: median  worst"]
        for name, times in sorted(self.struck.items()):
            took = self.back_s.get(name, [])
            figures = f"{statistics.median(took):8.1f} {max(took):6.1f}" if took else ""
            lines.append(f"{name:22}{times:5}             {figures}")
        return "\n".join(lines)


class Model:
    """A model server at one address that can be away."""

    def __init__(self) -> None:
        self.port = 0
        self._server: TokenServer | None = None

    async def start(self) -> str:
        """Listen (again)."""
        backend = open_backend("scripted:random?delay_s=0.1", RENDERER, get_env)
        server = TokenServer(backend, ByteTokenizer(), model="toy", port=self.port)
        self._server = await server.__aenter__()
        self.port = int(self._server.url.rpartition(":")[2])
        return self._server.url

    async def stop(self) -> None:
        """Go away."""
        if self._server is not None:
            await self._server.__aexit__(None, None, None)
            self._server = None


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A small file system of its own, where we may mount one; whether it is one."""
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    own = os.geteuid() == 0 and subprocess.run(argv, capture_output=True).returncode == 0
    try:
        yield own
    finally:
        if own:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class Consumer:
    """A trainer's reading side, which comes back after everything."""

    def __init__(self, location: Path, client: Client) -> None:
        self._client = client
        self.groups: Counter[int] = Counter()
        self.cursor: str | None = None
        self.done = False

    def run(self) -> None:
        """Read until the run's end; a group counts once its cursor is committed."""
        while not self.done:
            try:
                for batch in self._client.stream("r", cursor=self.cursor, groups_per_batch=1):
                    self.groups[int(batch.group_ids[0])] += 1
                    self.cursor = batch.cursor
                    self._client.commit(batch)
                self.done = True
            except (ProrlError, OSError):
                time.sleep(0.3)


class Soak:
    """One run and what happens to it."""

    def __init__(self, running: Supervisor, client: Client, model: Model, own_disk: bool) -> None:
        self.running, self.client, self.model, self.own_disk = running, client, model, own_disk
        self.chance, self.table = random.Random(SEED), Table()
        self.root = running.config.root

    async def view(self) -> dict[str, Json]:
        """The run, if the gateway is there."""
        with contextlib.suppress(UnavailableError):
            found = dict(await in_thread(self.client.run, "r"))
            self.running.note_commits(int(found["commits"]))
            return found
        return {}

    async def strike(self) -> None:
        """All faults, spread over the time there is."""
        kinds = [f"{what} {name}" for name in PROCESSES for what in ("kill", "stop")]
        kinds += ["model away"] * 2 + (["disk full"] if self.own_disk else [])
        left = [kinds[i % len(kinds)] for i in range(FAULTS)]
        self.chance.shuffle(left)
        async with asyncio.TaskGroup() as group:
            for kind in left:
                group.create_task(self.fault(kind))
                await asyncio.sleep(SECONDS / FAULTS * self.chance.uniform(0.5, 1.2))

    async def fault(self, kind: str) -> None:
        """One fault, until what it hit is back."""
        what, _, name = kind.partition(" ")
        began = time.monotonic()
        if kind == "model away":
            await self.model.stop()
            await asyncio.sleep(self.chance.uniform(2, 8))
            await self.model.start()
        elif kind == "disk full":
            await in_thread(self.fill)
            await asyncio.sleep(self.chance.uniform(2, 5))
            (self.root.parent / "filler").unlink(missing_ok=True)
        else:
            child = self.running.children[name]
            while not child.beats:  # struck by another fault just now
                await asyncio.sleep(0.1)
            lives, began = child.lives, time.monotonic()
            child.signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            while not (child.lives > lives and child.beats):
                await asyncio.sleep(0.02)
            self.table.back_s.setdefault(kind, []).append(time.monotonic() - began)
        self.table.struck[kind] += 1

    def fill(self) -> None:
        """Leave no room."""
        with contextlib.suppress(OSError), (self.root.parent / "filler").open("wb") as file:
            while True:
                file.write(b"\0" * (1 << 20))
                file.flush()

    async def feed(self, strikes: asyncio.Task[None]) -> int:
        """Submit waves as long as faults are to come; how many rollouts."""
        wave = 0
        while True:
            last = strikes.done() and wave * WAVE * N >= ROLLOUTS
            tasks = [self.task(wave * WAVE + i) for i in range(WAVE)]
            key = f"w{wave}"
            await in_thread(
                lambda tasks=tasks, key=key, last=last: self.client.submit(
                    "r", tasks, N, key=key, last=last
                )
            )
            wave += 1
            if last:
                return wave * WAVE * N
            while (await self.view()).get("counts", {}).get("queued", 99) >= WAVE:
                await asyncio.sleep(0.2)

    async def whole(self, strikes: asyncio.Task[None], reading: asyncio.Future[None]) -> int:
        """Until everything that was asked for has ended and was read; how many rollouts."""
        expected = await self.feed(strikes)
        await strikes
        async with asyncio.timeout(SECONDS + 300):
            while (await self.view()).get("state") != "finished" or not reading.done():
                await asyncio.sleep(0.2)
        await reading
        return expected

    def task(self, number: int) -> Task:
        """A sum with a Python tool in a sandbox."""
        answer = number + 7
        data = {"answer": str(answer), "solution": f"<<{number}+7={answer}>>\n#### {answer}"}
        prompt = f"What is {number} + 7?"
        return Task(task_id=f"sum/{number}", env="math", prompt=prompt, data=data)


@contextlib.asynccontextmanager
async def soaking(folder: Path, sandbox_kind: str, own_disk: bool) -> AsyncIterator[Soak]:
    """A service with two model servers, one of which may go away."""
    model = Model()
    url = await model.start()
    pool = {"slots": 6, "workers": 2}
    config = {
        "root": folder / "root",
        "backends": ("scripted:oracle?delay_s=0.15", url),
        "model": "toy",
        "sandbox": {"kind": sandbox_kind},
        "init": {"slots": 6},
        "run": pool,
        "eval": pool,
    }
    try:
        async with signals() as stop, service(ServiceConfig.model_validate(config), stop) as made:
            assert isinstance(made, Supervisor)
            client = client_of(made)
            yield Soak(made, client, model, own_disk)
            client.close()
    finally:
        await model.stop()


async def test_soak(tmp_path: Path, sandbox_kind: str) -> None:
    before, began = set(descendants(os.getpid())), time.monotonic()
    limits = {"max_attempts": 40, "max_worker_losses": 40}
    with disk(tmp_path / "disk") as own_disk:
        async with soaking(tmp_path / "disk", sandbox_kind, own_disk) as soak:
            run = {"run_id": "r", "delivery": "stream", "limits": limits}
            await in_thread(lambda: soak.client.create_run(**run, max_unacked_groups=64))
            consumer = Consumer(tmp_path, client_of(soak.running))
            reading = asyncio.ensure_future(in_thread(consumer.run))
            strikes = asyncio.ensure_future(soak.strike())
            judging = asyncio.ensure_future(soak.whole(strikes, reading))
            failing = asyncio.ensure_future(soak.running.failed())
            await asyncio.wait({judging, failing}, return_when=asyncio.FIRST_COMPLETED)
            consumer.done = True
            print(f"\n{soak.table}", file=sys.stderr)
            if failing.done():
                failing.result()
            expected = await judging
            root = soak.root
        took = time.monotonic() - began
        check_nothing_left(root, before)
        stored = check_complete(root / "r", expected)
        done = rows(stored, "select count(*) as n from rollouts where status = 'completed'")[0]["n"]
        delivered = rows(stored, "select group_id from groups where event = 'delivered'")
        print(
            f"{expected} rollouts, {done} completed ({done / expected:.2%}),"
            f" {sum(soak.table.struck.values())} faults in {took:.0f} s,"
            f" {len(consumer.groups)} groups read, 0 lost, 0 twice",
            file=sys.stderr,
        )
        assert sorted(consumer.groups) == sorted(row["group_id"] for row in delivered)
        assert set(consumer.groups.values()) <= {1}, "a group that came twice"
        assert done >= 0.99 * expected
        assert sum(soak.table.struck.values()) == FAULTS
