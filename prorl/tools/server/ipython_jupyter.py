"""The child of the `jupyter` tool: starts a kernel over ipc and relays cells from descriptor 3.

Run as source text.

Any installed kernel does (`PRORL_KERNEL`, default python3). Unix sockets, so it works with the
network cut; the connection file is 0600 in a folder of its own. SIGINT interrupts the kernel, not
the relay; when the kernel dies it is started again once per cell.

Output that a cell's subprocesses or threads send after its end belongs to the next cell. What the
kernel itself writes to its terminal is not shown: ipykernel sends all of it over IOPub, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

START_S = 30.0
"""For a kernel to answer: it imports for seconds on a busy machine."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
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


def start() -> Any:
    """Start a kernel; its manager and a client that has heard from it."""
    from jupyter_client.manager import KernelManager

    folder = tempfile.mkdtemp(prefix="k")
    manager = KernelManager(
        kernel_name=os.environ.get("PRORL_KERNEL", "python3"), transport="ipc", ip=f"{folder}/s"
    )
    manager.connection_file = f"{folder}/c.json"
    null = subprocess.DEVNULL
    manager.start_kernel(
        extra_arguments=["--HistoryManager.enabled=False"], stdout=null, stderr=null
    )
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=START_S)
    if manager.kernel_spec and manager.kernel_spec.language == "python":
        client.execute(f"exec({LAZY_FLUSH!r}, {{}})", silent=True, store_history=False)
    return manager, client


def show(message: Any) -> None:
    """Print what an IOPub message says, in its order."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        print(content["text"], end="")
    elif kind in ("execute_result", "display_data"):
        data = content["data"]
        images = [mime for mime in data if mime.startswith("image/")]
        print(data.get("text/plain", ""))
        for mime in images:
            os.makedirs(".ipython", exist_ok=True)
            ending = mime.partition("/")[2].partition("+")[0]
            path = f".ipython/{len(os.listdir('.ipython')) + 1}.{ending}"
            keep(path, data[mime])
            print(f"[{mime}: {path}]")
    elif kind == "error":
        print(ESCAPES.sub("", "\n".join(content["traceback"])))


def keep(path: str, content: str) -> None:
    """Write an image: text for SVG, else base64."""
    import base64

    with open(path, "wb") as file:
        file.write(content.encode() if path.endswith(".svg") else base64.b64decode(content))


def run_cell(manager: Any, client: Any, code: str) -> int | None:
    """Execute and print; 0, 1 for an error, None when the kernel died.

    Waits on both channels and the kernel's life at once.
    """
    import zmq

    alive = os.pidfd_open(manager.provisioner.pid)
    poller = zmq.Poller()
    for channel in (client.iopub_channel.socket, client.shell_channel.socket, alive):
        poller.register(channel, zmq.POLLIN)
    request = client.execute(code, allow_stdin=False)
    try:
        return follow(client, poller, request)
    finally:
        os.close(alive)


def follow(client: Any, poller: Any, request: str) -> int | None:
    """Print what a request gives until it is answered and the kernel idle, or the kernel dies."""
    iopub, shell = client.iopub_channel.socket, client.shell_channel.socket
    exit_code: int | None = None
    idle = False
    while exit_code is None or not idle:
        ready = dict(poller.poll())
        if iopub in ready:
            message = client.session.recv(iopub, 0)[1]
            is_ours = message["parent_header"].get("msg_id") == request
            idle = is_idle(message) if is_ours else idle
            if is_ours or message["msg_type"] == "stream":
                show(message)
        elif shell in ready:
            message = client.session.recv(shell, 0)[1]
            if message["parent_header"].get("msg_id") == request:
                exit_code = 0 if message["content"]["status"] == "ok" else 1
        elif ready:  # the kernel's life has ended
            return None
    return exit_code


def is_idle(message: Any) -> bool:
    """Whether a message on IOPub says that the kernel has nothing more to do."""
    is_status = message["msg_type"] == "status"
    return bool(is_status and message["content"]["execution_state"] == "idle")


def serve(control: socket.socket) -> None:
    """Relay cells until the server is gone, then end the kernel."""
    manager, client = start()
    signal.signal(signal.SIGINT, lambda _number, _frame: manager.interrupt_kernel())
    for line in control.makefile("rb"):
        number, text = json.loads(line)
        code = run_cell(manager, client, text)
        if code is None:
            client.stop_channels()
            manager, client = start()
            print("[the kernel ended and was started again; its state is lost]")
        sys.stdout.flush()
        control.sendall(b"\n%d %d\n" % (number, 1 if code is None else code))
    manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.argv[1:])
    serve(socket.socket(fileno=3))
