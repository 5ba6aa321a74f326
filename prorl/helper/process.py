"""One helper process, seen from whoever asks it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from prorl import errors
from prorl.helper.child import LENGTH, is_common, read_extension
from prorl.linux.procfs import descendants, is_stopped
from prorl.waits import wait_limit_s

MAX_ANSWER_BYTES = 64 << 20

TICK_S = 0.5
"""Between two looks at what a helper has used; a look that comes later than that counts no more."""

FAULT_S = wait_limit_s("helper.stacks")

CANCEL_S = wait_limit_s("helper.cancel")

MOST_CALLS = 32
"""Calls back of one helper that are open at once; what it asks beyond them waits in its socket."""

CallBack = Callable[..., Awaitable[Any]]
"""The calls that a helper may make to its parent while it answers."""


@dataclass(frozen=True, slots=True)
class HelperProgram:
    """Holds what to start: `python -m module arguments`, and its limits."""

    module: str
    arguments: tuple[str, ...] = ()
    wall_s: float = 30.0
    """For an answer, by the clock; a question may say otherwise."""
    cpu_s: float = 0.0
    """For an answer, of the processor; 0 = as long as `wall_s`."""
    start_s: float = 60.0
    """Until it is ready: its imports."""
    memory_bytes: int = 2 << 30
    """More than it has after its start; 0 = no bound."""
    most: int = 4
    """Processes of one pool."""
    patience_s: float = 1.0
    """A question waits for a process that is at work as long as a start takes, but no longer than
    this before one more is started: tools of a rollout have time limits of seconds. 0 where an
    answer takes longer than any start.
    """
    by_step: bool = False
    """The limits are those of the code between two calls back, not of the whole answer."""
    nice: int = 0
    version: str = ""
    """The version of the code that it imports: another version is another program, with helpers of
    its own.
    """


_decode = msgspec.msgpack.Decoder(tuple[int, str, Any], ext_hook=read_extension).decode


class HelperError(Exception):
    """A question got no answer; `str` is one line for people."""

    def __init__(self, words: str, place: str = "") -> None:
        super().__init__(words, place)
        self.words, self.place = words, place

    waits_for_us = False
    """It was not at work itself, but had asked for something (`CallBack`)."""

    at_start = False
    """Before it was asked anything."""

    def __str__(self) -> str:
        return errors.placed(self.words, self.place)


class Raised(HelperError):
    """The code raised, or gave what is no plain data; what it left changed would be the next
    question's.
    """

    trace = ""
    """The code's traceback."""


class Late(HelperError):
    """The code was killed: it took longer than it may."""


class Died(HelperError):
    """The process ended before it answered."""

    was_killed = False
    """From outside, as the kernel does it that has no memory left, or stopped: not by itself."""


class Helper:
    """Started by `start`, asked one question at a time, ended by `end`."""

    def __init__(self, program: HelperProgram, child: subprocess.Popen[bytes], faults: int) -> None:
        self._program, self._child, self._faults = program, child, faults
        self._clock = asyncio.get_running_loop().time
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._calls: set[asyncio.Future[None]] = set()
        """The calls that it has made to us, while we answer them; MOST_CALLS bound it."""
        self._num_calls = 0
        self._number = 0
        """The number of the question that is being answered, which each frame of its answer bears;
        0: its start.
        """
        self.is_open = True
        """True if it can be asked another question."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_answered(self) -> bool:
        """An earlier question may have changed the process, or taken its memory."""
        return self._number > 1

    @classmethod
    async def start(cls, program: HelperProgram) -> Self:
        """A helper that is ready. Raises HelperError with what its imports raised, or that."""
        ours, theirs = socket.socketpair()
        faults = os.memfd_create("faults", os.MFD_CLOEXEC)
        argv = [sys.executable, "-P", "-m", program.module]
        argv += ["--channel", str(theirs.fileno()), "--faults", str(faults)]
        argv += ["--parent", str(os.getpid()), "--nice", str(program.nice)]
        argv += ["--memory-bytes", str(program.memory_bytes), "--", *program.arguments]
        with theirs:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), faults),
                start_new_session=True,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        helper = cls(program, child, faults)
        helper._reader, helper._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            await helper._answer("its start", program.start_s, program.start_s)
        except BaseException as error:
            if isinstance(error, HelperError):
                error.at_start = True
            helper.end()
            raise
        return helper

    async def ask(
        self,
        question: Any,
        *,
        label: str = "it",
        wall_s: float = 0.0,
        strict: bool = False,
        call_back: CallBack | None = None,
    ) -> Any:
        """Raises the ProrlError that the code raised, or HelperError; then the process has ended.

        `strict`: whoever asks has a time-out of its own, so nothing is given back.
        """
        data = pickle.dumps(question, protocol=5)
        with contextlib.suppress(
            ConnectionError
        ):  # it died: so says its answer, which does not come
            self._writer.write(LENGTH.pack(len(data)))
            self._writer.write(data)
        wall_s = wall_s or self._program.wall_s
        cpu_s = min(self._program.cpu_s or wall_s, wall_s if self._program.by_step else math.inf)
        return await self._answer(label, wall_s, cpu_s, call_back, strict=strict)

    async def _answer(
        self,
        label: str,
        wall_s: float,
        cpu_s: float,
        call_back: CallBack | None = None,
        *,
        strict: bool = False,
    ) -> Any:
        """Returns what comes within the limits.

        A helper whose answer was not read whole, for whatever reason, is ended: what is late would
        be the next question's. So is one whose code raised, unless that is how it stopped when its
        question was given up, with nothing left that it had started.
        """
        began_cpu_s, began_starved_s, limit_s = self._cpu_s(), self._starved_s(), wall_s
        answering = asyncio.ensure_future(self._hear(call_back))
        waited_s, started, is_whole, num_calls = 0.0, self._clock(), False, self._num_calls
        try:
            while not answering.done():
                if self._program.by_step and (self._calls or num_calls != self._num_calls):
                    # it waits for us, or has begun another step
                    waited_s, started, num_calls = 0.0, self._clock(), self._num_calls
                    began_cpu_s, began_starved_s, limit_s = self._cpu_s(), self._starved_s(), wall_s
                tick_s = min(TICK_S, limit_s - waited_s)
                began = self._clock()
                await asyncio.wait({answering}, timeout=tick_s)
                # a tick that lasts longer is one in which we were stopped ourselves
                waited_s += min(self._clock() - began, tick_s)
                waited_s = self._clock() - started if strict else waited_s
                if answering.done():
                    break
                if self._child.poll() is not None:
                    raise await self._died(label)
                if waited_s >= limit_s - 1e-3 and not strict:
                    # a processor that others had is not its doing
                    limit_s = wall_s + self._starved_s() - began_starved_s
                if waited_s >= limit_s - 1e-3:
                    raise await self._late(f"{label} took longer than {wall_s:.3g} s")
                if self._cpu_s() - began_cpu_s > cpu_s:
                    raise await self._late(f"{label} took more than {cpu_s:g} s of processor time")
            kind, value = answering.result()
            is_whole = kind not in _RAISED
        except asyncio.CancelledError:
            if answering.done():
                is_whole = not answering.exception() and answering.result()[0] not in _RAISED
            else:
                is_whole = await self._interrupt(answering)
            raise
        except (EOFError, ConnectionError):
            raise await self._died(label) from None
        finally:
            answering.cancel()
            if is_whole:
                self._number += 1
            else:
                self.end()
        if kind == "error":
            name, arguments = value
            raise getattr(errors, name)(*arguments)
        if kind in _RAISED:
            raised = Raised(value["words"], value["place"])
            raised.trace = value.get("trace", "")
            raise raised
        return value

    async def _hear(self, call_back: CallBack | None) -> tuple[str, Any]:
        """The last frame of an answer; what it asks of us before is done."""
        try:
            return await self._last_frame(call_back)
        finally:
            for call in self._calls:  # nobody waits for it
                call.cancel()

    async def _last_frame(self, call_back: CallBack | None) -> tuple[str, Any]:
        while True:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_ANSWER_BYTES:
                text = f"an answer of {length:,} bytes; at most {MAX_ANSWER_BYTES:,}"
                return "unreadable", {"words": text, "place": ""}
            data = await self._reader.readexactly(length)
            try:
                number, kind, value = _decode(data)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                return "unreadable", {
                    "words": f"an answer that cannot be read: {error}",
                    "place": "",
                }
            if number != self._number:
                return "unreadable", {"words": "an answer to another question", "place": ""}
            if kind != "op" or call_back is None:
                return kind, value
            if len(self._calls) >= MOST_CALLS:
                await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            call = asyncio.ensure_future(self._do(call_back, *value))
            self._num_calls += 1
            self._calls.add(call)
            call.add_done_callback(self._done)

    async def _do(self, call_back: CallBack, number: int, *op: Any) -> None:
        """Does what the helper asks for, and replies."""
        try:
            reply = await call_back(*op)
        except asyncio.CancelledError:
            reply = "cancelled", None
        if self.is_open:
            data = pickle.dumps((number, reply), protocol=5)
            self._writer.write(LENGTH.pack(len(data)) + data)

    def _done(self, call: asyncio.Future[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and isinstance(error := call.exception(), Exception):
            self._reader.set_exception(error)  # a mistake of ours: the asker's, who reads next

    async def _interrupt(self, answering: asyncio.Future[tuple[str, Any]]) -> bool:
        """Have the code stop, as Ctrl-C does. False: its process is to be killed."""
        for call in self._calls:
            call.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGINT)
        await asyncio.wait({answering}, timeout=CANCEL_S)
        if not answering.done() or answering.exception() is not None:
            return False
        return answering.result()[0] != "unreadable" and not descendants(self._child.pid)

    async def _late(self, words: str) -> Late | Died:
        if is_stopped(self._child.pid):
            self.end()
            stopped = Died(f"{words}: somebody had stopped its process")
            stopped.was_killed = True
            return stopped
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGUSR1)
        await asyncio.sleep(FAULT_S)
        error = Late(words, self._last_words())
        error.waits_for_us = bool(self._calls)
        self.end()
        return error

    async def _died(self, label: str) -> Died:
        until = self._clock() + FAULT_S
        while self._child.poll() is None and self._clock() < until:
            await asyncio.sleep(0.005)  # it hung up and is about to end, or lives on without us
        code = self._child.returncode
        error = Died(f"{label} ended its process ({_exit_text(code)})", self._last_words())
        error.was_killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        self.end()
        return error

    def _last_words(self) -> str:
        """Returns where the code was, as the interpreter wrote it down when it was asked or
        crashed.
        """
        lines = os.pread(self._faults, 1 << 16, 0).decode("utf-8", "replace").splitlines()
        frames = [match for line in lines if (match := _FRAME.match(line)) is not None]
        for frame in [entry for entry in frames if not is_common(entry[1])] or frames:
            return f"{frame[1]}:{frame[2]} in {frame[3]}"
        return ""

    def _cpu_s(self) -> float:
        try:
            # the clock of another process's processor time, as clock_getcpuclockid(3) makes it
            return time.clock_gettime(~self._child.pid << 3 | 2)
        except OSError:
            return 0.0

    def _starved_s(self) -> float:
        """Returns how long it was ready to run and had no processor (schedstat of proc(5))."""
        try:
            with open(f"/proc/{self._child.pid}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def end(self) -> None:
        """Kill it, with what it has started; idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        below = descendants(self._child.pid) if self._child.poll() is None else []
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            # not here: to give gigabytes back takes the kernel a while
            threading.Thread(target=self._child.wait, daemon=True).start()
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._writer.transport.abort()
        os.close(self._faults)


_RAISED = ("raised", "unreadable")
"""The kinds of an answer that is none: what the code raised, and a frame that is no answer to the
question.
"""

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _exit_text(code: int | None) -> str:
    """Returns how a process ended, in words.

    >>> _exit_text(3), _exit_text(-11), _exit_text(None)
    ('exit code 3', 'SIGSEGV', 'it hung up')
    """
    if code is None:
        return "it hung up"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
