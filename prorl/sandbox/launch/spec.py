"""The record by which sandboxd describes a sandbox to its zygote.

It is a flat record that crosses as JSON, with descriptors beside it.

Every sandbox is a fork of a process that has imported this module, and pays for each page of it:
so its records are no dataclasses, whose module imports half of a compiler, and it leaves out
`prorl.types`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

if TYPE_CHECKING:
    from prorl.types import SandboxSpec

WORKSPACE = "/workspace"
"""The agent's folder inside namespace sandboxes."""
BIN = "/opt/prorl/bin"
"""Inside: `python` and `python3` that work whatever the image holds."""
LAYER = "/opt/prorl/layer"
"""Inside: the Python packages that a task asks for, where a kind can mount them."""
BASE_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
SANDBOX_UID = 1000
ENVIRONMENT_FILE = ".singularity.d/env/90-environment.sh"
"""In an image: its variables, where Apptainer keeps them."""
MESSAGE_BYTES = 64 << 10
"""The limit of one datagram between sandboxd and its zygote; a `Launch` is a hundredth of that."""

Serve = Callable[[int, int, dict[str, Any]], None]
"""The tool server's `serve(listener_fd, status_fd, config)`, for kinds that fork it."""


class Launcher(Protocol):
    """Turns a forked child of the zygote into a sandbox.

    It, or the tool server that it starts, writes `ok` or `error: ...` to the status pipe.
    """

    def __call__(self, launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
        """Called in the forked child; ends with its process."""


class Child(NamedTuple):
    """The things that a new process has from the zygote that made it."""

    listener_fd: int
    """The tool server's listening socket."""
    status_fd: int
    """A pipe to sandboxd, for `ok` or `error: ...`."""
    alive_fd: int
    """A pipe that is at its end when the zygote has ended."""
    serve: Serve


Become = Callable[[Callable[[Child], NoReturn]], NoReturn]
"""Closes what is the zygote's own in a new process, and runs the argument there."""


class Start(Protocol):
    """Makes the process that the zygote starts for one sandbox, and returns its pid.

    The new process calls `become`. After an OSError there is none. Descriptors that it opens are
    closed by the zygote.
    """

    def __call__(self, launch: Launch, become: Become) -> int:
        """The zygote calls this, and does nothing else meanwhile."""


class Launch(NamedTuple):
    """One sandbox, as sandboxd asks for it."""

    sandbox_id: str
    spec: SandboxSpec
    """In the zygote: an object with the same attributes."""
    uid: int
    """The ordinary uid that it gets for itself, or -1 where we are not root and have only our own.
    """
    image: str
    """Folder on the host; of a stack, its topmost."""
    under: tuple[str, ...]
    """Folders below `image`, topmost first, where it is a stack."""
    layer: str
    """Folder on the host: a virtual environment with the task's packages, read-only inside."""
    folder: str
    """On the host, for kinds that need one: workspace, overlay."""
    server: str
    """The tool server's zipapp on the host, for kinds that do not fork it."""
    cgroups: tuple[str, ...]
    """Control groups to join before privileges are dropped."""
    user_tools: str
    """Zip of users' tools on the host, when the spec names one."""
    files: tuple[str, ...] = ()
    """Files and folders of the host that are shown read-only, as SOURCE:TARGET."""
    user_tools_fd: int = -1
    """The same as `user_tools`, opened by the zygote."""

    def to_json(self) -> bytes:
        """The record as the datagram that the zygote gets; descriptors travel beside it."""
        from dataclasses import asdict

        return json.dumps({**self._asdict(), "spec": asdict(self.spec)}).encode()

    @staticmethod
    def from_json(data: bytes) -> Launch:
        fields = json.loads(data)
        listed = {name: tuple(fields[name]) for name in ("cgroups", "under", "files")}
        spec = cast("SandboxSpec", SimpleNamespace(**fields["spec"]))
        return Launch(**{**fields, **listed, "spec": spec})


@cache
def interpreter_roots() -> tuple[str, ...]:
    """Folders that this Python runs from, outside /usr.

    They are its base prefix, then a virtual environment's.
    """
    roots: list[str] = []
    for prefix in (sys.base_prefix, sys.prefix):
        path = os.path.realpath(prefix)
        if not any(path == root or path.startswith(root + "/") for root in ("/usr", *roots)):
            roots.append(path)
    return tuple(roots)


@cache
def interpreter() -> str:
    """The path of our Python itself, not of a link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


def server_command(server: str) -> list[str]:
    """Runs the zipapp at the path `server`, isolated and without site.

    Not as a script: `runpy` alone would cost 4 ms.
    """
    code = (
        f"import sys; sys.path.insert(0, {server!r}); from prorl.tools.server.main import main;"
        " main()"
    )
    return [interpreter(), "-I", "-S", "-E", "-B", "-c", code]


@cache
def package_folders() -> tuple[str, ...]:
    """Returns the folders where IPython and its like are installed for our interpreter.

    They are shown inside read-only with the interpreter's roots.
    """
    return tuple(path for path in sys.path if path.endswith("site-packages"))


def search_path(launch: Launch, own: str, layer: str = LAYER) -> str:
    return f"{layer}/bin:{own}" if launch.layer else own


def server_config(
    launch: Launch, workspace: str, path: str, refuse_uid: int, alone: bool, layer: str = LAYER
) -> dict[str, Any]:
    """Returns the configuration of the tool server (`prorl/tools/server/main.py`)."""
    user_tools = {"user_tools": launch.user_tools_fd} if launch.user_tools_fd >= 0 else {}
    return {
        **user_tools,
        "workspace": workspace,
        "env": environment(workspace, path),
        "variables": variables_of(launch.spec),
        "tools": list(launch.spec.tools),
        "refuse_uid": refuse_uid,
        "alone": alone,
        "python": interpreter(),
        "packages": list(package_folders()),
        "layer": layer if launch.layer else "",
        "workdir": launch.spec.workdir if launch.image else "",
    }


def variables_of(spec: SandboxSpec) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in spec.variables)
    return {name: value for name, _, value in pairs}


def environment(workspace: str, path: str) -> dict[str, str]:
    """The whole environment of everything inside; nothing of the host's is passed on."""
    return {
        "PATH": path,
        "HOME": workspace,
        "USER": "user",
        "LOGNAME": "user",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
