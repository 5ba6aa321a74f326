"""`prorl compact`: many small parts of a stored run become few large ones."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import say, say_json
from prorl.cli.runs import run_directory


def compact(
    run: str,
    /,
    *,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Merge the small parts of a run into large ones. A service does it by itself; this is for runs
    that came to an end without it. Safe at any time: while the run is written, read, or streamed.

    Example: prorl compact my-run && prorl gc my-run

    Parameters
    ----------
    run
        Name of a run in the root, or path of a run directory.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print what was done as one JSON object.
    """
    from prorl.storage.compact import compact as merge
    from prorl.storage.layout import RunDir

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
    if json:
        say_json(found)
    elif done is None:
        say(f"{directory.name}: nothing to merge")
    else:
        say(
            f"{directory.name}: {done.num_before:,} files of {done.commit.commit_seq:,} commits are"
            f" {done.num_after:,} now; what they replace goes with `prorl gc`"
        )
    return 0
