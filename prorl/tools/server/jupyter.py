"""Jupyter cells: a forked relay starts a kernel over ipc and drives it.

Unix sockets, so it works with the network cut; the connection file is 0600 in a folder of its own.
SIGINT interrupts the kernel, not the relay; when the kernel dies it is started again once per cell.

Output that a cell's subprocesses or threads write after its end belongs to the next cell.
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
KERNEL = (
    "--HistoryManager.enabled=False",
    "--InteractiveShell.colors=nocolor",
    "--IPKernelApp.capture_fd_output=False",
)
PRINTED = """
import sys
sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True, errors="backslashreplace")
shell, has_images = get_ipython(), lambda data: any(mime.startswith("image/") for mime in data)
def display(message, print=print, has_images=has_images):
    data = message["content"]["data"]
    if has_images(data):
        return message
    print(data.get("text/plain", ""))
def result(data, _=None, send=shell.displayhook.write_format_data, shown=display):
    if shown({"content": {"data": data}}):
        send(data, _)
shell.display_pub.register_hook(display)
shell.displayhook.write_format_data = result
shell._showtraceback = lambda _kind, _error, lines, print=print: print("\\n".join(lines))
"""
"""A kernel writes what its cells print, and what they show as text, into the cell's own pipe, which
makes them wait until it is read. By IOPub, messages of any size would lie in the kernel and in the
relay. Images go by IOPub, and what threads show.
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
        import tempfile

        from jupyter_client.manager import KernelManager

        folder = tempfile.mkdtemp(prefix="k")
        self.manager: Any = KernelManager(transport="ipc", ip=f"{folder}/s")
        self.manager.connection_file = f"{folder}/c.json"
        self.manager.start_kernel(extra_arguments=list(KERNEL))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)
        hidden = f"exec({PRINTED!r}, {{'get_ipython': get_ipython}})"
        self.client.execute(hidden, silent=True, store_history=False)

    def run(self, code: str) -> int | None:
        """Execute and print; 0, 1 for an error, None when the kernel died.

        Waits on both channels and the kernel's end at once.
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
                if is_ours:
                    show(message)
            elif shell in ready:
                message = session.recv(shell, 0)[1]
                if message["parent_header"].get("msg_id") == request:
                    exit_code = 0 if message["content"]["status"] == "ok" else 1
            elif ready:  # the kernel has ended
                return None
        return exit_code


def show(message: Any) -> None:
    """Keep the images of an IOPub message, or print its text."""
    if message["msg_type"] in ("execute_result", "display_data"):
        data = message["content"]["data"]
        if not keep_images(data):
            print(data.get("text/plain", ""))
