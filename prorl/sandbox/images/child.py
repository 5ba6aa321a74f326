"""One image is made in one child process, which ends every tool that makes it when it ends.

spython has no time-out, no way to be stopped and shares its standard streams; Apptainer
and buildah start dozens of processes. So the work (`maker.py`) runs in `python -m
prorl.sandbox.images.child`: all that they start becomes this child's (subreaper), and the child
kills all of it on SIGTERM, which it gets at the time-out, with cancellation, and when its parent
dies in whatever way.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from prorl.errors import ProrlError, StorageError, UserError
from prorl.linux import calls, guard
from prorl.linux.python_path import python_path
from prorl.sandbox.images.dockerfile import STORE_VARIABLES
from prorl.sandbox.images.registry import Image, Registry
from prorl.waits import wait_limit_s

TAIL_BYTES = 16 << 10
"""The limit of what tools print: the reason is looked for in it."""
END_S = wait_limit_s("image.end")
FULL = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
"""The words of a tool when the machine is at fault and not the image."""
LAST_LINES = 4
"""A build's last line only says which step failed."""
MARKS = ("FATAL ERROR", "FATAL", "ERROR", "E: ", "error:")
PASSED_ON = (
    "PATH",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REGISTRY_AUTH_FILE",
    "DOCKER_CONFIG",
    "XDG_RUNTIME_DIR",
    "PIP_CONFIG_FILE",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_CERT",
    "NPM_CONFIG_REGISTRY",
    "NPM_CONFIG_USERCONFIG",
    "NODE_EXTRA_CA_CERTS",
)
"""All that a tool learns of the caller's environment: how to reach a mirror of packages."""
BUILDING = b"\n"
"""Before the reply: a Dockerfile's build has begun, so that time which runs out is its fault. Time
that passed before that went to another builder, or to a store.
"""


Show = Callable[[bytes], None]
"""Gets what the tools print."""


async def make_image(
    root: Path, job: dict[str, str], timeout_s: float, show: Show = lambda _: None
) -> Image:
    """Run one job of `maker.py` in a child.

    Raises UserError for a wrong source, StorageError where tools, space or time are short here.
    """
    with tempfile.TemporaryFile() as reply:
        arguments = (str(os.getpid()), str(reply.fileno()), str(root), json.dumps(job))
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "prorl.sandbox.images.child", *arguments),
            env=_environment(job),
            pass_fds=(reply.fileno(),),
            start_new_session=True,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
        )
        saying = asyncio.create_task(_show_and_keep_tail(child, show))
        try:
            async with asyncio.timeout(timeout_s):
                await child.wait()
        except TimeoutError:
            text = f"{job['source']}: not made within {timeout_s:g} s"
            if not os.pread(reply.fileno(), 1, 0):
                raise StorageError(text) from None
            Registry(root).note_failure(job["name"], text)
            raise UserError(text, "a build that ends in that time") from None
        finally:
            await _end(child)
            tail = (await saying).decode("utf-8", "replace")
        reply.seek(0)
        try:
            return _answer(reply.read().strip(), tail, job["source"])
        except UserError as error:
            if job["do"] == "dockerfile":
                Registry(root).note_failure(job["name"], str(error))
            raise


def _environment(job: dict[str, str]) -> dict[str, str]:
    has_store = "store" in json.loads(job.get("settings") or "{}")
    passed_on = {
        name: text
        for name, text in os.environ.items()
        if name in PASSED_ON or (has_store and name.startswith(STORE_VARIABLES))
    }
    return {**passed_on, **python_path(), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


async def _show_and_keep_tail(
    child: asyncio.subprocess.Process, show: Callable[[bytes], None]
) -> bytes:
    assert child.stdout is not None
    tail = b""
    while data := await child.stdout.read(4096):
        show(data)
        tail = (tail + data)[-TAIL_BYTES:]
    return tail


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a child by TERM, so that it takes everything along.

    Then KILL to all that is in its process group, for a child that was killed itself.
    """
    if child.returncode is None:
        child.terminate()
        try:
            async with asyncio.timeout(END_S):
                await child.wait()
        except TimeoutError:
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    await child.wait()


def _answer(reply: bytes, tail: str, source: str) -> Image:
    if not reply:
        raise StorageError(f"{source}: the process that made it was killed: {reason_in(tail)}")
    fields = json.loads(reply)
    if "image" in fields:
        listed = {name: tuple(fields["image"][name]) for name in ("names", "layers")}
        return Image(**{**fields["image"], **listed})
    message = fields["error"] if not fields["tool"] else f"{fields['error']}: {reason_in(tail)}"
    mistake = fields["mistake"] and not (fields["tool"] and FULL.search(tail))
    raise (
        UserError(message, fields["expected"], fields["mend"]) if mistake else StorageError(message)
    )


def reason_in(text: str) -> str:
    """The line of a tool's output that says why it failed.

    It is the last of the gravest kind that there is, else the last few of all.

    >>> reason_in("INFO: starting\\nFATAL:   no such file\\nERROR: cleaning up\\n")
    'FATAL: no such file'
    >>> reason_in('Unknown instruction: "RAN" &imagebuilder.Step{Env:[]}\\n\\x1b[31mred')
    'Unknown instruction: "RAN" | ?[31mred'
    """
    lines = [_plain(line) for line in text.splitlines() if line.strip()]
    for mark in MARKS:
        if telling := [line for line in lines if mark in line]:
            return telling[-1][:500]
    return " | ".join(lines[-LAST_LINES:] or ["it said nothing"])[-500:]


def _plain(line: str) -> str:
    """A line without control characters, and without what buildah prints of its own variables."""
    words = " ".join(line.partition("&imagebuilder.Step{")[0].split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)


# ---- in the child


def main() -> None:
    """`python -m prorl.sandbox.images.child PARENT_PID REPLY_FD REGISTRY JOB_JSON`."""
    from dataclasses import asdict

    from prorl.sandbox.images.layers import ToolFailed
    from prorl.sandbox.images.maker import make

    parent, reply_fd, root, job = sys.argv[1:]
    _become_subreaper(int(parent))
    os.set_inheritable(int(reply_fd), False)
    reply: dict[str, object]
    try:
        image = make(
            Registry(Path(root)), json.loads(job), lambda: os.write(int(reply_fd), BUILDING)
        )
        reply = {"image": asdict(image)}
    except UserError as error:
        reply = _refusal(error.problem, error.expected, error.hint, mistake=True)
    except ToolFailed as error:
        reply = _refusal(str(error), mistake=error.mistake, tool=True)
    except (ProrlError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reply = _refusal(f"{error}; {Registry(Path(root)).full()}" if full else str(error))
    os.write(int(reply_fd), json.dumps(reply).encode())
    guard.end_all()


def _refusal(
    error: str, expected: str = "", mend: str = "", *, mistake: bool = False, tool: bool = False
) -> dict[str, object]:
    """Returns the refusal that `_answer` reads; `mistake`: the source's, `tool`: its words tell the
    reason.
    """
    return {"error": error, "expected": expected, "mend": mend, "mistake": mistake, "tool": tool}


def _become_subreaper(parent: int) -> None:
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _stop)
    calls.die_with_parent(signal.SIGTERM, parent)


def _stop(_number: int, _frame: object) -> NoReturn:
    guard.end_all()
    os._exit(1)


if __name__ == "__main__":
    main()
