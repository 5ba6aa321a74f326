"""The tool server's loop: accept clients, run one call at a time, answer.

Started by `serve` with descriptors that exist already.

    {"op": "call", "tool", "arguments", "timeout_s"}     -> {"exit_code", "duration_s" ...} + output
    {"op": "exec", "argv", "timeout_s"} + stdin          -> the same
    {"op": "put", "path", "mode", "offset"} + content    -> {}
    {"op": "get", "path", "offset", "max_bytes"}         -> {"size"} + content
    {"op": "listen", "port", "env"}                      -> {"port"} + a descriptor (SCM_RIGHTS)
    {"op": "end"}                                        -> {}; behind a call: end it
    anything wrong                                       -> {"error", "missing"}

Each question has an `id`, which its answer repeats beside `ok`. One with a `call` is answered once
(`memory.py`), and goes on when its client dies; any other ends with its client.

The listening socket was made outside, so its file is out of the agent's reach. Calls of several
clients are served in turn.

`listen` lets whoever runs the sandbox serve a port on its loopback: the socket is made here, in the
sandbox's network, and served there. So nothing is pumped, and each connection comes from inside.
The node's proxy has such a port, too; `env` are variables that lead there.
"""

from __future__ import annotations

import os
import struct
import sys
import time

from prorl.tools.catalogue import CATALOGUE
from prorl.tools.server import BadTool
from prorl.tools.server.bash import Bash, BashDied
from prorl.tools.server.children import HOME, MakeRoom, libc, restrict, set_dumpable
from prorl.tools.server.events import ClientDisconnected, Events
from prorl.tools.server.frames import FRAME_LIMIT, BadFrame, FrameBuffer, ToolFrame, send
from prorl.tools.server.light import TYPE_CHECKING, accept, loads, signal, socket
from prorl.tools.server.memory import Memory
from prorl.tools.server.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Tool = Callable[[dict[str, Any], float], dict[str, Any]]

MAX_CLIENTS = 16
"""Connected at once; stages need one each, and an agent could open more."""
READ_BYTES = 1 << 16
"""More at once would be a mapping of its own for each read, whatever has come."""
PORT, BACKLOG = 8000, 64
"""Served by `listen`, where the sandbox has a network of its own."""
DEFAULT = ("bash", "python", "files")
PEER = struct.Struct("3i")
WORLD_FILE = ".prorl-workdir"
"""At the root of an image, as `prorl/sandbox/images/stack.py` writes it."""
APPTAINER_LIBRARIES = "/.singularity.d/libs"
IMAGE_WORKDIR = "image"
"""The same value as in `prorl.types`; this is a program of its own."""
EXIT_CRASHED = os.EX_SOFTWARE
"""The same value as in `prorl.linux.forked`; this is a program of its own."""


class Server:
    """The loop and what it owns: clients by descriptor, tools by name."""

    def __init__(self, listener: socket.socket, config: dict[str, Any]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._events = Events()
        self._clients: dict[int, tuple[socket.socket, FrameBuffer]] = {}
        self._refuse_uid: int = config.get("refuse_uid", -1)
        self._port: int = config.get("port", PORT)
        self._place = Place(
            self._events,
            MakeRoom(self._events, config.get("alone", False)),
            with_variables(config["env"], config.get("variables", {})),
            config["workspace"],
            config.get("python", ""),
            config.get("packages", ()),
            config.get("layer", ""),
        )
        self._memory = Memory()
        self._names = sorted(config.get("tools", DEFAULT))
        self._bash = Bash(self._place)
        self._tools: dict[str, Tool] = {"bash": self._bash.run}
        for name in self._names:
            if name not in CATALOGUE:
                self._tools[name] = self._make_user_tool(name, config)

    def _make(self, name: str) -> Tool:
        """A tool is imported and made with its first call: most sandboxes use one or two."""
        run: Tool = CATALOGUE[name].load()(self._place).run
        return run

    def _make_user_tool(self, name: str, config: dict[str, Any]) -> Tool:
        """Made at once, so that one that cannot be made fails the start of the sandbox.

        Raises BadTool.
        """
        if "user_tools" not in config:
            raise BadTool(f"no tool {name!r} in this sandbox")
        from prorl.tools.server.user_tool import UserTool

        tool = UserTool(self._place, name, config["user_tools"])
        tool.start()
        return tool.run

    def begin(self) -> None:
        self._shell(self._bash.begin)

    def run(self) -> None:
        """Answer clients for ever; the end of the server is the end of its process."""
        self._shell(self._bash.start)
        while True:
            for fd in self._events.wait(
                [self._listener.fileno(), *self._clients], None, peers=True
            ):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._receive(fd)

    def _shell(self, step: Callable[[], None]) -> None:
        if "bash" in self._names:
            try:
                step()
            except BashDied:
                pass  # told to whoever calls bash

    def _accept(self) -> None:
        try:
            connection = accept(self._listener)
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _pid, uid, _gid = PEER.unpack(credentials)
        if uid == self._refuse_uid or len(self._clients) >= MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(True)
        self._clients[connection.fileno()] = (connection, FrameBuffer())

    def _receive(self, fd: int) -> None:
        connection, buffer = self._clients[fd]
        try:
            data = connection.recv(READ_BYTES)
            buffer.feed(data)
            frame = buffer.next()
            while frame is not None:
                self._answer(connection, buffer, frame)
                frame = buffer.next()
        except (OSError, BadFrame, ClientDisconnected):
            data = b""
        if not data:
            self._events.client = -1
            del self._clients[fd]
            connection.close()

    def _answer(self, connection: socket.socket, buffer: FrameBuffer, frame: ToolFrame) -> None:
        header = frame.header
        self._events.client = connection.fileno()
        self._events.wants_end = lambda: "call" not in header or _has_more(connection, buffer)
        reply, content = self._once(header, frame.body)
        reply["id"] = header.get("id")
        passed = reply.pop("passed", None)
        send(connection, reply, content, passed)
        if passed is not None:
            passed.close()

    def _once(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer; to a call with an id, the one that it has had, if it has."""
        if "call" not in header:
            return self._attempt(header, body)
        try:
            answer = self._memory.recall(header, body)
        except (ValueError, TypeError) as error:
            return {"ok": False, "error": f"not the id of a call: {error}"}, b""
        if answer is None:
            answer = self._attempt(header, body)
            self._memory.keep(header, body, answer)
        return answer

    def _attempt(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return self._perform(header, body)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BashDied) as error:
            missing = isinstance(error, FileNotFoundError)
            text = f"{type(error).__name__}: {error}"
            return {"ok": False, "error": text, "missing": missing}, b""
        finally:
            self._events.client = -1

    def _perform(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        op = header.get("op")
        if op == "call":
            return self._timed(self._tool(header), header)
        if op == "exec":
            return self._timed(self._program(header, body), header)
        if op in ("put", "get"):
            return self._file(op, header, body)
        if op == "end":
            return {"ok": True}, b""
        if op == "listen":
            listener = self._listen(header.get("port") or self._port)
            port = str(listener.getsockname()[1])
            for name, value in (header.get("env") or {}).items():
                self._place.env[name] = value.replace("{port}", port)
            return {"ok": True, "port": listener.getsockname()[1], "passed": listener}, b""
        raise ValueError(f"unknown op {op!r}")

    def _listen(self, usual: int) -> socket.socket:
        """A listener on the loopback; on any free port where something inside has the usual one."""
        for port in (usual, 0):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
                break
            except OSError:
                listener.close()
                if not port:
                    raise
        listener.listen(BACKLOG)
        return listener

    def _file(self, op: str, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        from prorl.tools.server import beneath

        if op == "put":
            beneath.put(self._place.cwd, header["path"], body, header["mode"], header["offset"])
            return {"ok": True}, b""
        limit = min(int(header["max_bytes"]), FRAME_LIMIT // 2)
        size, content = beneath.get(self._place.cwd, header["path"], header["offset"], limit)
        return {"ok": True, "size": size}, content

    def _tool(self, header: dict[str, Any]) -> Callable[[float], dict[str, Any]]:
        name, arguments = str(header.get("tool")), header.get("arguments")
        if name not in self._names:
            raise ValueError(
                "no tool {!r} in this sandbox; there are {}".format(name, ", ".join(self._names))
            )
        if not isinstance(arguments, dict):
            raise ValueError("`arguments` must be an object")
        if name not in self._tools:
            self._tools[name] = self._make(name)
        tool = self._tools[name]
        return lambda until: tool(arguments, until)

    def _program(self, header: dict[str, Any], stdin: bytes) -> Callable[[float], dict[str, Any]]:
        argv = header.get("argv")
        if (
            not isinstance(argv, list)
            or not argv
            or not all(isinstance(word, str) for word in argv)
        ):
            raise ValueError("`argv` must be a list of strings")
        from prorl.tools.server.execute import execute

        return lambda until: execute(self._place, argv, stdin, until)

    def _timed(
        self,
        work: Callable[[float], dict[str, Any]],
        header: dict[str, Any],
    ) -> tuple[dict[str, Any], bytes]:
        begin = time.monotonic()
        result = work(begin + float(header["timeout_s"]))
        output = result.pop("output")
        reply = dict(
            result, ok=True, truncated=output.truncated, duration_s=time.monotonic() - begin
        )
        return reply, output.value()


def _has_more(connection: socket.socket, buffer: FrameBuffer) -> bool:
    """Returns whether a client that hung up sent something behind its call: that it is to end."""
    try:
        unread = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        unread = b""
    return buffer.pending or bool(unread)


def serve(listener_fd: int, status_fd: int, config: dict[str, Any]) -> None:
    """Serve on a listening socket that was inherited; say `ok` on `status_fd` first.

    Never returns normally.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(HOME)
    restrict(config.get("limits", {}), bytes.fromhex(config.get("seccomp", "")))
    keep_descriptors()
    server = make_server(listener_fd, status_fd, config)
    server.begin()
    os.write(status_fd, b"ok\n")
    os.close(status_fd)
    set_dumpable(0)  # before the first call, thus before any code of the agent's
    with Crash():
        server.run()


def make_server(listener_fd: int, status_fd: int, config: dict[str, Any]) -> Server:
    """The server; a tool of a user's that cannot be made is told on `status_fd`, and the end."""
    if "user_tools" in config:
        from prorl.tools.server.user_tool import moved_above_others

        config["user_tools"] = moved_above_others(config["user_tools"])
    try:
        return Server(socket.socket(fileno=listener_fd), config)
    except BadTool as error:
        os.write(status_fd, f"bad tool: {error}".encode("utf-8", "replace")[:4000])
        os._exit(1)


class Crash:
    """Holds the loop: a bug of ours ends the process with its own exit code.

    Nothing of it is written where a client reads.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            os.write(2, f"tool server: {error!r:.300}\n".encode("utf-8", "replace"))
        finally:
            os._exit(EXIT_CRASHED)


def keep_descriptors() -> None:
    """Drops what this process was started with, so that no program that it starts inherits it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)
        except OSError:
            pass  # the one that listed them


def preload() -> None:
    """Import all that is otherwise imported when it is needed.

    For a process that forks servers, whose roots hold none of our files.
    """
    from prorl.tools.server import beneath, execute, terminal, user_tool  # noqa: F401

    for row in CATALOGUE.values():
        row.load()
    terminal.load()
    libc()


def with_image(env: dict[str, str], image: Mapping[str, str]) -> dict[str, str]:
    """The environment that an image asks for (its %environment), with ours over it.

    Its PATH comes before ours. Of its LD_LIBRARY_PATH the folder of Apptainer's is left out.

    >>> image = {"PATH": "/opt/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib:/.singularity.d/libs"}
    >>> with_image({"PATH": "/bin"}, image)
    {'PATH': '/opt/bin:/bin', 'LD_LIBRARY_PATH': '/opt/lib'}
    """
    runtime = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "PS1", "TMOUT", "_")
    variables = {name: value for name, value in image.items() if not name.startswith(runtime)}
    libraries = variables.pop("LD_LIBRARY_PATH", "").split(":")
    if libraries := [path for path in libraries if path and path != APPTAINER_LIBRARIES]:
        variables["LD_LIBRARY_PATH"] = ":".join(libraries)
    path = dict.fromkeys((image.get("PATH", "") + ":" + env["PATH"]).split(":"))
    return {**variables, **env, "PATH": ":".join(filter(None, path))}


def with_variables(env: dict[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with a task's own variables over it, whoever set them before.

    The folders of PATH that it had stay, behind the task's: python3 of an image that has none.

    >>> with_variables({"PATH": "/bin", "HOME": "/root"}, {"PATH": "/own:/bin", "HOME": "/home"})
    {'PATH': '/own:/bin', 'HOME': '/home'}
    """
    path = ":".join(filter(None, (variables.get("PATH"), env.get("PATH"))))
    return {**env, **variables, "PATH": ":".join(dict.fromkeys(path.split(":")))}


def image_world(workdir: str, root: str = "/") -> tuple[str, dict[str, str]]:
    """The folder that the agent works in, made where it is missing as container engines do, and the
    variables of the image's user.
    """
    try:
        with open(root + WORLD_FILE) as file:
            lines = file.read().splitlines()
    except OSError:
        lines = []
    folder, user, home = (lines + [""] * 3)[:3]
    folder = (folder or "/") if workdir == IMAGE_WORKDIR else workdir
    os.makedirs(folder, exist_ok=True)
    name, home = _account(user or "root", home, root)
    return folder, {"HOME": home, "USER": name, "LOGNAME": name}


def _account(user: str, home: str, root: str) -> tuple[str, str]:
    """Name and HOME of a user who is called by name or number."""
    try:
        with open(root + "etc/passwd") as file:
            accounts = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        accounts = []
    for fields in accounts:
        if len(fields) >= 6 and user in (fields[0], fields[2]):
            return fields[0], home or fields[5] or "/"
    return user, home or "/root"


def main() -> None:
    """`python3 server.pyz '{"listener": 3, "status": 4, ...}'`."""
    config = loads(sys.argv[1])
    if config.pop("with_image", False):
        config["env"] = with_image(config["env"], os.environ)
    if workdir := config.pop("workdir", ""):
        config["workspace"], own = image_world(workdir)
        config["env"].update(own)
    serve(config.pop("listener"), config.pop("status"), config)


if __name__ == "__main__":
    main()
