"""The rivals of `bench tools`, each the real program driven as its users drive it.

Each has the tuning that we get. A rival that is not installed gives None and its reason is told in
the row.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from prorl.bench.tools import times_ms

PRORL_POLL_S = 0.01
"""ProRL-Agent-Server, efficient_bash.py: select for 10 ms, then sleep 10 ms."""
REX_S = 30.0
"""Its own default for the start, one second, is too short for a loaded machine."""
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


def tmux_busy_poll(repeats: int) -> list[float] | None:
    """send-keys and capture-pane as fast as the client goes: the floor of tmux."""
    with _tmux() as pane:
        if pane is None:
            return None
        pane.send_keys("export PS1='<%'", enter=True)
        time.sleep(0.5)
        serial = [0]

        def once() -> None:
            serial[0] += 1
            pane.send_keys(f"true; clear; echo done{serial[0]}e", enter=True)
            while not any(line.startswith(f"done{serial[0]}e") for line in pane.capture_pane()):
                pass

        return times_ms(once, repeats)


JSON_PROMPT = (
    'export PROMPT_COMMAND=\'export PS1="###PS1JSON###{\\"exit_code\\":'
    " $?}###PS1END###\"'; export PS2=''"
)


def tmux_as_agents(repeats: int) -> list[float] | None:
    """OpenHands' BashSession: clear the screen, sleep, send the command, look for the prompt.

    It looks for the prompt's JSON each half second.
    """
    with _tmux() as pane:
        if pane is None:
            return None
        pane.send_keys(JSON_PROMPT, enter=True)
        time.sleep(1.0)

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

        return times_ms(once, repeats)
