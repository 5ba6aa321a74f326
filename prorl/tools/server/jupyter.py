"""Jupyter cells: a forked relay starts a kernel over ipc and drives it.

Unix sockets, so it works with the network cut; the connection file is 0600 in a folder of its own.
SIGINT interrupts the kernel, not the relay; when the kernel dies it is started again once per cell.

Output that a cell's subprocesses or threads send after its end belongs to the next cell. What the
kernel itself writes to its terminal is not shown: ipykernel sends all of it over IOPub, too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from prorl.tools.server.ipython import IPython, keep_images
from prorl.tools.server.python import serve_cells, show_layer

START_S = 30.0
"""For a kernel to answer: it imports for seconds on a busy machine."""
LAZY_FLUSH = """
from select import select
from ipykernel.iostream import OutStream
flush = OutStream.flush
def lazily(stream):
    pipe = [stream._fid] if hasattr(stream, "_fid") else []
    for _ in range(100):
        pending = stream._flush_pending or stream._subprocess_flush_pending
        if not pending and not select(pipe, [], [], 0)[0]:
            return
        flush(stream)
OutStream.flush = lazily
"""
"""For ipykernel, which several times a cell waits for a thread to send what nobody has written, a
third of a short cell's time, and does not wait for what programs have written.
"""


class Jupyter(IPython):
    def _serve(self, control: socket.socket) -> None:
        others = list(sys.path)
        first = [*show_layer(self._layer), *self._packages]
        sys.path[:] = [*first, *others]
        sys.executable = self._python
        os.environ.update(MPLBACKEND="agg", PYTHONPATH=os.pathsep.join(first))
        kernel = Kernel()
        signal.signal(signal.SIGINT, lambda _number, _frame: kernel.manager.interrupt_kernel())

        def run(code: str) -> int:
            nonlocal kernel
            exit_code = kernel.run(code)
            if exit_code is not None:
                return exit_code
            kernel.client.stop_channels()
            kernel = Kernel()
            print("[the kernel ended and was started again; its state is lost]")
            return 1

        serve_cells(control, run)
        kernel.manager.shutdown_kernel(now=True)


class Kernel:
    def __init__(self) -> None:
        import subprocess
        import tempfile

        from jupyter_client.manager import KernelManager

        folder = tempfile.mkdtemp(prefix="k")
        self.manager: Any = KernelManager(transport="ipc", ip=f"{folder}/s")
        self.manager.connection_file = f"{folder}/c.json"
        null = subprocess.DEVNULL
        quiet = ["--HistoryManager.enabled=False"]
        self.manager.start_kernel(extra_arguments=quiet, stdout=null, stderr=null)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)
        self.client.execute(f"exec({LAZY_FLUSH!r}, {{}})", silent=True, store_history=False)

    def run(self, code: str) -> int | None:
        """Execute and print; 0, 1 for an error, None when the kernel died.

        Waits on both channels and the kernel's life at once.
        """
        import zmq

        alive = os.pidfd_open(self.manager.provisioner.pid)
        poller = zmq.Poller()
        for channel in (self.client.iopub_channel.socket, self.client.shell_channel.socket, alive):
            poller.register(channel, zmq.POLLIN)
        request = self.client.execute(code, allow_stdin=False)
        try:
            return self._follow(poller, request)
        finally:
            os.close(alive)

    def _follow(self, poller: Any, request: str) -> int | None:
        """Print what a request gives until it is answered and the kernel idle, or it dies."""
        session = self.client.session
        iopub, shell = self.client.iopub_channel.socket, self.client.shell_channel.socket
        exit_code: int | None = None
        idle = False
        while exit_code is None or not idle:
            ready = dict(poller.poll())
            if iopub in ready:
                message = session.recv(iopub, 0)[1]
                is_ours = message["parent_header"].get("msg_id") == request
                if is_ours and message["msg_type"] == "status":
                    idle = message["content"]["execution_state"] == "idle"
                if is_ours or message["msg_type"] == "stream":
                    show(message)
            elif shell in ready:
                message = session.recv(shell, 0)[1]
                if message["parent_header"].get("msg_id") == request:
                    exit_code = 0 if message["content"]["status"] == "ok" else 1
            elif ready:  # the kernel's life has ended
                return None
        return exit_code


def show(message: Any) -> None:
    """Print what an IOPub message says, in its order."""
    import re

    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        print(content["text"], end="")
    elif kind in ("execute_result", "display_data"):
        print(content["data"].get("text/plain", ""))
        keep_images(content["data"])
    elif kind == "error":
        print(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])))
