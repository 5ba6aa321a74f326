"""IPython cells, by `direct` or by `jupyter`.

`direct` is a shell in a process of its own, driven over a socket, without ZMQ; `jupyter` is any
kernel, over ipc.

Both are the interpreter of `python.py` with another child: the same line protocol, the same
interrupt and restart. The child is a program started from source text, because inside a foreign
image none of our files exist. IPython itself comes from folders that the host shows read-only
(`packages` in the configuration).
"""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from prorl.tools.server.children import enter, prepare
from prorl.tools.server.place import Place
from prorl.tools.server.python import Python


def _source(name: str) -> bytes:
    path = os.path.join(os.path.dirname(__file__), name)
    found: bytes = __loader__.get_data(path)  # type: ignore[name-defined]
    return found


class IPython(Python):
    """An interpreter whose child is an IPython shell."""

    source = _source("ipython_direct.py")
    """Read at import, that is by the zygote: a forked server has a root in which our files do not
    exist.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._argv = [place.python, "-B", "-c", self.source.decode(), *place.packages]

    def _become(self, control: socket.socket, output: int) -> NoReturn:
        os.setsid()
        prepare()
        enter(self._cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(control.fileno(), 3)
        os.closerange(4, 1024)
        os.execve(
            self._argv[0], self._argv, dict(self._env, IPYTHONDIR="/tmp/.ipython", MPLBACKEND="agg")
        )


class Jupyter(IPython):
    """An interpreter whose child is a Jupyter kernel's client."""

    source = _source("ipython_jupyter.py")
