"""Compaction in a helper (`prorl/helper`): it takes neither the store's loop nor Python's lock."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from prorl.errors import ConflictError, ProrlError
from prorl.helper.child import Answer, serve
from prorl.helper.pool import pool
from prorl.helper.process import HelperError, HelperProgram
from prorl.storage.files.layout import RunDir
from prorl.storage.files.objects import failures
from prorl.storage.files.runs import is_url
from prorl.storage.keep.compact import collect, compact, remove_dead

log = logging.getLogger("prorl.storage")

PROGRAM = HelperProgram(__spec__.name, wall_s=6 * 3600.0, memory_bytes=0, most=1, nice=10)
"""One compaction at a time, whichever run it is for."""


async def tidy(where: str, grace_s: float, *, everything: bool) -> bool:
    """Compact a run and remove what was replaced `grace_s` ago; whether that worked. A failure
    costs space and speed, nothing else: it is logged. Cancelling a call ends it; wherever it ends,
    no pack stays that nobody names. A run that was deleted needs none, and does not wait for those
    of others: runs are closed as they are deleted, however busy the machine is.
    """
    if _is_deleted(where):
        return False
    done = False
    try:
        helpers = await pool(PROGRAM)
        await helpers.ask((where, grace_s, everything), label="compaction")
        done = True
    except (HelperError, ProrlError) as error:
        log.warning("compaction failed", extra={"run": where, "said": str(error)})
    finally:
        if not done:
            await asyncio.to_thread(_clear, where)
    return done and not _is_deleted(where)


def _is_deleted(where: str) -> bool:
    """Returns whether a folder has gone. In an object store no service deletes runs."""
    return not is_url(where) and not Path(where).exists()


def _clear(where: str) -> None:
    try:
        remove_dead(RunDir(where))
    except failures() as error:
        log.warning("packs of an ended compaction stay", extra={"run": where, "said": str(error)})


def prepare() -> Answer:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once: whoever asked clears up

    def answer(question: tuple[str, float, bool]) -> None:
        where, grace_s, everything = question
        run = RunDir(where)
        try:
            compact(run, everything=everything)
            collect(run, grace_s=grace_s)
        except ConflictError:
            return  # somebody else is at it
        except FileNotFoundError:
            if not _is_deleted(where):
                raise

    return answer


if __name__ == "__main__":
    serve(prepare)
