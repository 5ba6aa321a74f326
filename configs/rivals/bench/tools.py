"""The rivals of `bench tools`, each the real program driven as its users drive it.

Each has the tuning that we get, and gives the milliseconds from its start to its first answer with
those of its calls. A rival that is not installed gives None and its reason is told in the row.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prorl.bench.meter import times_ms

PRORL_POLL_S = 0.01
"""ProRL-Agent-Server, efficient_bash.py: select for 10 ms, then sleep 10 ms."""
REX_S = 30.0
"""Its own default for the start, one second, is too short for a loaded machine."""
PTY_BASH = ["bash", "--norc", "--noprofile", "--noediting", "-i"]


class Measured(NamedTuple):
    start_ms: float
    calls_ms: list[float]


def _measured(began: float, once: Callable[[], object], repeats: int) -> Measured:
    once()
    return Measured((time.perf_counter() - began) * 1e3, times_ms(once, repeats))


def poll_10ms_pty(repeats: int) -> Measured:
    """A pty shell whose reader selects for 10 ms and sleeps 10 ms, as EfficientBash does."""
    began = time.perf_counter()
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

        return _measured(began, once, repeats)
    finally:
        os.close(fd)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


async def swe_rex_local(repeats: int) -> Measured | None:
    """SWE-ReX's local runtime: a bash session over pexpect, as SWE-agent's tools use it."""
    try:
        from swerex.exceptions import SwerexException
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime
    except ImportError:
        return None
    began, started = time.perf_counter(), 0.0
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
                started = started or time.perf_counter()
    finally:
        await runtime.close()
    return Measured((started - began) * 1e3, found[1:]) if len(found) > 1 else None


DOCKER_IMAGE = "debian:bookworm-slim"


def docker_exec(repeats: int) -> Measured | None:
    """`docker exec CONTAINER bash -c true`, a container a rollout, as mini-swe-agent does."""
    if shutil.which("docker") is None:
        return None
    began = time.perf_counter()
    run = ["docker", "run", "--detach", "--rm", "--network", "none", DOCKER_IMAGE, "sleep", "2h"]
    started = subprocess.run(run, capture_output=True, text=True, check=False)
    if started.returncode:
        return None
    name = started.stdout.strip()

    def once() -> None:
        subprocess.run(["docker", "exec", name, "bash", "-c", "true"], check=True)

    try:
        return _measured(began, once, repeats)
    finally:
        subprocess.run(["docker", "kill", name], capture_output=True, check=False)


TMUX_AGENT_POLL_S = 0.5
"""OpenHands, openhands/runtime/utils/bash.py: POLL_INTERVAL."""
TMUX_AGENT_CLEAR_S = 0.1
"""OpenHands clears the screen before each command and sleeps this long."""


@contextlib.contextmanager
def _tmux() -> Iterator[Any]:
    """A libtmux pane of 1000 x 1000 on a server of its own, as OpenHands makes it.

    It is None when tmux or libtmux is missing.
    """
    try:
        import libtmux
    except ImportError:
        yield None
        return
    if shutil.which("tmux") is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = libtmux.Server(socket_path=f"{folder}/t")
        session = server.new_session(
            session_name="bench", window_command="bash --norc --noprofile", x=1000, y=1000
        )
        try:
            yield session.active_window.active_pane
        finally:
            server.kill()


def tmux_busy_poll(repeats: int) -> Measured | None:
    """send-keys and capture-pane as fast as the client goes: the floor of tmux."""
    began = time.perf_counter()
    with _tmux() as pane:
        if pane is None:
            return None
        pane.send_keys("export PS1='<%'", enter=True)
        time.sleep(0.1)
        serial = [0]

        def once() -> None:
            serial[0] += 1
            pane.send_keys(f"true; clear; echo done{serial[0]}e", enter=True)
            while not any(line.startswith(f"done{serial[0]}e") for line in pane.capture_pane()):
                pass

        return _measured(began, once, repeats)


JSON_PROMPT = (
    'export PROMPT_COMMAND=\'export PS1="###PS1JSON###{\\"exit_code\\":'
    " $?}###PS1END###\"'; export PS2=''"
)


def tmux_as_agents(repeats: int) -> Measured | None:
    """OpenHands' BashSession: clear the screen, sleep, send the command, look for the prompt.

    It looks for the prompt's JSON each half second.
    """
    began = time.perf_counter()
    with _tmux() as pane:
        if pane is None:
            return None
        pane.send_keys(JSON_PROMPT, enter=True)
        time.sleep(0.1)

        def prompts() -> int:
            return "\n".join(pane.capture_pane()).count("###PS1END###")

        def once() -> None:
            pane.send_keys("C-l", enter=False)
            time.sleep(TMUX_AGENT_CLEAR_S)
            pane.cmd("clear-history")
            before = prompts()
            pane.send_keys("true", enter=True)
            while prompts() <= before:
                time.sleep(TMUX_AGENT_POLL_S)

        return _measured(began, once, repeats)
