"""A persistent Python interpreter: a forked child that executes one cell after another.

State lives until the child dies. The last expression's repr is shown, as IPython does. Everything
written to the child's standard outputs, by Python or by programs that it starts, is the cell's
output. The end of a cell comes over a socket; a pipe is synchronous, so whatever was printed before
it is there to be drained by then. Cells are numbered, for the agent can write to that socket, too.

    <- [number, cell]\\n (JSON)     -> \\nnumber exit code\\n

At the deadline: SIGINT (KeyboardInterrupt, state kept), then KILL for the child's whole session and
a new interpreter.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from prorl.tools.server.children import EXIT_TIMEOUT, Forked, enter, prepare, signal_group
from prorl.tools.server.output import Capped, result_of
from prorl.tools.server.place import Place

INTERRUPT_S, KILL_S = 1.0, 1.0
"""After the deadline: for KeyboardInterrupt to end the cell, then for a killed session to be
reaped.
"""
READ_BYTES, MAX_ANSWER_BYTES = 1 << 16, 80


class Python:
    """One interpreter; started with its first cell, replaced when it died."""

    noun = "interpreter"
    keep = 3
    """A descriptor that its child needs besides."""

    def __init__(self, place: Place) -> None:
        self._events, self._room, self._env = place.events, place.room, place.env
        self._packages, self._layer = list(place.packages), place.layer
        self._cwd = place.cwd
        self._pid = 0

    def start(self) -> None:
        """Fork the interpreter if it does not run."""
        if self._pid:
            return
        ours, theirs = socket.socketpair()
        read, write = os.pipe2(os.O_CLOEXEC)
        pid = self._room(os.fork)
        if pid == 0:
            with Forked(2):
                self._become(theirs, write)
        theirs.close()
        os.close(write)
        os.set_blocking(read, False)
        self._events.watch(pid)
        self._pid, self._socket, self._output = pid, ours, read
        self._number, self._partial_line = 0, b""

    def _become(self, control: socket.socket, output: int) -> None:
        channel = become_child(control, output, self._env, self._cwd, self.keep)
        try:
            self._serve(channel)
        except KeyboardInterrupt:
            pass
        os._exit(0)

    def _serve(self, control: socket.socket) -> None:
        """Execute cells in the child until the server is gone."""
        if self._layer:
            sys.path[:] = [path for path in sys.path if path not in self._packages]
        show_layer(self._layer)
        sys.path.insert(0, self._cwd)
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        numbers = itertools.count(1)
        serve_cells(control, lambda code: _run_cell(code, next(numbers), main.__dict__))

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """Run the cell `{code}`; exit code 1 when it raised, 124 at the deadline."""
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ValueError("python needs `code` (a string)")
        return self._cell(code, until)

    def _cell(self, payload: Any, until: float) -> dict[str, Any]:
        self.start()
        output = Capped()
        self._number += 1
        try:
            self._socket.sendall(json.dumps([self._number, payload]).encode() + b"\n")
        except OSError:
            pass  # the child has died; the wait below says so
        try:
            exit_code = self._wait(output, until)
            timed_out = exit_code is None
            if timed_out:
                self._interrupt(output)
        except BaseException:
            self._interrupt(Capped(0))
            raise
        return result_of(output, EXIT_TIMEOUT if timed_out else exit_code, timed_out)

    def _wait(self, output: Capped, until: float) -> int | None:
        """Exit code of the cell (0, or 1 for an exception), or None at the deadline."""
        done = self._socket.fileno()
        fds = [done, self._output]
        while True:
            ready = self._events.wait(fds, until)
            if self._output in ready and self._read(output) == 0:
                fds = [done]  # the child closed its outputs; it may still compute
            if done in ready:
                alive, code = self._hear()
                self._drain(output)
                if code is not None:
                    return code
                if not alive:
                    return self._died(output)
            status = self._events.status(self._pid)
            if status is not None:
                self._drain(output)
                return self._died(output)
            if time.monotonic() >= until:
                return None

    def _hear(self) -> tuple[bool, int | None]:
        """Returns whether the child can still answer, and its answer to the cell that was sent
        last.

        Anything else that comes is not asked for: a process that the agent forked, or the agent.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[-MAX_ANSWER_BYTES:]
        for line in lines:
            number, _, code = line[:MAX_ANSWER_BYTES].partition(b" ")
            if number == b"%d" % self._number and code.lstrip(b"-").isdigit():
                return True, max(-(1 << 31), min(int(code), (1 << 31) - 1))
        return bool(data), None

    def _read(self, output: Capped) -> int:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return -1
        output.feed(data)
        return len(data)

    def _drain(self, output: Capped) -> None:
        for _ in range(1024):  # bounded: a child in the background may write for ever
            if self._read(output) <= 0:
                return

    def _died(self, output: Capped) -> int:
        until = time.monotonic() + KILL_S
        while self._events.status(self._pid) is None and time.monotonic() < until:
            self._events.wait([], until, peers=True)
        status = self._events.status(self._pid)
        self.stop()
        output.feed(f"\n[the {self.noun} ended; the next call starts a new one]\n".encode())
        return status if status else 1

    def _interrupt(self, output: Capped) -> None:
        client, self._events.client = self._events.client, -1
        try:
            if self._pid:
                os.kill(self._pid, signal.SIGINT)
                if self._wait(output, time.monotonic() + INTERRUPT_S) is None:
                    self.stop()
                    words = f"the {self.noun} did not stop and was killed; its state is lost"
                    output.feed(f"\n[{words}]\n".encode())
        except ProcessLookupError:
            self.stop()
        finally:
            self._events.client = client

    def stop(self) -> None:
        """Kill everything of the interpreter's session, and close what was open to it."""
        if not self._pid:
            return
        signal_group(self._pid, signal.SIGKILL)
        until = time.monotonic() + KILL_S
        while self._events.status(self._pid) is None and time.monotonic() < until:
            self._events.wait([], until, peers=True)
        self._events.forget(self._pid)
        self._socket.close()
        os.close(self._output)
        self._pid = 0


# ---- the child


def become_child(
    control: socket.socket, output: int, env: dict[str, str], cwd: str, keep: int
) -> socket.socket:
    """Prepare a forked child: a new session, its outputs, and `control` as descriptor 3.

    Every other descriptor but `keep` is closed.
    """
    os.setsid()
    prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    fd = os.dup2(control.detach(), 3, inheritable=False)
    os.closerange(4, keep)
    os.closerange(keep + 1, 1024)
    os.environ.clear()
    os.environ.update(env)
    enter(cwd)
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = [""]
    return socket.socket(fileno=fd)


def show_layer(layer: str) -> list[str]:
    """Have the child find the task's packages as the layer's own interpreter does, which bash has.

    Returns what it put behind `sys.path`.
    """
    import glob
    import site

    before = len(sys.path)
    for folder in glob.glob(f"{layer}/lib/python3*/site-packages") if layer else ():
        site.addsitedir(folder)
        sys.executable = f"{layer}/bin/python3"
    return sys.path[before:]


def serve_cells(control: socket.socket, run: Callable[[Any], int]) -> None:
    """Run cells (JSON, one a line) in the child and tell their exit codes; end with the server."""
    # at hand before the agent can change it
    lines, pid, loads = control.makefile("rb"), os.getpid(), json.loads
    while True:
        try:
            line = lines.readline()
        except KeyboardInterrupt:
            continue  # the interrupt came after the cell had ended
        if not line:
            return
        number = 0
        try:
            number, payload = loads(line)
            exit_code = run(payload)
        except KeyboardInterrupt:
            exit_code = 130
        if os.getpid() != pid:  # a process that a cell forks ends with the cell
            flush()
            os._exit(exit_code & 0xFF)
        send_exit_code(control, number, exit_code)


def send_exit_code(control: socket.socket, number: int, exit_code: int) -> None:
    """Tell the server that a cell has ended, after all that it printed."""
    flush()
    control.sendall(b"\n%d %d\n" % (number, exit_code))


def flush() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # closed, or replaced by the agent


class Cell:
    """Holds the agent's code: whatever it raises is its output, and its exit code.

    `where`: how its files' names begin.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.exit_code = 0

    def __enter__(self) -> Cell:
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):
            self.exit_code = (
                error.code if isinstance(error.code, int) else int(error.code is not None)
            )
        elif error is not None:
            self.exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
            import traceback

            while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(
                self._where
            ):
                trace = trace.tb_next  # our own frames are of no interest
            traceback.print_exception(type(error), error, trace)
        return True


def _run_cell(code: str, number: int, names: dict[str, Any]) -> int:
    # Imported in the child, at its first cell: the server's own start does not pay for them.
    import ast
    import linecache

    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    with Cell(name) as cell:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                names["_"] = value
                print(repr(value))
    return cell.exit_code
