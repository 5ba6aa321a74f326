"""tmux as other agents drive it: a rival of `bench tools` where tmux and libtmux are installed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from prorl.bench.tool_rivals import times_ms

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
