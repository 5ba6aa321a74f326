"""`prorl verify`: check a run directory against its own words."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import clean, say, say_json
from prorl.cli.runs import run_directory
from prorl.storage.verify import verify as check


def verify(
    run: str,
    /,
    *,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check a run directory: hashes, invariants, exactly one row a rollout.

    Exit code 1 when something is wrong.

    Parameters
    ----------
    run
        Name of a run in the root, or path of a run directory (a copied one too).
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print a JSON list of findings.
    """
    directory = run_directory(run, root)
    findings = list(check(directory))
    if json:
        say_json([{"where": finding.where, "what": finding.what} for finding in findings])
    else:
        for finding in findings:
            say(clean(str(finding)))
        say(
            f"{directory}: "
            + (
                f"{len(findings)} findings"
                if findings
                else "all hashes, rows and invariants are right"
            )
        )
    return 1 if findings else 0
