"""IPython cells: a shell in a forked process, driven over a socket, without ZMQ.

It is the interpreter of `python.py` with another way to execute a cell; IPython itself comes from
folders that the host shows read-only. Images that a cell shows are kept as data: written to
`.ipython/<n>.<type>` in the workspace, with a line in the output that says so.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from prorl.tools.server.place import Place
from prorl.tools.server.python import Python, serve_cells, show_layer

FOLDER = ".ipython"


class IPython(Python):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._python = place.python

    def _serve(self, control: socket.socket) -> None:
        others, sys.executable = list(sys.path), self._python
        first = [*show_layer(self._layer), *self._packages]
        sys.path[:] = [*first, *others]
        os.environ.update(IPYTHONDIR="/tmp/.ipython", MPLBACKEND="agg")
        shell = make_shell()
        sys.path.insert(len(first), self._cwd)
        serve_cells(control, lambda code: int(not shell.run_cell(code, store_history=True).success))


def keep_images(data: dict[str, Any]) -> bool:
    """Write the images of a result to files; whether there was one."""
    import base64  # in the child

    mimes = [mime for mime in data if mime.startswith("image/")]
    for mime in mimes:
        content = data[mime]
        if not isinstance(content, bytes):
            content = content.encode() if "svg" in mime else base64.b64decode(content)
        os.makedirs(FOLDER, exist_ok=True)
        ending = mime.partition("/")[2].partition("+")[0]
        path = f"{FOLDER}/{len(os.listdir(FOLDER)) + 1}.{ending}"
        with open(path, "wb") as file:
            file.write(content)
        print(f"[{mime}, {len(content)} bytes: {path}]")
    return bool(mimes)


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

    class NotebookShell(InteractiveShell):
        displayhook_class = Hook
        display_pub_class = Publisher

        def enable_gui(self, gui: Any = None) -> None:
            return None

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 100
    return NotebookShell.instance(config=config)
