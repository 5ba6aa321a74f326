"""A terminal of this process inside a sandbox: a shell under a pty there, its bytes pumped here.

The pty is made inside, so that job control, window size and full-screen programs work as they do
anywhere. The program that makes it connects to a listener on the sandbox's own loopback
(`prorl.protocols.SupportsListen`), which only this process serves. From here go frames (`FRAME`:
kind and length, then bytes typed or a window size), from there goes what the shell writes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prorl.errors import SandboxError, UserError
from prorl.protocols import Sandbox, SupportsListen
from prorl.waits import wait_limit_s

FRAME = struct.Struct("!cH")
TYPED, SIZE = b"t", b"s"
READ_BYTES = 1 << 14
END_OF_TEXT = b"\x04"
END_S = 0.5
"""Between two ends of text."""

LONGEST_S = 7 * 24 * 3600.0
"""For the shell; a call to a sandbox has some deadline."""

CONNECT_S = wait_limit_s("cli.terminal")

INSIDE = """
import fcntl, os, pty, select, signal, socket, struct, sys, termios
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
child, terminal = pty.fork()
if not child:
    os.environ["TERM"] = sys.argv[2]
    os.execvp("bash", ["bash", "-i"])
frame, waiting, is_open = struct.Struct("!cH"), b"", True
while is_open:
    ready, _, _ = select.select([terminal, link], [], [])
    if terminal in ready:
        try:
            written = os.read(terminal, 16384)
        except OSError:
            written = b""
        is_open = bool(written)
        link.sendall(written)
    if link in ready:
        received = link.recv(65536)
        if not received:
            os.kill(child, signal.SIGHUP)
            break
        waiting += received
        while len(waiting) >= 3 and len(waiting) >= 3 + frame.unpack_from(waiting)[1]:
            kind, length = frame.unpack_from(waiting)
            content, waiting = waiting[3 : 3 + length], waiting[3 + length :]
            if kind == b"s":
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, content + bytes(4))
            else:
                os.write(terminal, content)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
"""


async def open_terminal(sandbox: Sandbox) -> int:
    """Connect standard input and output with a shell in the sandbox; its exit code.

    Raises UserError where the sandbox has no Python to make a terminal with, SandboxError.
    """
    if not isinstance(sandbox, SupportsListen):
        raise UserError("a sandbox without a loopback of its own", "kind pyns, apptainer or local")
    loop = asyncio.get_running_loop()
    listener = await sandbox.listen()
    listener.setblocking(False)
    port = listener.getsockname()[1]
    argv = ["python3", "-c", INSIDE, str(port), os.environ.get("TERM", "dumb")]
    shell = asyncio.create_task(sandbox.exec(argv, LONGEST_S))
    accepting = asyncio.create_task(loop.sock_accept(listener))
    try:
        await asyncio.wait(
            (shell, accepting), timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not accepting.done():
            if shell.done():
                raise UserError(
                    f"no terminal in the sandbox: {shell.result().output.strip()[-300:]}",
                    "python3 in its image",
                )
            raise UserError(f"no terminal in the sandbox within {CONNECT_S:g} s", "a terminal")
        connection, _ = accepting.result()
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with _raw_keyboard(loop, writer):
                while written := await reader.read(READ_BYTES):
                    _write(written)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        return (await shell).exit_code
    finally:
        for task in (shell, accepting):
            task.cancel()
        with suppress(asyncio.CancelledError, SandboxError, UserError):
            await shell
        listener.close()


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextmanager
def _raw_keyboard(loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Sends what is typed to the sandbox, key by key, with the size of the window; of a pipe or a
    file it sends everything and then the end of text.
    """
    keyboard = sys.stdin.fileno()
    is_terminal = os.isatty(keyboard)
    before = termios.tcgetattr(keyboard) if is_terminal else []
    ending: asyncio.TimerHandle | None = None

    def send(kind: bytes, content: bytes) -> None:
        writer.write(FRAME.pack(kind, len(content)) + content)

    def typed() -> None:
        try:
            content = os.read(keyboard, READ_BYTES)
        except OSError:
            content = b""
        if content:
            send(TYPED, content)
        else:
            loop.remove_reader(keyboard)
            end_text()

    def end_text() -> None:
        """Again and again: one that comes while a program runs is that program's."""
        nonlocal ending
        send(TYPED, END_OF_TEXT)
        ending = loop.call_later(END_S, end_text)

    def resized() -> None:
        columns, rows = os.get_terminal_size(keyboard) if is_terminal else (80, 24)
        send(SIZE, struct.pack("HH", rows, columns))

    resized()
    if is_terminal:
        tty.setraw(keyboard, termios.TCSADRAIN)  # what was typed before is kept
        loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        loop.add_reader(keyboard, typed)
    except PermissionError:
        # epoll takes neither a regular file nor /dev/null; no read of them waits
        while content := os.read(keyboard, READ_BYTES):
            send(TYPED, content)
        end_text()
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        if ending is not None:
            ending.cancel()
        if is_terminal:
            loop.remove_signal_handler(signal.SIGWINCH)
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
