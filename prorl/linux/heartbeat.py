"""A process tells its parent that its event loop turns: one byte a second into a pipe.

    read_end, write_end = os.pipe()                       # the parent
    Popen(..., pass_fds=(write_end,), env={VARIABLE: str(write_end)})
    heartbeat.start()                                     # the child, on its loop

Silence means that the loop, which owns all of the process's state, does not turn. Its parent ends
it then, because everything survives a death and nothing survives a freeze. After SAYS_S its
threads' tracebacks are on stderr: that takes no lock of Python's, which may be what hangs.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
from typing import Final

from prorl.timing import BEAT_S
from prorl.waits import wait_limit_s

VARIABLE: Final = "PRORL_HEARTBEAT_FD"
SAYS_S = wait_limit_s("process.stacks")


def start() -> None:
    """Beat on the running loop for as long as it turns, if the parent gave a pipe. Once."""
    text = os.environ.pop(VARIABLE, "")
    if text:
        pipe = int(text)
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
        _beat(asyncio.get_running_loop(), pipe)


def _beat(loop: asyncio.AbstractEventLoop, pipe: int) -> None:
    faulthandler.dump_traceback_later(SAYS_S)
    try:
        os.write(pipe, b".")
    except BlockingIOError:
        pass  # the parent is the one that is stopped; it finds the pipe full of beats
    except BrokenPipeError:
        faulthandler.cancel_dump_traceback_later()
        return
    loop.call_later(BEAT_S, _beat, loop, pipe)
