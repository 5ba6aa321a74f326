"""Compaction in a process of its own: it takes neither the store's loop nor Python's lock.

`python -m prorl.storage.helper RUN` runs at low priority and ends with whoever started it.

`Helper` is the store's side: one compaction at a time, whichever run it is for.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from prorl.errors import ConflictError, ProrlError

log = logging.getLogger("prorl.storage")

NICE = 10


class Helper:
    """Starts helpers, one at a time. Cancelling a call ends its helper."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._one = asyncio.Semaphore(1)

    async def tidy(self, where: str, *, everything: bool) -> bool:
        """Compact a run and remove what was replaced long enough ago; whether that worked.

        A failure costs space and speed, nothing else: it is logged.
        """
        command = ["-m", __spec__.name, where, "--grace-s", str(self._grace_s)]
        command += ["--everything"] if everything else []
        async with self._one:
            status, said = await _run_python(*command)
        if status:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            about = {"run": where, "status": status, "said": last}
            log.warning("compaction failed", extra=about)
        return status == 0


async def _run_python(*arguments: str) -> tuple[int | None, bytes]:
    """Exit status of a Python process and what it said on stderr; none outlives the call."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL, stderr=-1
    )
    try:
        _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode, said


def main() -> int:
    """Compact, then collect. 0 also when somebody else is at it."""
    from prorl.linux.calls import die_with_parent
    from prorl.storage.collect import collect
    from prorl.storage.compact import compact
    from prorl.storage.layout import RunDir

    given = _arguments()
    die_with_parent(signal.SIGKILL)
    os.nice(NICE)
    run = RunDir(given.where)
    try:
        compact(run, everything=given.everything)
        collect(run, grace_s=given.grace_s)
    except ConflictError:
        return 0
    except ProrlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prorl.storage.helper")
    parser.add_argument("where")
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--everything", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
