"""The rivals of `bench tools`, each the real program driven as its users drive it.

Each has the tuning that we get. A rival that is not installed gives None and its reason is told in
the row.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

PRORL_POLL_S = 0.01
"""ProRL-Agent-Server, efficient_bash.py: select for 10 ms, then sleep 10 ms."""
REX_S = 30.0
"""Its own default for the start, one second, is too short for a loaded machine."""
ECHO = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1); print("ready", flush=True)
c, _ = s.accept()
while (data := c.recv(65536)): c.sendall(data)
"""


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Wall milliseconds of each of `repeats` runs, after one that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


CALL = json.dumps(
    {"id": 1, "op": "call", "tool": "bash", "arguments": {"command": "true"}, "timeout_s": 5}
).encode()


def uds_echo(repeats: int) -> list[float]:
    """JSON there and back over a Unix socket between two processes: the floor of any tool call."""
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-c", ECHO, f"{folder}/s"], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{folder}/s")

            def once() -> None:
                client.sendall(CALL)
                json.loads(client.recv(65536))

            found = times_ms(once, repeats)
        server.wait()
        server.stdout.close()
    return found


LOOP = (
    "for ((i = 0; i <= {}; i++)); do a=$EPOCHREALTIME; /bin/true; b=$EPOCHREALTIME; echo $a $b;"
    " done"
)


def fork_exec(repeats: int) -> list[float]:
    """What it costs a bash to fork, run `/bin/true` and wait, by its own clock.

    Nothing is between it and the program.
    """
    command = ["bash", "--norc", "--noprofile", "-c", LOOP.format(repeats)]
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env={"PATH": os.environ["PATH"]}
    ).stdout.split()
    stamps = [float(word.replace(b",", b".")) * 1e3 for word in lines]
    return [end - begin for begin, end in zip(stamps[2::2], stamps[3::2], strict=True)]


PTY_BASH = ["bash", "--norc", "--noprofile", "--noediting", "-i"]


def poll_10ms_pty(repeats: int) -> list[float]:
    """A pty shell whose reader selects for 10 ms and sleeps 10 ms, as EfficientBash does."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe("bash", PTY_BASH, {"PATH": os.environ["PATH"], "PS1": "", "TERM": "dumb"})
    try:

        def once() -> None:
            os.write(fd, b"true; printf '\\036%d\\036' $?\n")
            seen = b""
            while b"\x1e0\x1e" not in seen:
                if select.select([fd], [], [], PRORL_POLL_S)[0]:
                    seen += os.read(fd, 65536)
                time.sleep(PRORL_POLL_S)

        time.sleep(0.2)
        return times_ms(once, repeats)
    finally:
        os.close(fd)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


async def swe_rex_local(repeats: int) -> list[float] | None:
    """SWE-ReX's local runtime: a bash session over pexpect, as SWE-agent's tools use it."""
    try:
        from swerex.exceptions import SwerexException
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime
    except ImportError:
        return None
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=REX_S))
    found = []
    try:
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            # it has time-outs within that no caller sets; on a loaded machine they fail
            with contextlib.suppress(SwerexException):
                await runtime.run_in_session(BashAction(command="true", timeout=REX_S))
                found.append((time.perf_counter() - begin) * 1e3)
    finally:
        await runtime.close()
    return found[1:] or None
