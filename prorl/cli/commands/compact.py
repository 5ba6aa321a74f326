"""`prorl compact`: many small parts of a stored run become few large ones."""

from __future__ import annotations

import errno

from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer
from prorl.cli.runs import run_directory
from prorl.errors import StorageError
from prorl.storage.compact import Compacted
from prorl.storage.compact import compact as merge
from prorl.storage.layout import RunDir
from prorl.types import Json


def compact(run: StoredName, /, *, root: RunsRoot = "prorl-runs", json: JsonObject = False) -> int:
    """Merge the small parts of a run into large ones.

    A service does it by itself; this is for runs that came to an end without it. Safe at any time:
    while the run is written, read, or streamed.

    Example: prorl compact my-run && prorl gc my-run
    """
    directory = RunDir(run_directory(run, root))
    directory.manifest()
    try:
        done = merge(directory, everything=True)
    except StorageError as error:
        raise _with_mending(error, directory.name) from None
    answer(_figures(directory, done), [f"{directory.name}: {_words(done)}"], json=json)
    return 0


def _figures(run: RunDir, done: Compacted | None) -> dict[str, Json]:
    return {
        "run": run.name,
        "compacted": done is not None,
        "files_before": done.num_before if done else None,
        "files_after": done.num_after if done else None,
        "commits": done.commit.commit_seq if done else None,
    }


def _with_mending(error: StorageError, run: str) -> StorageError:
    """What to do about a damaged part; trouble of the system (a full disk ...) stays as it is."""
    if error.errno not in (None, errno.ENOENT):
        return error
    return StorageError(
        f"{error}; expected parts as their commits name them; `prorl verify {run}` lists what is"
        " damaged: mend it by a copy of these files. Nothing was changed"
    )


def _words(done: Compacted | None) -> str:
    if done is None:
        return "nothing to merge"
    return (
        f"{done.num_before:,} files of {done.commit.commit_seq:,} commits are"
        f" {done.num_after:,} now; what they replace goes with `prorl gc`"
    )
