"""Runs the tests of a task in a fresh EVAL sandbox, and says what came out where they cannot reach.

A program for `python3 -I -c`, shipped as text: standard library, Python 3.8 or newer.

    stdin: one JSON object {"nonce", "command", "limit_s", "witness", "environment", "report",
    "max_log_bytes"}
    stdout: `NONCE {"digest"}`; all else is in the file `report`

The tests are a child with pipes of its own. This process is not dumpable, so that its memory and
descriptors, standard output among them, are closed to processes of the same uid; it adopts what
the tests leave behind and ends it before it writes.
No run can remember another: files go with the workspace, System V objects at the end, and POSIX
queues have no bytes. The report is a file that they might still
have changed, so its digest goes by standard output. What pytest and unittest saw comes over a
socket (`witness.py`), and a failure that was told once stays one.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from typing import Any

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
GRACE_S = 5.0
MAX_REPORTS_BYTES = 64 << 20
"""More is not listened to."""


def hide() -> None:
    """Close this process to others of the same uid, and adopt orphans (Linux)."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class WitnessReports:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""
        self._num_bytes = 0
        self.is_there = False
        self.outcomes: dict[str, bool] = {}

    def hear(self) -> bool:
        data = self._end.recv(1 << 16)
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_REPORTS_BYTES:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)
        return bool(data)

    def _take(self, line: bytes) -> None:
        """Takes a line of the witness; a line that it does not understand is nothing."""
        try:
            outcomes = json.loads(line.decode("utf-8", "replace")).get("outcomes", {})
            verdicts = {str(name): bool(good) for name, good in outcomes.items()}
        except (ValueError, AttributeError, RecursionError):
            return
        self.is_there = True
        for name, good in verdicts.items():
            self.outcomes[name] = good and self.outcomes.get(name, True)

    def hear_rest(self) -> None:
        while select.select([self._end], [], [], 0)[0] and self.hear():
            pass


def environment(job: dict[str, Any], witness_fd: int, place: str) -> dict[str, str]:
    env = {**os.environ, **job["environment"]}
    env["PRORL_WITNESS"] = str(witness_fd)
    for name, ours, between in (
        ("PYTHONPATH", place, ":"),
        ("PYTEST_ADDOPTS", "-p prorl_pytest", " "),
    ):
        inherited = env.get(name, "")
        env[name] = ours + between + inherited if inherited else ours
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


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the tests, listen until they end or time is up, end what is left."""
    ours, theirs = socket.socketpair()
    module = module_file(base64.b64decode(job["witness"]))
    reports = WitnessReports(ours)
    child = start(job, theirs.fileno(), module)
    theirs.close()
    os.close(module)
    log, timed_out = listen(child, ours, reports, job)
    end_all(child)
    forget()
    return {
        "timed_out": timed_out,
        "log": log.decode("utf-8", "replace"),
        "is_witnessed": reports.is_there,
        "outcomes": reports.outcomes,
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


def listen(
    child: subprocess.Popen[bytes],
    ours: socket.socket,
    reports: WitnessReports,
    job: dict[str, Any],
) -> tuple[bytes, bool]:
    """Returns (end of what the tests printed, whether time was up)."""
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
            is_open = read_log(output, log, keep) if fd == output else reports.hear()
            if not is_open:
                open_ends.discard(fd)
    reports.hear_rest()
    return bytes(log[-keep:]), child.poll() is None


def read_log(fd: int, log: bytearray, keep: int) -> bool:
    """Read what is there and forget what is long past; False at the end."""
    data = os.read(fd, 1 << 16)
    log += data
    if len(log) > 2 * keep:
        del log[:-keep]
    return bool(data)


def forget() -> None:
    """Remove what outlives processes and files: System V memory, queues and semaphores."""
    libc = ctypes.CDLL(None)
    for kind, remove in (("shm", libc.shmctl), ("msg", libc.msgctl), ("sem", libc.semctl)):
        try:
            with open(f"/proc/sysvipc/{kind}") as file:
                numbers = [int(line.split()[1]) for line in file.readlines()[1:]]
        except (OSError, ValueError, IndexError):
            continue
        for number in numbers:
            remove(number, 0, 0, 0)  # IPC_RMID, by the order that semctl has, too


def end_all(child: subprocess.Popen[bytes]) -> None:
    """End every descendant, the ones that fled into sessions of their own included."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        pids = children()
        for pid in pids:
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
        if not pids:
            return
        time.sleep(0.01)


def children() -> list[int]:
    """Returns direct children; those of theirs become ours when they end."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        state, parent = state_of(int(name))
        if parent == os.getpid() and state != "Z":
            pids.append(int(name))
    return pids


def state_of(pid: int) -> tuple[str, int]:
    """(state of a process, its parent); parent 0 where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)


def write(path: str, content: bytes) -> None:
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "xb") as file:
        file.write(content)


def main() -> int:
    hide()
    job = json.loads(sys.stdin.read())
    # a POSIX queue would outlive the run, and no list of them can be read
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    report = run(job)
    content = zlib.compress(json.dumps(report).encode())
    try:
        write(job["report"], content)
    except OSError:  # the tests have taken its folder: the digest fits nothing then
        pass
    digest = hashlib.sha256(content).hexdigest()
    print(job["nonce"] + " " + json.dumps({"digest": digest}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
