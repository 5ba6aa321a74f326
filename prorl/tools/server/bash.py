r"""bash under a pty: one persistent interactive shell, without readline, sleeps or polling.

The text of a command never crosses the tty (a typed line is cut at 4095 bytes, silently): it lies
in a memfd that the shell inherits, and the server types one short fixed line which reads and
evaluates it. The end is in band, because a pty is flushed asynchronously and a separate status
channel would overtake the last bytes of output:

    marker (`typed.py`): \x1e NONCE <sequence> \x1f <exit code> \x1f NONCE \x1e

It is printed on a duplicate of the tty from element 1 of PROMPT_COMMAND (an agent's own
`PROMPT_COMMAND=...` replaces element 0) and, should that be lost, from PS1. The sequence number
tells a late marker from the one waited for.

At the deadline: Ctrl-C, then TERM, then KILL for what runs in the shell, then a new shell in the
last directory. A stopped shell is continued. Late output of background jobs belongs to the next
command. Not promised: shell variables after a restart.
"""

from __future__ import annotations

import os
import time

from prorl.tools.server import typed
from prorl.tools.server.children import EXIT_TIMEOUT, descendants, reachable, session, spawn
from prorl.tools.server.light import TYPE_CHECKING, signal
from prorl.tools.server.output import Capped, result_of
from prorl.tools.server.terminal import PseudoTerminal

if TYPE_CHECKING:
    from typing import Any

    from prorl.tools.server.place import Place

INTERRUPT_S, TERM_S, KILL_S = 1.0, 0.5, 0.5
"""After the deadline: for Ctrl-C to do, then TERM, then KILL. Together less than what the host
waits.
"""
START_S = 10.0
"""For bash to evaluate its set-up on a machine that starts many at once."""


class Ended:
    """The end of a wait: `exit_code` None = the deadline came first."""

    def __init__(self, exit_code: int | None, died: bool = False) -> None:
        self.exit_code, self.died = exit_code, died


class BashDied(Exception):
    """The shell cannot be started."""


class Bash:
    """One bash that keeps its state from call to call.

    `run` is the whole interface; a shell that died is replaced before the next command.
    """

    def __init__(self, place: Place) -> None:
        self._events, self._room, self._env = place.events, place.room, place.env
        self._home = self._cwd = place.cwd
        self._pid = 0
        """0 = there is no shell."""
        self._listens = False
        self._pending = b""
        self._sequence = 0
        self._unread = False
        """True if the shell ended or came back to its prompt without having read the command."""
        self._busy = False
        """A command that was left running by `on_timeout: keep`."""

    def begin(self) -> None:
        """Start the shell if there is none; `start` waits until it listens. Raises BashDied."""
        if self._pid:
            return
        self._marker = typed.Marker()
        self._memory = os.memfd_create("command", 0)
        os.set_inheritable(self._memory, True)
        try:
            self._tty = PseudoTerminal(lambda path: self._room(lambda: self._spawn(path)))
        except OSError as cause:
            os.close(self._memory)
            raise BashDied(f"cannot start bash: {cause}") from cause
        self._pid = self._tty.pid
        self._events.watch(self._pid)
        os.set_inheritable(self._memory, False)
        self._busy = False
        self._pending = b""
        self._type(
            typed.introduction(self._next(), self._memory),
            typed.setup(self._marker, self._memory).encode(),
        )

    def _spawn(self, terminal: str) -> int:
        # The leader of a session that opens a terminal makes it its own.
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
        self._cwd = reachable(self._cwd, self._home)
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        return spawn(argv, actions, dict(self._env, HISTFILE="/dev/null"), self._cwd)

    def start(self) -> None:
        """Have a shell that listens. Raises BashDied."""
        self.begin()
        if self._listens:
            return
        ended = self._collect(Capped(0), time.monotonic() + START_S)
        if ended.exit_code is None or ended.died:
            self._discard()
            raise BashDied("bash did not answer")
        self._listens = True

    def _next(self) -> int:
        """Commands have even numbers; the odd one before says that the shell could not read it."""
        self._sequence += 2
        return self._sequence

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """Run `{command}`, or type `{input}` for a program that was left running.

        `on_timeout`: `interrupt` (default) or `keep`.
        """
        command, text = arguments.get("command"), arguments.get("input")
        if isinstance(text, str) and command is None:
            return self._feed_running(text.encode(), until, arguments)
        data = _bytes_of(command)
        output = Capped()
        self._make_free(output)
        result = self._execute(data, until, arguments, output)
        if self._unread and time.monotonic() < until:
            # It has lost its stdin or our descriptor, or its prompt is read-only: nothing of the
            # command has run yet.
            output.clear()
            self._replace(output, b"could not read the command")
            result = self._execute(data, until, arguments, output)
        return result

    def _make_free(self, output: Capped) -> None:
        """End what was left running, and give up a shell that has ended since."""
        if self._busy and self._end_command(Capped(0)).died:
            self._replace(output, b"ended")
        self._events.reap()
        if self._pid and self._events.status(self._pid) is not None:
            self._replace(output, b"ended")  # between two commands, as after `exec </dev/null`

    def _execute(
        self, data: bytes, until: float, arguments: dict[str, Any], output: Capped
    ) -> dict[str, Any]:
        self.start()
        self._tty.make_sane()
        self._unread = False
        self._type(typed.evaluation(self._next()), data)
        return self._finish(until, arguments, output)

    def _replace(self, output: Capped, why: bytes) -> None:
        """Give up this shell, and tell the agent so.

        The next `start` makes one in the last directory.
        """
        self._discard()
        self._cwd = reachable(self._cwd, self._home)
        output.feed(b"[the shell %s and was started again in %s]\n" % (why, self._cwd.encode()))

    def _feed_running(self, data: bytes, until: float, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self._busy or not self._pid:
            raise ValueError("no program is running; send `command`")
        self._tty.write(data)
        return self._finish(until, arguments, Capped())

    def _finish(self, until: float, arguments: dict[str, Any], output: Capped) -> dict[str, Any]:
        try:
            ended = self._collect(output, until)
            timed_out = ended.exit_code is None
            if timed_out and arguments.get("on_timeout") == "keep":
                self._busy = True
                output.feed(self._take_pending())
                return result_of(output, EXIT_TIMEOUT, True)
            if timed_out:
                ended = self._end_command(output)
                if self._room.clear_if_full():
                    ended = Ended(EXIT_TIMEOUT, died=True)
        except BaseException:
            self._abandon()
            raise
        self._busy = False
        self._drop_ours(output)
        if ended.died:
            output.feed(b"\n")
            self._replace(output, b"ended")
        return result_of(output, EXIT_TIMEOUT if timed_out else ended.exit_code or 0, timed_out)

    def _drop_ours(self, output: Capped) -> None:
        """Take out what is ours: `set -x`, `set -v`, a DEBUG trap and `declare` show it."""
        output.drop(typed.emission(self._marker).encode() + b"\n")
        output.drop_block(typed.FUNCTION + b" () \n", b"\n}\n")
        output.drop_lines(typed.OURS, self._marker.nonce)

    def _abandon(self) -> None:
        """The client left in the middle: end its command, keep the shell if that works."""
        client, self._events.client = self._events.client, -1
        try:
            if self._end_command(Capped(0)).died:
                self._discard()
        finally:
            self._events.client = client

    def _type(self, line: str, text: bytes) -> None:
        # Shell and server share the memfd's offset, so it is set here, before the shell reads. What
        # is behind the NUL is never read.
        os.pwrite(self._memory, text + b"\0", 0)
        os.lseek(self._memory, 0, os.SEEK_SET)
        self._tty.write(line.encode())

    # ---- waiting

    def _collect(self, output: Capped, until: float) -> Ended:
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
            if self._events.wait([self._tty.fd], until):
                data = self._tty.read()
                if not data and self._events.status(self._pid) is None:
                    self._await_death(until)
                self._pending += data

    def _await_death(self, until: float) -> None:
        # EIO with a living shell: every process has closed the tty. Only the shell's death can
        # follow.
        while self._events.status(self._pid) is None and time.monotonic() < until:
            self._events.wait([], until)

    def _last_words(self, output: Capped) -> Ended:
        while True:
            data = self._tty.read()
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
            match = self._marker.find(self._pending)
            if match is None:
                break
            output.feed(self._pending[: match.start])
            self._pending = self._pending[match.end :]
            if match.sequence in (None, self._sequence, self._sequence - 1):
                self._cwd = self._where()
                self._unread = match.sequence == self._sequence - 1 or self._untouched()
                return Ended(match.exit_code)
        cut = self._marker.unfinished(self._pending)
        output.feed(self._pending[:cut])
        self._pending = self._pending[cut:]
        return None

    def _where(self) -> str:
        """The shell's directory, for the shell that may have to follow it."""
        try:
            return os.readlink(f"/proc/{self._pid}/cwd")
        except OSError:
            return self._cwd

    def _untouched(self) -> bool:
        """Returns whether nobody has read the command."""
        return os.lseek(self._memory, 0, os.SEEK_CUR) == 0

    def _take_pending(self) -> bytes:
        data, self._pending = self._pending, b""
        return data

    # ---- ending

    def _end_command(self, output: Capped) -> Ended:
        """End what runs in the shell by INT, then TERM, then KILL.

        If the shell still does not answer, it dies, too.
        """
        self._busy = False
        if not self._pid:
            return Ended(EXIT_TIMEOUT)
        self._tty.interrupt()
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
        return Ended(self._collect(output, time.monotonic() + KILL_S).exit_code, died=True)

    def _foreground(self) -> list[int]:
        """The tty's foreground group, and the descendants in it.

        Background jobs are not part of the command.
        """
        group = self._tty.foreground()
        if group == self._pid or group <= 0:
            return descendants(self._pid)
        return [pid for pid in descendants(self._pid) if _group_of(pid) == group]

    def _discard(self) -> None:
        if not self._pid:
            return
        # bash gives jobs groups of their own, so each descendant is signalled, then the shell.
        for pid in [*descendants(self._pid), self._pid]:
            _kill(pid, signal.SIGKILL)
        self._unread = self._untouched()
        self._tty.close()
        os.close(self._memory)
        self._events.reap()
        self._events.forget(self._pid)
        self._pid = 0
        self._listens = False
        self._pending = b""


def _bytes_of(command: Any) -> bytes:
    """A command as bash reads it. Raises ValueError for what is none."""
    if not isinstance(command, str):
        raise ValueError(
            "bash needs `command` (a string), or `input` for a program that was left running"
        )
    data = command.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError("the command holds a NUL byte; bash cannot read it")
    return data


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
