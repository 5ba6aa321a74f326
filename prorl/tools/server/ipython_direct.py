"""The child of the `ipython` tool: an IPython shell that runs cells from descriptor 3.

Run as source text; imports nothing of ours.

    <- [number, "code"]\\n (JSON)     -> \\nnumber exit code\\n

Images that a cell shows are kept as data: written to `.ipython/<n>.<type>` in the workspace, with a
line in the output that says so.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from typing import Any

IMAGES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
FOLDER = ".ipython"


def keep_images(data: dict[str, Any]) -> bool:
    """Write the images of a result to files; whether there was one."""
    found = False
    for mime, ending in IMAGES.items():
        if mime in data:
            content = data[mime]
            raw = content if isinstance(content, bytes) else content.encode()
            if mime != "image/svg+xml" and not isinstance(content, bytes):
                raw = base64.b64decode(content)
            os.makedirs(FOLDER, exist_ok=True)
            path = f"{FOLDER}/{len(os.listdir(FOLDER)) + 1}.{ending}"
            with open(path, "wb") as file:
                file.write(raw)
            print(f"[{mime}, {len(raw)} bytes: {path}]")
            found = True
    return found


def make_shell() -> Any:
    """A shell without history file or colours whose results go to stdout."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Hook(DisplayHook):
        def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
            keep_images(format_dict)
            super().write_format_data(format_dict, md_dict)

    class Publisher(DisplayPublisher):
        def publish(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if not keep_images(data) and "text/plain" in data:
                print(data["text/plain"])

    class Shell(InteractiveShell):
        displayhook_class = Hook
        display_pub_class = Publisher

        def enable_gui(self, gui: Any = None) -> None:
            return None

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 100
    return Shell.instance(config=config)


def serve(control: socket.socket) -> None:
    shell = make_shell()
    lines, pid, loads = control.makefile("rb"), os.getpid(), json.loads
    number = 0
    while True:
        try:
            line = lines.readline()
            if not line:
                return
            number, text = loads(line)
            result = shell.run_cell(text, store_history=True)
            code = 0 if result.success else 1
        except KeyboardInterrupt:
            code = 130
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() != pid:
            os._exit(0)  # forked by the cell
        control.sendall(b"\n%d %d\n" % (number, code))


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    sys.argv[1:] = []
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    serve(socket.socket(fileno=3))
