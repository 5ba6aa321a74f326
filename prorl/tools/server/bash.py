r"""bash by ptyprocess: one persistent interactive shell under a pty, without readline, sleeps or polling.

The text of a command never crosses the tty (a typed line is cut at 4095 bytes, silently): it lies in a memfd that the shell
inherits, and the server types one short fixed line which reads and evaluates it. The end is in band, because a pty is flushed
asynchronously and a separate status channel would overtake the last bytes of output:

    \x1e NONCE <sequence> \x1f <exit code> \x1f NONCE \x1e

It is printed on a duplicate of the tty from element 1 of PROMPT_COMMAND (an agent's own `PROMPT_COMMAND=...` replaces element
0) and, should that be lost, from PS1. The sequence number tells a late marker from the one waited for.

At the deadline: Ctrl-C, then TERM, then KILL for what runs in the shell, then a new shell in the last directory. A stopped shell
is continued. Late output of background jobs belongs to the next command. Not promised: shell variables after a restart.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import termios
import time
from functools import partial
from typing import Any, NamedTuple

from ptyprocess import PtyProcess

from prorl.tools.server.children import MakeRoom, descendants, prepare, session
from prorl.tools.server.events import Events
from prorl.tools.server.output import Capped

MARK_BYTES = 80
"""Longest marker. Short and without a newline, so that it is one write, which no background job can split."""
INTERRUPT_S, TERM_S, KILL_S = 1.0, 0.5, 0.5
START_S = 10.0
COMMAND_FD, TTY_FD = 198, 199
"""Numbers inside the shell, high enough to leave the agent `exec 3<file`. Its programs inherit both: closing them around the
`eval` would make bash save them at 10 and 11, which the agent may want."""
REARM = "PS1=$__prorl_p;PROMPT_COMMAND[__prorl_i]=$__prorl_e;__prorl_s(){ return $1;}"
"""Before each command: what an earlier one did to the prompt is undone."""
RESTORE = "case $- in *e*);;*)__prorl_s $__prorl_r;esac"
"""Makes `$?` what the command before left (under `set -e` it is 0, else the shell would be gone)."""
EXIT_TIMEOUT = 124


class Ended(NamedTuple):
    """How a wait ended: `exit_code` None = the deadline came first."""

    exit_code: int | None
    died: bool = False


class BashDied(Exception):
    """The shell cannot be started."""


class Bash:
    """One shell. `run` is the whole interface; a shell that died is replaced before the next command."""

    def __init__(self, events: Events, env: dict[str, str], cwd: str, output_bytes: int, room: MakeRoom) -> None:
        self._events, self._env, self._home, self._cap, self._room = events, env, cwd, output_bytes, room
        self._cwd = cwd
        self._process: Any = None
        self._pending = b""
        self._sequence = 0
        self._unread = False
        """Whether the last shell ended without reading the command it was sent."""
        self._busy = False
        """A command that was left running by `on_timeout: keep`."""

    def start(self) -> None:
        """Start the shell if it does not run. Raises BashDied."""
        if self._process is not None:
            return
        self._nonce = os.urandom(8).hex().encode()
        self._end = re.compile(b"\x1e" + self._nonce + rb"(\d*)\x1f(\d+)\x1f" + self._nonce + b"\x1e")
        self._memory = os.memfd_create("command", 0)
        os.set_inheritable(self._memory, True)
        env = dict(self._env, HISTFILE="/dev/null")
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        cwd = self._cwd if os.path.isdir(self._cwd) else self._home
        spawn = partial(PtyProcess.spawn, argv, env=env, cwd=cwd, echo=False, dimensions=(50, 200), preexec_fn=prepare)
        try:
            self._process = self._room(lambda: spawn(pass_fds=(self._memory,)))
        except OSError as cause:
            os.close(self._memory)
            raise BashDied(f"cannot start bash: {cause}") from cause
        os.set_inheritable(self._memory, False)
        self._pid: int = self._process.pid
        self._fd: int = self._process.fd
        self._events.watch(self._pid)
        os.set_inheritable(self._fd, False)  # forkpty leaves the master open for every later child
        os.set_blocking(self._fd, False)
        self._attributes = self._sane_attributes()
        self._busy = False
        self._pending = b""
        self._handshake()

    def _handshake(self) -> None:
        nonce, fd = self._nonce.decode(), self._memory
        mark = rf"\036{nonce}${{__prorl_n}}\037%s\037{nonce}\036"
        prompt = rf"\036{nonce}${{__prorl_n}}\037$?\037{nonce}\036"
        emit = f'builtin printf "{mark}" "$?" >&{TTY_FD} 2>/dev/null;PS1=$__prorl_p;PS2='
        text = (
            f"exec {COMMAND_FD}<&{fd} {fd}<&- {TTY_FD}>&1;set +H +o history;unset HISTFILE;"
            f"__prorl_p='{prompt}';__prorl_e='{emit}';__prorl_i=0;PS2=;"
            "((BASH_VERSINFO[0]*100+BASH_VERSINFO[1]>=501))&&PROMPT_COMMAND=('')&&__prorl_i=1;" + REARM
        )
        # The first command is the set-up itself, read by the same kind of line as all later ones.
        self._type(f'__prorl_n={self._next()};IFS= read -rd "" -u {fd} __c;eval "$__c"\n', text.encode())
        ended = self._collect(Capped(0), time.monotonic() + START_S)
        if ended.exit_code is None or ended.died:
            self._discard()
            raise BashDied("bash did not answer")

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """`{command}`, or `{input}` for a program left running; `on_timeout`: `interrupt` (default) or `keep`."""
        command, text = arguments.get("command"), arguments.get("input")
        if isinstance(text, str) and command is None:
            return self._feed_running(text.encode(), until, arguments)
        if not isinstance(command, str):
            raise ValueError("bash needs `command` (a string), or `input` for a program that was left running")
        data = command.encode("utf-8", "surrogateescape")
        if b"\0" in data:
            raise ValueError("the command holds a NUL byte; bash cannot read it")
        if self._busy and self._end_command(Capped(0)).died:
            self._discard()
        self._events.reap()
        if self._process is not None and self._events.status(self._pid) is not None:
            self._discard()  # it ended between two commands, as after `exec </dev/null`
        self.start()
        termios.tcsetattr(self._fd, termios.TCSANOW, self._attributes)
        self._send(data)
        output = Capped(self._cap)
        result = self._finish(until, arguments, output)
        if self._process is None and self._unread:
            # The shell ended instead of reading the command (its stdin was closed before): nothing has run yet.
            self.start()
            self._send(data)
            result = self._finish(until, arguments, output)
        return result

    def _send(self, data: bytes) -> None:
        read = f'IFS= read -rd "" -u {COMMAND_FD} __c'
        self._type(f'__prorl_r=$?;__prorl_n={self._next()};{REARM};{read};{RESTORE};eval "$__c"\n', data)

    def _feed_running(self, data: bytes, until: float, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self._busy or self._process is None:
            raise ValueError("no program is running; send `command`")
        self._write(data)
        return self._finish(until, arguments, Capped(self._cap))

    def _finish(self, until: float, arguments: dict[str, Any], output: Capped) -> dict[str, Any]:
        try:
            ended = self._collect(output, until)
            timed_out = ended.exit_code is None
            if timed_out and arguments.get("on_timeout") == "keep":
                self._busy = True
                output.feed(self._take_pending())
                return {"output": output, "exit_code": EXIT_TIMEOUT, "timed_out": True}
            if timed_out:
                ended = self._end_command(output)
        except BaseException:
            self._abandon()
            raise
        self._busy = False
        exit_code = ended.exit_code or 0
        if ended.died:
            self._discard()
            output.feed(b"\n[the shell ended and was started again in %s]\n" % self._cwd.encode())
        return {"output": output, "exit_code": EXIT_TIMEOUT if timed_out else exit_code, "timed_out": timed_out}

    def _abandon(self) -> None:
        """The client left in the middle: end its command, keep the shell if that works."""
        client, self._events.client = self._events.client, -1
        try:
            if self._end_command(Capped(0)).died:
                self._discard()
        finally:
            self._events.client = client

    # ---- the tty

    def _sane_attributes(self) -> list[Any]:
        attributes = termios.tcgetattr(self._fd)
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~termios.ECHO
        attributes[3] |= termios.ICANON | termios.ISIG
        termios.tcsetattr(self._fd, termios.TCSANOW, attributes)
        return attributes

    def _type(self, line: str, text: bytes) -> None:
        # Shell and server share the memfd's offset, so it is set here, before the shell reads.
        os.ftruncate(self._memory, 0)
        os.pwrite(self._memory, text + b"\0", 0)
        os.lseek(self._memory, 0, os.SEEK_SET)
        self._write(line.encode())

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._fd, data)
        except (BlockingIOError, OSError):
            pass  # a dead or stuffed shell shows in the wait that follows

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError as cause:
            if cause.errno == errno.EIO:
                return b""
            raise

    # ---- waiting

    def _collect(self, output: Capped, until: float) -> Ended:
        """Read until this command's marker, the shell's death or the deadline."""
        while True:
            ended = self._scan(output)
            if ended is not None:
                return ended
            if self._events.status(self._pid) is not None:
                return self._last_words(output)
            if self._events.take_stopped(self._pid):
                os.kill(self._pid, signal.SIGCONT)
            if time.monotonic() >= until:
                return Ended(None)
            if self._events.wait([self._fd], until):
                data = self._read()
                if not data and self._events.status(self._pid) is None:
                    self._await_death(until)
                self._pending += data

    def _await_death(self, until: float) -> None:
        # EIO with a living shell: every process has closed the tty. Only the shell's death can follow.
        while self._events.status(self._pid) is None and time.monotonic() < until:
            self._events.wait([], until)

    def _last_words(self, output: Capped) -> Ended:
        while True:
            data = self._read()
            self._pending += data
            ended = self._scan(output)
            if ended is not None:
                return ended
            if not data:
                break
        output.feed(self._take_pending())
        return Ended(self._events.status(self._pid), died=True)

    def _scan(self, output: Capped) -> Ended | None:
        """Move what cannot be part of a marker to the output; report this command's marker."""
        while True:
            match = self._end.search(self._pending)
            if match is None:
                break
            output.feed(self._pending[: match.start()])
            self._pending = self._pending[match.end() :]
            # No number: the command has unset our variables, so the marker can only be its own.
            if int(match.group(1) or self._sequence) == self._sequence:
                self._cwd = self._where()
                return Ended(int(match.group(2)))
        start = self._pending.rfind(b"\x1e", -MARK_BYTES)
        if start >= 0 and not self._may_be_marker(self._pending[start:]):
            start = -1
        cut = len(self._pending) if start < 0 else start
        output.feed(self._pending[:cut])
        self._pending = self._pending[cut:]
        return None

    def _where(self) -> str:
        """The shell's directory, for the shell that may have to follow it."""
        try:
            return os.readlink(f"/proc/{self._pid}/cwd")
        except OSError:
            return self._cwd

    def _may_be_marker(self, data: bytes) -> bool:
        prefix = b"\x1e" + self._nonce
        return prefix.startswith(data) or (data.startswith(prefix) and len(data) < MARK_BYTES)

    def _take_pending(self) -> bytes:
        data, self._pending = self._pending, b""
        return data

    # ---- ending

    def _end_command(self, output: Capped) -> Ended:
        """INT, TERM, KILL for what runs in the shell; if the shell still does not answer, it dies too."""
        self._busy = False
        if self._process is None:
            return Ended(EXIT_TIMEOUT)
        # With ISIG set, Ctrl-C is a signal and empties the input queue; `stty -isig` would make it a character.
        termios.tcsetattr(self._fd, termios.TCSANOW, self._attributes)
        self._write(b"\x03")
        ended = self._collect(output, time.monotonic() + INTERRUPT_S)
        for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            if ended.exit_code is not None:
                return ended
            for pid in self._foreground():
                _kill(pid, number)
            ended = self._collect(output, time.monotonic() + wait_s)
        if ended.exit_code is not None:
            return ended
        for pid in session(self._pid):
            _kill(pid, signal.SIGKILL)
        return self._collect(output, time.monotonic() + KILL_S)._replace(died=True)

    def _foreground(self) -> list[int]:
        """The tty's foreground group and the descendants in it; background jobs are not part of the command."""
        try:
            group = os.tcgetpgrp(self._fd)
        except OSError:
            group = -1
        if group == self._pid or group <= 0:
            return descendants(self._pid)
        return [pid for pid in descendants(self._pid) if _group_of(pid) == group]

    def _discard(self) -> None:
        if self._process is None:
            return
        # bash gives jobs groups of their own, so each descendant is signalled, then the shell.
        for pid in [*descendants(self._pid), self._pid]:
            _kill(pid, signal.SIGKILL)
        self._unread = os.lseek(self._memory, 0, os.SEEK_CUR) == 0
        self._process.fileobj.close()
        self._process.closed = True  # else ptyprocess sleeps 0.1 s a step in its destructor
        os.close(self._memory)
        self._events.reap()
        self._events.forget(self._pid)
        self._process = None
        self._pending = b""


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1
