"""A process tells its parent that its event loop turns: one byte a second into a pipe.

    read_end, write_end = os.pipe()                       # the parent
    Popen(..., pass_fds=(write_end,), env={VARIABLE: str(write_end)})
    heartbeat.start()                                     # the child, on its loop

Silence means that the loop, which owns all of the process's state, does not turn: the process is
stopped, hangs in a call, or spins. Its parent ends it then, because everything survives a death
and nothing survives a freeze. A process without a parent that listens beats for nobody.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

VARIABLE: Final = "PRORL_HEARTBEAT_FD"
BEAT_S: Final = 1.0


def start() -> None:
    """Beat on the running loop for as long as it turns, if the parent gave a pipe. Once."""
    text = os.environ.pop(VARIABLE, "")
    if text:
        pipe = int(text)
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
        _beat(asyncio.get_running_loop(), pipe)


def _beat(loop: asyncio.AbstractEventLoop, pipe: int) -> None:
    try:
        os.write(pipe, b".")
    except BlockingIOError:
        pass  # the parent is the one that is stopped; it finds the pipe full of beats
    except BrokenPipeError:
        return
    loop.call_later(BEAT_S, _beat, loop, pipe)
