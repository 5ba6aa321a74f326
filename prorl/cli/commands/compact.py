"""`prorl compact`: many small parts of a stored run become few large ones."""

from __future__ import annotations

from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer
from prorl.cli.runs import run_directory
from prorl.storage.compact import Compacted
from prorl.storage.compact import compact as merge
from prorl.storage.layout import RunDir


def compact(run: StoredName, /, *, root: RunsRoot = "prorl-runs", json: JsonObject = False) -> int:
    """Merge the small parts of a run into large ones.

    A service does it by itself; this is for runs that came to an end without it. Safe at any time:
    while the run is written, read, or streamed.

    Example: prorl compact my-run && prorl gc my-run
    """
    directory = RunDir(run_directory(run, root))
    directory.manifest()
    done = merge(directory, everything=True)
    found = {
        "run": directory.name,
        "compacted": done is not None,
        "files_before": done.num_before if done else None,
        "files_after": done.num_after if done else None,
        "commits": done.commit.commit_seq if done else None,
    }
    answer(found, [f"{directory.name}: {_words(done)}"], json=json)
    return 0


def _words(done: Compacted | None) -> str:
    if done is None:
        return "nothing to merge"
    return (
        f"{done.num_before:,} files of {done.commit.commit_seq:,} commits are"
        f" {done.num_after:,} now; what they replace goes with `prorl gc`"
    )
