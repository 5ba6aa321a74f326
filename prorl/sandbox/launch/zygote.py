"""The zygote: a single-threaded process with everything imported that forks a launcher per sandbox.

A bare Python start costs more CPU than all namespaces together, so it is paid once. sandboxd talks
to it over a SOCK_SEQPACKET pair: `launch` with two descriptors (listening socket, status pipe),
`kill`; back come `started` and `exited`. The zygote alone reaps launchers, so a pid that it signals
cannot have been reused; what a killed launcher leaves behind, it ends. It dies with sandboxd's main
thread, launchers die with it.

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
from dataclasses import replace
from typing import Any, NoReturn

from prorl.linux import calls, procfs
from prorl.linux.forked import EXIT_CRASHED, Forked
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    MESSAGE_BYTES,
    Launch,
    Launcher,
    Serve,
    interpreter,
    interpreter_roots,
    package_folders,
)


class Zygote:
    """Forks launchers, signals them and reaps them: nobody else may, so no pid is another's."""

    def __init__(self, control: socket.socket, serve: Serve, launcher: Launcher) -> None:
        self._control, self._serve, self._launcher = control, serve, launcher
        self._pids: dict[str, int] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

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
            if self._control.fileno() in ready and not self._serve_one():
                return

    def _serve_one(self) -> bool:
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
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(launch, fds, parent)
        for fd in fds:
            os.close(fd)
        self._pids[launch.sandbox_id] = pid
        self._tell({"started": launch.sandbox_id, "pid": pid})

    def _become(self, launch: Launch, fds: list[int], parent: int) -> NoReturn:
        listener_fd, status_fd = fds
        with Forked(status_fd):
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._control.close()
            self._pids.clear()
            calls.die_with_parent(signal.SIGKILL, parent)
            if launch.user_tools:
                launch = replace(launch, user_tools_fd=os.open(launch.user_tools, os.O_RDONLY))
            self._launcher(launch, listener_fd, status_fd, self._serve)
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
            for sandbox_id, known in list(self._pids.items()):
                if known == pid:
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
    launcher: Launcher = kind.launch
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    os.chdir("/")
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)
    for known in (seccomp.bytecode, interpreter_roots, interpreter, package_folders):
        known()  # computed once here, inherited by every launcher
    kind.prepare()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that all children share
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    Zygote(control, serve, launcher).run()


if __name__ == "__main__":
    main()
