"""The zygote: a single-threaded process with everything imported that forks a process per sandbox.

A bare Python start costs more CPU than all namespaces together, so it is paid once. sandboxd talks
to it over a SOCK_SEQPACKET pair: `launch` with two descriptors (listening socket, status pipe),
`kill`; back come `started` and `exited`. What it forks is the sandbox's launcher, or its pid 1,
where the kind needs no launcher. The zygote alone reaps these, so a pid that it signals cannot have
been reused; what a killed launcher leaves behind, it ends. It dies with sandboxd's main thread, and
they die with it.

Not promised: to outlive a full control socket; sandboxd reads it in its event loop.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from prorl.linux import calls, procfs
from prorl.linux.forked import EXIT_CRASHED, ForkedChild
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    MESSAGE_BYTES,
    Become,
    Child,
    Launch,
    Launcher,
    Serve,
    Start,
    interpreter,
    interpreter_roots,
    package_folders,
)

MAX_OPENED = 4096
"""Descriptors opened for one sandbox: an image has 500 folders at most."""


class Zygote:
    """Forks what a kind starts, signals and reaps it: nobody else may, so no pid is another's."""

    def __init__(self, control: socket.socket, serve: Serve, start: Start) -> None:
        self._control, self._serve, self._start = control, serve, start
        self._pids: dict[str, int] = {}
        """The processes of living sandboxes, by id."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._alive_read, self._alive_write = os.pipe2(os.O_CLOEXEC)
        self._own_fds = max(control.fileno(), self._alive_read, self._alive_write) + 1
        """All descriptors below this are in use, so whatever is opened for a sandbox is above."""
        while (unused := os.dup(0)) < self._own_fds:
            pass
        os.close(unused)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._serve_request():
                return

    def _serve_request(self) -> bool:
        data, fds, _flags, _address = socket.recv_fds(self._control, MESSAGE_BYTES, 2)
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            pid = self._pids.get(message["kill"])
            if pid is not None:
                os.kill(pid, message["signal"])
            return True
        self._launch(Launch.from_json(data), fds)
        return True

    def _launch(self, launch: Launch, fds: list[int]) -> None:
        listener_fd, status_fd = fds
        child = Child(listener_fd, status_fd, self._alive_read, self._serve)
        try:
            if launch.user_tools:
                launch = launch._replace(user_tools_fd=os.open(launch.user_tools, os.O_RDONLY))
            pid = self._start(launch, partial(self._become, child))
        except OSError as error:
            with suppress(OSError):  # sandboxd has given it up
                os.write(status_fd, f"error: {error}".encode()[:4000])
            crashed = {"status": EXIT_CRASHED << 8, "cpu_s": 0.0}
            self._tell({"exited": launch.sandbox_id, **crashed})
        else:
            self._pids[launch.sandbox_id] = pid
            self._tell({"started": launch.sandbox_id, "pid": pid})
        finally:
            os.closerange(self._own_fds, self._own_fds + MAX_OPENED)

    def _become(self, child: Child, run: Callable[[Child], NoReturn]) -> NoReturn:
        with ForkedChild(child.status_fd):
            # first: while it is open here, other sandboxes take us for the zygote
            os.close(self._alive_write)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._control.close()
            self._pids.clear()
            run(child)
        os._exit(EXIT_CRASHED)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                self._end_orphans()
                return
            for sandbox_id, child_pid in list(self._pids.items()):
                if child_pid == pid:
                    del self._pids[sandbox_id]
                    cpu_s = usage.ru_utime + usage.ru_stime
                    self._tell({"exited": sandbox_id, "status": status, "cpu_s": cpu_s})

    def _end_orphans(self) -> None:
        """Kill what a killed guardian of `local` has left.

        It came to us (subreaper), and nobody else could tell whose it is.

        Its children come to us in turn, each with a signal that brings us here again.
        """
        for pid in {*procfs.children(os.getpid())} - {*self._pids.values()}:
            os.kill(pid, signal.SIGKILL)  # our child until we reap it

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


def launched(launcher: Launcher) -> Start:
    """Starts sandboxes of a kind that has launchers: each is a fork of the zygote."""

    def start(launch: Launch, become: Become) -> int:
        parent = os.getpid()

        def run(child: Child) -> NoReturn:
            os.close(child.alive_fd)
            calls.die_with_parent(signal.SIGKILL, parent)
            launcher(launch, child.listener_fd, child.status_fd, child.serve)

        pid = os.fork()
        if pid == 0:
            become(run)
        return pid

    return start


def main() -> None:
    """`python -m prorl.sandbox.launch.zygote CONTROL_FD PARENT_PID SERVER_MODULE KIND`.

    A kind is the `module:attribute` of its record.
    """
    control_fd, parent, module, place = sys.argv[1:]
    calls.die_with_parent(signal.SIGKILL, int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal is sandboxd's to judge
    server = importlib.import_module(module)
    server.preload()
    serve: Serve = server.serve
    kind_module, _, attribute = place.partition(":")
    kind = getattr(importlib.import_module(kind_module), attribute)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    os.chdir("/")
    if os.getuid() == 0:
        os.setgroups([])  # a sandbox's namespaces would keep them
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)
    for prepare in (seccomp.bytecode, interpreter_roots, interpreter, package_folders):
        prepare()  # computed once here, inherited by every sandbox
    kind.prepare()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that all children share
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    Zygote(control, serve, kind.start or launched(kind.launch)).run()


if __name__ == "__main__":
    main()
