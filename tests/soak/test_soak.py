"""A service under sixty faults in five minutes, with real tools and a streaming consumer: nothing
lost, nothing twice, nothing left.

SIGKILL and SIGSTOP of every kind of process while the run works, the consumer too, all of them
stopped at once, a model server that goes away, is busy or lies, a disk that is full or takes no new
file. Which fault strikes when follows from the seed, which is printed, and so is the table at the
end. `PRORL_SOAK_FAULTS`, `PRORL_SOAK_ROLLOUTS`, `PRORL_SOAK_S` make it longer. What clients saw is
compared with what is stored (`history.py`). When it fails, everything that may say why is in
`PRORL_SOAK_KEEP` (default: a folder in /tmp, printed).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.errors import UnavailableError
from prorl.linux.procfs import descendants, is_stopped
from prorl.storage.read.catalog import StoredRun
from prorl.supervisor.child import ChildProcess, ChildSpec, exit_text
from prorl.supervisor.service import Supervisor
from prorl.testing import RENDERER
from prorl.types import Json, Message, Task
from tests.backends.contradictory_replies import LIES
from tests.backends.misbehaving_server import Misbehaving, Mode
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.soak.history import Stored, lines, problems, write

FAULTS = int(os.environ.get("PRORL_SOAK_FAULTS", "60"))
ROLLOUTS = int(os.environ.get("PRORL_SOAK_ROLLOUTS", "500"))
SECONDS = float(os.environ.get("PRORL_SOAK_S", "300"))
SEED = int(os.environ.get("PRORL_SOAK_SEED", str(random.SystemRandom().randrange(10**6))))
KEEP = os.environ.get("PRORL_SOAK_KEEP", "")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(int(4 * SECONDS) + 600)]

N, WAVE = 2, 12
DISK_BYTES = (256 << 20) + int(SECONDS * (128 << 10))
"""Room for what so long a run stores, and little more: filling it is one of the faults."""
SAYS = "I do not know the answer."
"""What the model server says, when it is well."""
MANY_FILES = 1 << 20
TOGETHER = os.environ.get("PRORL_SOAK_LAYOUT") == "together"
"""Gateway, stages and store in one process; else whatever may have a process of its own has one."""
PROCESSES: tuple[str, ...] = ("service", "sandboxd")
if not TOGETHER:
    PROCESSES += ("worker-0", "worker-1", "eval-0", "eval-1", "store")


@dataclass
class Table:
    """The faults that struck, and how long it took until the process was back."""

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
    """A model server at one address that can be away, busy or a liar, for one cause at a time."""

    def __init__(self) -> None:
        self.url = ""
        self._lies = 0
        self.troubled = asyncio.Lock()
        self._server: Misbehaving | None = None

    async def start(self) -> None:
        """Listen (again), as soon as nobody else has the port."""
        while self._server is None:
            server = Misbehaving(say=SAYS)
            server.delay_s, server.retry_after = 0.1, "1"
            server.port = int(self.url.rpartition(":")[2] or 0)
            try:
                self._server = await server.__aenter__()
            except OSError:
                await asyncio.sleep(0.5)
        self.url = self._server.url

    async def stop(self) -> None:
        """Go away."""
        if self._server is not None:
            self._lies += self._server.lies
            await self._server.__aexit__(None, None, None)
            self._server = None

    @property
    def lies(self) -> int:
        """Told so far."""
        return self._lies + (self._server.lies if self._server is not None else 0)

    def behave(self, what: str) -> None:
        """Be busy, lie in half of the replies, each time otherwise, or be well."""
        assert self._server is not None
        lies = itertools.cycle(LIES.values())
        self._server.lie_share, self._server.lie = 0.5, lambda events: next(lies)(events)
        modes = {"busy": Mode.BUSY, "lies": Mode.LIES}
        self._server.mode = modes.get(what, Mode.WELL)


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


class Evidence:
    """The evidence by which a failure is understood: histories, faults, and the log of every life
    of every process.
    """

    def __init__(self) -> None:
        self.folder = Path(KEEP or tempfile.mkdtemp(prefix=f"prorl-soak-{SEED}-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = time.time()

    def note(self, **line: Json) -> None:
        """Something happened to the service."""
        write(self.folder / "faults.jsonl", s=round(time.time() - self._began, 2), **line)

    def keep_logs(self, root: Path) -> None:
        """Logs of earlier incarnations are overwritten in time: a file is named by its inode."""
        for path in (root / "logs").glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                name = f"{path.name.partition('.')[0]}-{path.stat().st_ino}.log"
                shutil.copy2(path, self.folder / name)

    def keep_all(self, root: Path) -> None:
        """The whole root, and why."""
        (self.folder / "why.txt").write_text(traceback.format_exc())
        self.keep_logs(root)
        shutil.copytree(root, self.folder / "root", dirs_exist_ok=True, ignore=_sockets)
        print(f"everything is in {self.folder}", file=sys.stderr)


def _sockets(folder: str, names: list[str]) -> list[str]:
    paths = {name: Path(folder) / name for name in names}
    return [name for name, path in paths.items() if not (path.is_file() or path.is_dir())]


class Soak:
    """One run and what happens to it."""

    def __init__(
        self,
        running: Supervisor,
        client: Client,
        model: Model,
        own_disk: bool,
        evidence: Evidence,
    ) -> None:
        self.running, self.client, self.model, self.own_disk = running, client, model, own_disk
        self.chance, self.table = random.Random(SEED), Table()
        self.refused = 0
        """Replies of the liar, as the gateway has counted them at the end of each such fault."""
        self.root, self.evidence = running.config.root, evidence
        self._submitted = evidence.folder / "submitted.jsonl"
        args = (str(self.root), str(evidence.folder))
        spec = ChildSpec(name="consumer", module="tests.soak.consumer", args=args, stop_rank=0)
        self.consumer = ChildProcess(spec, evidence.folder)

    async def view(self) -> dict[str, Json]:
        """The run, if the gateway is there."""
        with contextlib.suppress(UnavailableError):
            status = dict(await asyncio.to_thread(self.client.run, "r"))
            self.running.note_commits(int(status["commits"]))
            return status
        return {}

    async def strike(self) -> None:
        """All faults, spread over the time there is."""
        kinds = [f"{what} {name}" for name in PROCESSES for what in ("kill", "stop")]
        kinds += ["kill consumer", "stop consumer"] * 2
        kinds += ["model away", "model busy", "model lies"] * 2 + ["stop everything"]
        kinds += ["disk full", "disk without files"] if self.own_disk else []
        self.chance.shuffle(kinds)  # a short one strikes with any of them
        schedule = [kinds[i % len(kinds)] for i in range(FAULTS)]
        self.chance.shuffle(schedule)
        async with asyncio.TaskGroup() as group:
            for kind in schedule:
                group.create_task(self.fault(kind))
                await asyncio.sleep(SECONDS / FAULTS * self.chance.uniform(0.5, 1.2))

    async def fault(self, kind: str) -> None:
        """One fault, until what it hit is back."""
        what, _, name = kind.partition(" ")
        self.evidence.note(fault=kind)
        if what == "model":
            async with self.model.troubled:
                if name == "away":
                    await self.model.stop()
                else:
                    self.model.behave(name)
                if name == "lies":
                    await self.until_refused()
                await asyncio.sleep(self.chance.uniform(2, 8))
                await self.model.start()
                self.model.behave("well")
        elif name == "everything":
            await self.stop_everything()
        elif name == "consumer":
            await self.strike_consumer(what)
        elif what == "disk":
            await asyncio.to_thread(self.fill if name == "full" else self.close_files)
            await asyncio.sleep(self.chance.uniform(2, 5))
            (self.root.parent / "filler").unlink(missing_ok=True)
            await asyncio.to_thread(self.close_files, MANY_FILES)
        else:
            child = self.running.children[name]
            while not child.beats:  # struck by another fault just now
                await asyncio.sleep(0.1)
            starts, began = child.starts, time.monotonic()
            await asyncio.to_thread(self.evidence.keep_logs, self.root)
            child.signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            await asyncio.sleep(0.5 if what == "stop" else 0.0)
            while child.starts == starts or not child.beats:
                if what == "stop" and child.alive and not is_stopped(child.pid):
                    break  # "stop everything" has let it go on before it was missed
                await asyncio.sleep(0.02)
            self.table.back_s.setdefault(kind, []).append(time.monotonic() - began)
        self.evidence.note(over=kind)
        self.table.struck[kind] += 1

    async def until_refused(self) -> None:
        """It is asked, lies, and the gateway counts what was refused: an earlier fault may have it
        out for a while.
        """
        target = self.model.lies + 3
        async with asyncio.timeout(300):
            while self.model.lies < target or not await self.refused_replies():
                await asyncio.sleep(0.2)
        self.refused += await self.refused_replies()

    async def refused_replies(self) -> int:
        """Since the gateway's last start, if it is there."""
        with contextlib.suppress(UnavailableError):
            views = await asyncio.to_thread(self.client.backends)
            return sum(view["refused_replies"] for view in views if view["name"] == self.model.url)
        return 0

    async def stop_everything(self) -> None:
        """Stops everything as a paused host does, for less than the supervisor, which is us,
        waits.
        """
        pids = [child.pid for child in self.running.children.values() if child.alive]
        pids += [pid for parent in pids for pid in descendants(parent)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(4)

    async def strike_consumer(self, what: str) -> None:
        """Kill it, or stop it for a while: nobody watches a trainer for us."""
        self.consumer.signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(2, 8))
        self.consumer.signal(signal.SIGCONT)

    async def consume(self) -> None:
        """A consumer that is started again until it has read everything."""
        while True:
            await self.consumer.start()
            code = await self.consumer.exited()
            if code == 0:
                return
            assert code == -signal.SIGKILL, f"{exit_text(code)}{self.consumer.last_words()}"

    async def submit(self, wave: int, last: bool) -> None:
        """A wave, and now and then an earlier one again: the same answer, and nothing more."""
        tasks = [self.task(wave * WAVE + i) for i in range(WAVE)]
        keys = [f"w{wave}/{i}" for i in range(WAVE)]
        write(self._submitted, what="invoke", keys=keys, n=N)
        call = partial(self.client.submit, "r", tasks, N, key=f"w{wave}", last=last)
        answers = await asyncio.to_thread(call)
        groups = {str(answer["key"]): answer["group_id"] for answer in answers}
        write(self._submitted, what="ok", keys=keys, n=N, groups=groups)

    def fill(self) -> None:
        """Leave no room."""
        with contextlib.suppress(OSError), (self.root.parent / "filler").open("wb") as file:
            while True:
                file.write(b"\0" * (1 << 20))
                file.flush()

    def close_files(self, count: int = 0) -> None:
        """Take no file more than there are, or as many as this."""
        if self.own_disk:
            disk = os.statvfs(self.root.parent)
            most = f"remount,nr_inodes={count or disk.f_files - disk.f_ffree}"
            # some may have been made since they were counted
            subprocess.run(["mount", "-o", most, str(self.root.parent)], check=bool(count))

    async def feed(self, strikes: asyncio.Task[None]) -> int:
        """Submit waves as long as faults are to come; how many rollouts."""
        wave = 0
        while True:
            last = strikes.done() and wave * WAVE * N >= ROLLOUTS
            await self.submit(wave, last)
            if wave and self.chance.random() < 0.2 and not last:
                await self.submit(self.chance.randrange(wave), False)
            wave += 1
            if last:
                return wave * WAVE * N
            while (await self.view()).get("counts", {}).get("queued", 99) >= WAVE:
                await asyncio.sleep(0.2)

    async def whole(self, strikes: asyncio.Task[None], reading: asyncio.Task[None]) -> int:
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
async def soaking(
    folder: Path, sandbox_kind: str, own_disk: bool, evidence: Evidence
) -> AsyncIterator[Soak]:
    """A service with two model servers, one of which may go away."""
    model = Model()
    await model.start()
    slots = {"slots": 6}
    config = {
        "root": folder / "root",
        "backends": ("scripted:oracle?delay_s=0.15", model.url),
        "model": "m",
        "sandbox": {"kind": sandbox_kind},
        "workers": 0 if TOGETHER else 2,
        "init": slots,
        "run": slots,
        "eval": {**slots, "own_processes": 0 if TOGETHER else 2},
        "store": {  # so that faults meet compactions
            "compact_every_commits": 24,
            "keep_replaced_s": 5.0,
            "own_process": not TOGETHER,
        },
    }
    try:
        async with signals() as stop, service(ServiceConfig.model_validate(config), stop) as made:
            assert isinstance(made, Supervisor)
            client = client_of(made, patience_s=SECONDS)  # what is lost counts here, not how fast
            yield Soak(made, client, model, own_disk, evidence)
            client.close()
    finally:
        await model.stop()


async def test_soak(tmp_path: Path, sandbox_kind: str) -> None:
    before, began = set(descendants(os.getpid())), time.monotonic()
    evidence = Evidence()
    with disk(tmp_path / "disk") as own_disk:
        root = tmp_path / "disk" / "root"
        try:
            async with soaking(tmp_path / "disk", sandbox_kind, own_disk, evidence) as soak:
                expected = await _suffer(soak)
            check_no_leftovers(root, before)
            summary = _check_run(root / "r", evidence.folder, soak, expected)
        except BaseException:
            evidence.keep_all(root)
            raise
    print(f"{summary} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    shutil.rmtree(evidence.folder)


async def _suffer(soak: Soak) -> int:
    """A run from its beginning to its end; how many rollouts."""
    limits = {"max_attempts": 40, "max_worker_losses": 40}
    run = {"run_id": "r", "delivery": "stream", "limits": limits}
    await asyncio.to_thread(soak.client.create_run, **run, max_uncommitted_groups=64)
    tasks: list[asyncio.Task[Any]] = []
    try:
        tasks.append(reading := asyncio.create_task(soak.consume()))
        tasks.append(strikes := asyncio.create_task(soak.strike()))
        tasks.append(checking := asyncio.create_task(soak.whole(strikes, reading)))
        tasks.append(asyncio.create_task(soak.running.failed()))
        while not checking.done():
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            tasks = [task for task in tasks if task not in done or task is checking]
        return await checking
    finally:
        print(f"\n{soak.table}", file=sys.stderr)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await soak.consumer.stop(0.0)


def _check_run(directory: Path, folder: Path, soak: Soak, expected: int) -> str:
    """Raises AssertionError unless everything held; what there was, in words."""
    stored = check_complete(directory, expected)
    read = lines(folder / "read.jsonl") + lines(folder / "trained.jsonl")
    wrong = list(problems(lines(folder / "submitted.jsonl"), read, Stored.read(directory)))
    assert not wrong, "\n".join(wrong[:20])
    done = rows(stored, "select count(*) as n from rollouts where status = 'completed'")[0]["n"]
    assert done >= 0.99 * expected
    assert sum(soak.table.struck.values()) == FAULTS
    assert soak.refused or not soak.table.struck["model lies"]
    honest = _honest(stored, soak.model.url)
    trained = sum(line["what"] == "trained" for line in read)
    return (
        f"{expected} rollouts, {done} completed ({done / expected:.2%}), {FAULTS} faults,"
        f" {trained} groups trained, 0 lost, 0 twice,"
        f" {len(read) - 2 * trained} read again, {soak.model.lies} lies told,"
        f" {soak.refused} counted as refused, 0 in {honest} rollouts of the server that told them"
    )


def _honest(stored: StoredRun, url: str) -> int:
    """Counts the rollouts whose end came from this server: all of them as it does when it is
    well.
    """
    ending_ids = RENDERER.completion(Message(role="assistant", content=SAYS)).tolist()
    ended_rows = rows(
        stored,
        "select token_ids, span_end, span_kind from sequences join rollouts using (rollout_id)"
        " where status = 'completed' and rollout_id in (select rollout_id from turns group by all"
        f" having bool_and(backend = '{url}'))",
    )
    for row in ended_rows:
        kinds = np.repeat(row["span_kind"], np.diff([0, *row["span_end"]]))
        assert np.array(row["token_ids"])[kinds != 0].tolist()[-len(ending_ids) :] == ending_ids, (
            row
        )
    return len(ended_rows)
