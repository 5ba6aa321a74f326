"""Runs the tests of a task in a fresh EVAL sandbox, and says what came out where they cannot reach.

A program for `python3 -I -c`, shipped as text: standard library, Python 3.8 or newer.

    stdin: one JSON object {"nonce", "command", "limit_s", "witness", "harness", "environment",
    "report", "max_log_bytes", "watched"}
    stdout: `NONCE {"digest", "exit_code", "timed_out"}`; all else is in the file `report`

The tests are a child with pipes of its own. This process is not dumpable, so that its memory and
descriptors, standard output among them, are closed to processes of the same uid; it adopts what
the tests leave behind and ends it before it writes. The report is a file that they might still
have changed, so its digest goes by standard output. What pytest and unittest saw comes over a
socket (`witness.py`), whose key is given once to each session. The kernel tells which process has
sent a line: a session is one process that the command started, and no other one is heard.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from typing import Any

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
GRACE_S = 5.0
MAX_WATCHED = 5000
CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel tells them of who has sent."""
MAX_SAID_BYTES = 64 << 20
"""More is not listened to: the session counts as one that never ended."""


def hide() -> None:
    """Close this process to others of the same uid, and adopt orphans (Linux)."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Sessions:
    """What witnesses say: lines that begin with the key of the session that is open."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._key = b""
        self._said: dict[int, bytes] = {}
        self._num_bytes = 0
        self._speakers: list[int] = []
        self.top = 0
        """Process of the command, whose descendants may be sessions."""
        self.found: list[dict[str, Any]] = []
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._offer()

    def _offer(self) -> None:
        """A fresh key for the next session."""
        self._key = os.urandom(16).hex().encode()
        try:
            self._end.sendall(self._key)
        except BrokenPipeError:  # nobody is left who could report
            self._key = b""

    def hear(self) -> bool:
        """Read what is there; False at the end."""
        try:
            data, about, _, _ = self._end.recvmsg(1 << 16, socket.CMSG_SPACE(CREDENTIALS.size))
        except ConnectionResetError:  # every other end was closed before it read its key
            return False
        pid = CREDENTIALS.unpack(about[0][2])[0] if about else 0
        self._num_bytes += len(data)
        said = self._said.pop(pid, b"") + (data if self._num_bytes <= MAX_SAID_BYTES else b"")
        *lines, rest = said.split(b"\n")
        if rest:
            self._said[pid] = rest
        for line in lines:
            if self._key and line.startswith(self._key):
                try:
                    self._take(pid, message_of(line[len(self._key) :]))
                except (ValueError, RecursionError):  # no witness: nobody is heard any longer
                    self._key = b""
                    self._end.shutdown(socket.SHUT_RDWR)
                    self.found.append({"ended": False, "outcomes": {}})
        return bool(data)

    def _take(self, pid: int, message: dict[str, Any]) -> None:
        """What a session's own process says. Raises ValueError for another one."""
        say = message.pop("say", "")
        if say == "start":
            self._begin(pid)
            return
        if not self._speakers or pid != self._speakers[-1]:
            raise ValueError("a process that is no session's")
        session = self.found[-1]
        told = session["outcomes"]
        for name, good in message.pop("outcomes", {}).items():
            told[name] = good and told.get(name, True)
        suspects = [*session.get("suspects", []), *message.pop("suspects", [])]
        session.update({**message, "suspects": suspects})
        if say == "bye":
            session["ended"] = True
            self._offer()
        else:
            session["told"] = say == "told"

    def _begin(self, pid: int) -> None:
        """Open a session for a process of the command's. Raises ValueError for another one."""
        if not descends(pid, self.top, self._speakers):
            raise ValueError("a process that is no session's")
        self._speakers.append(pid)
        self.found.append({"ended": False, "told": False, "outcomes": {}})
        self._end.sendall(b"go")

    def hear_rest(self) -> None:
        """Hear what has been said, and wait for nobody."""
        while select.select([self._end], [], [], 0)[0] and self.hear():
            pass


def message_of(line: bytes) -> dict[str, Any]:
    """What a witness says in a line. Raises ValueError for what none says, RecursionError."""
    message = json.loads(line.decode("utf-8", "replace"))
    if not isinstance(message, dict) or not isinstance(message.get("outcomes", {}), dict):
        raise ValueError("no message of a witness")
    return message


def environment(job: dict[str, Any], witness_fd: int, place: str) -> dict[str, str]:
    """The tests' own, with the witness in front."""
    env = {**os.environ, **job["environment"]}
    env["PRORL_WITNESS"] = str(witness_fd)
    for name, ours, between in (
        ("PYTHONPATH", place, ":"),
        ("PYTEST_ADDOPTS", "-p prorl_pytest", " "),
    ):
        kept = env.get(name, "")
        env[name] = ours + between + kept if kept else ours
    return env


def with_witness(command: str, place: str) -> str:
    """A command that sets PYTHONPATH of its own, with the witness kept in front."""
    return re.sub(r"(?<![\w$])PYTHONPATH=([\"']?)", rf"PYTHONPATH=\1{place}:", command)


def module_file(content: bytes) -> int:
    """The witness as a file that nobody can change, by a descriptor that children inherit."""
    fd = os.memfd_create("witness", 0)
    os.write(fd, content)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return read_only


def stamps(paths: list[str]) -> dict[str, tuple[int, int]]:
    """What tells of files, and of Python files below folders, whether somebody has written them.

    By path (inode, time of the last change, which no program can set); at most MAX_WATCHED.
    """
    found: dict[str, tuple[int, int]] = {}
    for top in paths:
        inner = [top]
        if os.path.isdir(top):
            walk = os.walk(top)
            inner = [os.path.join(place, one) for place, _, names in walk for one in names]
            inner = [path for path in inner if path.endswith(".py")]
        for path in inner[: MAX_WATCHED - len(found)]:
            try:
                about = os.lstat(path)
            except OSError:
                continue
            found[path] = (about.st_ino, about.st_ctime_ns)
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the tests, listen until they end or time is up, end what is left."""
    before = stamps(job["watched"])
    ours, theirs = socket.socketpair()
    module = module_file(base64.b64decode(job["witness"]))
    sessions = Sessions(ours)
    child = start(job, theirs.fileno(), module)
    sessions.top = child.pid
    theirs.close()
    os.close(module)
    log, timed_out = listen(child, ours, sessions, job)
    end_all(child)
    return {
        "touched": touched(before, stamps(job["watched"])),
        "workspace": os.getcwd(),
        "exit_code": child.returncode,
        "timed_out": timed_out,
        "log": log.decode("utf-8", "replace"),
        "sessions": sessions.found,
    }


def start(job: dict[str, Any], witness_fd: int, module: int) -> subprocess.Popen[bytes]:
    """The command in a session of its own, with the witness and its end of the socket."""
    place = f"/proc/self/fd/{module}"
    return subprocess.Popen(
        ["bash", "-c", with_witness(job["command"], place)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(job, witness_fd, place),
        pass_fds=(witness_fd, module),
        start_new_session=True,
    )


def touched(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Which files were written between two looks at them, in words."""
    changed = [path for path, stamp in before.items() if after.get(path) != stamp]
    return [f"wrote {path} while the tests ran" for path in changed]


def listen(
    child: subprocess.Popen[bytes], ours: socket.socket, sessions: Sessions, job: dict[str, Any]
) -> tuple[bytes, bool]:
    """(end of what the tests printed, whether time was up)."""
    assert child.stdout is not None
    until = time.monotonic() + job["limit_s"]
    log, keep = bytearray(), job["max_log_bytes"]
    output = child.stdout.fileno()
    open_ends = {output, ours.fileno()}
    ended_at = 0.0
    while True:
        now = time.monotonic()
        ended_at = ended_at or (0.0 if child.poll() is None else now)
        if now >= until or (ended_at and (output not in open_ends or now >= ended_at + 1.0)):
            break
        for fd in select.select(list(open_ends), [], [], min(0.2, until - now))[0]:
            is_open = read_log(output, log, keep) if fd == output else sessions.hear()
            if not is_open:
                open_ends.discard(fd)
    sessions.hear_rest()
    return bytes(log[-keep:]), child.poll() is None


def read_log(fd: int, log: bytearray, keep: int) -> bool:
    """Read what is there and forget what is long past; False at the end."""
    data = os.read(fd, 1 << 16)
    log += data
    if len(log) > 2 * keep:
        del log[:-keep]
    return bool(data)


def end_all(child: subprocess.Popen[bytes]) -> None:
    """End every descendant, the ones that fled into sessions of their own included."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        left = children()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        child.poll()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not left:
            return
        time.sleep(0.01)


def children() -> list[int]:
    """Direct children; those of theirs become ours when they end."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        state, parent = state_of(int(name))
        if parent == os.getpid() and state != "Z":
            found.append(int(name))
    return found


def state_of(pid: int) -> tuple[str, int]:
    """(state of a process, its parent); parent 0 where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)


def descends(pid: int, top: int, without: list[int]) -> bool:
    """Whether a process comes from `top` by parents that live, none of them one of `without`:
    what a session has left behind is no session.
    """
    while pid and pid not in without:
        if pid == top:
            return True
        pid = state_of(pid)[1]
    return False


def write(path: str, content: bytes) -> None:
    """A fresh file, whatever lies there."""
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "xb") as file:
        file.write(content)


def main() -> int:
    """Read the job, run it, write the report, say its digest."""
    hide()
    job = json.loads(sys.stdin.read())
    found = run(job)
    content = zlib.compress(json.dumps(found).encode())
    try:
        write(job["report"], content)
    except OSError:  # the tests have taken its folder: the digest fits nothing then
        pass
    digest = hashlib.sha256(content).hexdigest()
    print(job["nonce"] + " " + json.dumps({"digest": digest}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
