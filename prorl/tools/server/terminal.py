"""A pty and the program that leads its session: `ptyprocess.PtyProcess`, launched in our way.

`PtyProcess.spawn` forks Python, which costs more CPU than all namespaces of a sandbox, so the
program is spawned by `children.spawn` and handed over as pid and descriptor. Its reads, interrupts,
window size and end are PtyProcess's. Two things are not: waiting, since only `Events` reaps, and
writing, since what a stuffed terminal does not take must not come back before the next command.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import termios

from prorl.tools.server.light import TYPE_CHECKING, signal

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SIZE = (50, 200)
"""Rows, columns."""
READ_BYTES = 1 << 16
TERMIOS_BYTES = 64
"""At least the size of struct termios."""


class PseudoTerminal:
    """One pty with echo off; `spawn(path)` starts the program on the terminal at that path.

    Raises what `spawn` raises, OSError.
    """

    def __init__(self, spawn: Callable[[str], int]) -> None:
        self.fd, terminal = os.openpty()
        try:
            self._attributes = self._sane_attributes()
            self.pid = spawn(os.ttyname(terminal))
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(terminal)
        # Imported while the program starts.
        self._pty = load()(self.pid, self.fd)
        self._pty.setwinsize(*SIZE)
        self._pty.delayafterclose = 0.0
        os.set_blocking(self.fd, False)

    def _sane_attributes(self) -> bytes:
        """A terminal's sane attributes in the kernel's own form.

        termios.tcsetattr takes ten times as long to make it from a list.
        """
        attributes = termios.tcgetattr(self.fd)
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~termios.ECHO
        attributes[3] |= termios.ICANON | termios.ISIG
        termios.tcsetattr(self.fd, termios.TCSANOW, attributes)
        return fcntl.ioctl(self.fd, termios.TCGETS, bytes(TERMIOS_BYTES))

    def make_sane(self) -> None:
        """Undo what programs did to it: no echo, whole lines, Ctrl-C is a signal."""
        fcntl.ioctl(self.fd, termios.TCSETS, self._attributes)

    def write(self, data: bytes) -> None:
        """Type; what the terminal does not take is lost, which shows in the wait that follows."""
        try:
            os.write(self.fd, data)
        except OSError:
            pass

    def interrupt(self) -> None:
        """Type Ctrl-C: a signal, which also empties the input queue."""
        self.make_sane()
        try:
            self._pty.sendintr()
        except OSError:
            pass

    def read(self) -> bytes:
        """Returns the output since the last read; empty when there is none, or when every process
        has closed the terminal.
        """
        try:
            data: bytes = self._pty.read(READ_BYTES)
        except EOFError:
            return b""
        return data

    def foreground(self) -> int:
        """The process group that Ctrl-C would go to, or -1."""
        try:
            return os.tcgetpgrp(self.fd)
        except OSError:
            return -1

    def close(self) -> None:
        """Close our end; whoever leads it has been signalled, and is reaped by `Events`."""
        self._pty.terminated = True
        try:
            self._pty.close()
        except OSError as cause:
            # an interrupt that it would not take
            if cause.errno not in (errno.EIO, errno.EAGAIN):
                raise


def load() -> Any:
    """Import ptyprocess, once.

    It stands on `signal` and `shutil`, whose imports cost as much as Python's own start, for what
    its spawn does and for numbers. A server that is a program of its own has neither, and gives it
    stand-ins.
    """
    if "ptyprocess" not in sys.modules:
        shutil = type(sys)("shutil")
        shutil.which = None  # type: ignore[attr-defined]
        stand_ins = {"signal": signal, "shutil": shutil}
        lacking = {name: module for name, module in stand_ins.items() if name not in sys.modules}
        sys.modules.update(lacking)
        try:
            import ptyprocess  # noqa: F401
        finally:
            for name in lacking:
                del sys.modules[name]
    return sys.modules["ptyprocess"].PtyProcess
