"""One child process: its session, its `ready {json}` line, its logs, its exit, its heartbeat.

Each start has a log file; the exit is seen through a pidfd, freezing through a heartbeat that does
not come.

Invariants: only processes that this object spawned are ever signalled, through their pidfd, so a
reused pid is never hit; the child's stdout is always drained, so it never blocks on it. A child
asks the kernel itself to die with its parent (PDEATHSIG follows the thread that spawned it, so a
`ChildProcess` is started from a thread that lives as long as the service).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prorl
from prorl.errors import UnavailableError
from prorl.linux import crashes, failpoints, heartbeat
from prorl.linux.files import disk_full
from prorl.linux.procfs import is_stopped
from prorl.linux.python_path import python_path
from prorl.types import Json
from prorl.waits import wait_limit_s

KEPT_LOGS = 4
"""The number of logs of earlier starts that are kept: NAME.1.log is the youngest."""

MAX_LINE_BYTES = 1 << 16

NOT_USERS = (f"{Path(prorl.__file__).parent}{os.sep}", sysconfig.get_path("stdlib"), "<")
"""The places of code that is ours or Python's."""

CRASHES = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
}
"""The signals by which a process ends itself: nobody else sends these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Holds what to start, and when it is asked to stop (lower ranks first)."""

    name: str
    module: str
    args: tuple[str, ...]
    stop_rank: int
    grace_s: float = wait_limit_s("supervisor.stop")
    """From SIGTERM to SIGKILL; it promises to be gone a second before."""
    has_stages: bool = False
    """SIGUSR1 has its stages take nothing new and leave, SIGUSR2 give back what they have in hand.
    """
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """On top of `environment()`."""


class ChildProcess:
    """One process at a time under one name; `start` again after it has exited."""

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.starts = 0
        self.started_at_s = 0.0
        self._log_dir = log_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = self._heart = -1
        self._page = -1
        self._silent_s = 0.0
        self.beats = False
        """True once its heartbeat was heard since this start: from then on silence means
        something.
        """
        self._killed_at = ""
        """The piece of work that it was at when it was ended."""
        self.ended_for = ""
        """The reason why its parent ended it."""
        self.stages_ended = asyncio.Event()
        """Its stages have left in order, and it goes on without them."""
        self._exited: asyncio.Future[int] | None = None
        self._ready: asyncio.Future[Mapping[str, Json]] | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the current incarnation, or -1."""
        return self._process.pid if self._process is not None and self.alive else -1

    @property
    def alive(self) -> bool:
        return self._exited is not None and not self._exited.done()

    @property
    def log(self) -> Path:
        """Log file of the current incarnation."""
        return self._log_dir / f"{self.spec.name}.log"

    async def start(self) -> None:
        """Spawn it; returns before it is ready."""
        await self._end_reader()
        loop = asyncio.get_running_loop()
        self._rotate()
        log_fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._heart, beat_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fatal_attempt = self.fatal_attempt if self._process else ""
        if self._page >= 0:
            os.close(self._page)
        self._page, self._killed_at, self.ended_for = crashes.page(), "", ""
        try:
            self._process = self._spawn(log_fd, beat_fd, fatal_attempt)
        except OSError:
            os.close(self._heart)
            raise
        finally:
            os.close(log_fd)
            os.close(beat_fd)
        self._silent_s, self.beats = 0.0, False
        loop.add_reader(self._heart, self._on_beat)
        self.starts += 1
        self.stages_ended.clear()
        self.started_at_s = time.monotonic()
        self._exited, self._ready = loop.create_future(), loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        reading = self._read(self._process)
        self._reader = loop.create_task(reading, name=f"stdout of {self.spec.name}")

    def _spawn(self, log_fd: int, beat_fd: int, fatal_attempt: str) -> subprocess.Popen[bytes]:
        """The process, in a session of its own, with its log and where its heart beats."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self.spec.module, *self.spec.args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            cwd=self._log_dir,
            env={
                **self._environment(),
                **python_path(),  # it starts in another folder
                heartbeat.VARIABLE: str(beat_fd),
                crashes.VARIABLE: str(self._page),
                crashes.FATAL_ATTEMPT: fatal_attempt,
            },
            start_new_session=True,
            pass_fds=(beat_fd, self._page),
        )

    def _environment(self) -> dict[str, str]:
        values = {**environment(), **self.spec.env}
        if self.starts:
            values.pop(failpoints.VARIABLE, None)
        return values

    async def ready(self, timeout_s: float) -> Mapping[str, Json]:
        """The JSON of its ready line, `{}` when it says no more.

        Raises UnavailableError when it exits first or is late.
        """
        assert self._ready is not None
        assert self._exited is not None
        either: list[asyncio.Future[Any]] = [self._ready, self._exited]
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if self._exited.done():
            raise UnavailableError(
                f"{self.spec.name} {exit_text(self._exited.result())}{self.last_words()}"
            )
        raise UnavailableError(
            f"{self.spec.name} was not ready after {timeout_s:g} s{self.last_words()}"
        )

    async def exited(self) -> int:
        """Wait for the end of the current incarnation; the return code (negative = signal)."""
        assert self._exited is not None
        return await asyncio.shield(self._exited)

    def silence(self, passed_s: float) -> float:
        """Returns the seconds for which it has not beaten, `passed_s` later than at the last call.

        It is 0 before it was ready (that has a limit of its own) and for a program that never
        beats.

        The caller counts the time in which it listened itself: a caller that was stopped meanwhile
        learns nothing from the silence of others.
        """
        ready = self._ready is not None and self._ready.done()
        self._silent_s += passed_s if self.beats and ready and self.alive else 0.0
        return self._silent_s

    @property
    def fatal_attempt(self) -> str:
        """Returns `run/rollout/attempt` whose step ended the process; empty where it was none.

        The step never ended, though nobody had stopped the process; or it crashed the interpreter;
        or it ended the process, which code of ours never does in a step (`crashes.clear`). A
        process that waits for a tool call or a model is in no step.
        """
        assert self._process is not None
        code = self._process.returncode or 0
        by_itself = code >= 0 or -code in CRASHES
        return crashes.read(self._page) if by_itself else self._killed_at

    def end(self, why: str) -> None:
        """SIGKILL, with the reason as the last line of its log, and what it was at."""
        if self.alive and not self.ended_for:
            self.ended_for = why
            if not is_stopped(self.pid):
                self._killed_at = crashes.read(self._page)
            why += f"; it was at {self._killed_at}" if self._killed_at else ""
            why += f", {place}" if (place := self.place()) else ""
            with contextlib.suppress(OSError), self.log.open("a") as log:
                log.write(json.dumps({"level": "error", "event": why}) + "\n")
            self.beats = False
            self.signal(signal.SIGKILL)

    def place(self) -> str:
        """Returns where its loop hung, as it said on its log before (`heartbeat.SAYS_S`): in code
        that is neither ours nor Python's, where there is any.
        """
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[-(1 << 16) :].decode(errors="replace")
            _, _, trace = text.rpartition("(most recent call first):\n")
            frames: list[tuple[str, str]] = re.findall(
                r'^  (File "(.+)", line \d+ in .+)$', trace, re.MULTILINE
            )
            others = [frame for frame, file in frames if not file.startswith(NOT_USERS)]
            return [*others, *(frame for frame, _ in frames), ""][0]
        return ""

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            signal.pidfd_send_signal(self._pidfd, number)

    async def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM, wait, SIGKILL; returns when it is gone. Idempotent."""
        if self._exited is None:
            return
        self.signal(signal.SIGTERM)
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        await asyncio.wait({self._exited}, timeout=grace_s)
        self.signal(signal.SIGKILL)
        await asyncio.shield(self._exited)
        await self._end_reader()

    def last_words(self, lines: int = 3) -> str:
        """Returns the end of the log, as a text to append to an error; prefers an `error:` line.

        A disk that is full takes no log, so that it is said instead.
        """
        try:
            if full := disk_full(self.log.parent):
                return f": {full}"
            tail = self.log.read_bytes()[-4096:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        words = [word for line in tail if (word := event_text(line))]
        errors = [word.removeprefix("error: ") for word in words if word.startswith("error: ")]
        chosen = errors[-1:] or words[-lines:]
        return ": " + " | ".join(chosen) if chosen else ""

    async def _end_reader(self) -> None:
        # A grandchild may still hold the pipe, so its end is not waited for.
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    def _rotate(self) -> None:
        self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = [
            self.log,
            *(
                self._log_dir / f"{self.spec.name}.{number}.log"
                for number in range(1, KEPT_LOGS + 1)
            ),
        ]
        for older, newer in reversed(list(zip(names[1:], names[:-1], strict=True))):
            if newer.exists():
                os.replace(newer, older)

    def _on_beat(self) -> None:
        if os.read(self._heart, 4096):
            self._silent_s, self.beats = 0.0, True
        else:
            asyncio.get_running_loop().remove_reader(self._heart)

    def _on_exit(self) -> None:
        for fd in (self._pidfd, self._heart):
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        assert self._process is not None
        assert self._exited is not None
        self._exited.set_result(self._process.wait())

    async def _read(self, process: subprocess.Popen[bytes]) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        ready = self._ready
        assert ready is not None
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        try:
            while line := await reader.readline():
                word, _, payload = line.strip().partition(b" ")
                if word == b"ready" and not ready.done():
                    ready.set_result(json.loads(payload or b"{}"))
                elif word == b"left":
                    self.stages_ended.set()
        except ValueError:  # a line that is none of ours: its pipe must never be full
            while await reader.read(MAX_LINE_BYTES):
                pass
        finally:
            transport.close()


def environment() -> dict[str, str]:
    """Environment of every child: this very package first on the path.

    It has one thread per numeric library and few malloc arenas.
    """
    package_parent = str(Path(prorl.__file__).absolute().parent.parent)
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")]))
    ours = {"PYTHONPATH": path}
    return {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", **os.environ, **ours}


def event_text(line: str) -> str:
    """The readable part of a log line.

    Of a JSON line that is its event, with `error: ` before it when that is its level.

    >>> event_text('{"level": "error", "event": "disk full"}'), event_text("plain")
    ('error: disk full', 'plain')
    """
    try:
        values = json.loads(line)
        level = "error: " if values["level"] in ("error", "critical") else ""
        return f"{level}{values['event']}"
    except (ValueError, KeyError, TypeError):
        return line.strip()


def exit_text(code: int) -> str:
    """Returns how it ended, in words.

    >>> exit_text(-9), exit_text(2)
    ('was killed by SIGKILL', 'exited with code 2')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
