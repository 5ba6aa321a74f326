"""`prorl verify`: check a run directory against its own words."""

from __future__ import annotations

from prorl.cli.options import JsonList, RunsRoot, StoredName
from prorl.cli.output import answer, clean
from prorl.cli.runs import run_directory
from prorl.pluralize import pluralize
from prorl.storage.read.verify import verify as check


def verify(run: StoredName, /, *, root: RunsRoot = "prorl-runs", json: JsonList = False) -> int:
    """Check a run directory: hashes, invariants, exactly one row a rollout.

    Exit code 1 when something is wrong.
    """
    directory = run_directory(run, root)
    findings = list(check(directory))
    rows = [{"where": finding.where, "problem": finding.problem} for finding in findings]
    count = (
        pluralize(len(findings), "finding")
        if findings
        else "all hashes, rows and invariants are right"
    )
    answer(
        rows, [*(clean(str(finding)) for finding in findings), f"{directory}: {count}"], json=json
    )
    return 1 if findings else 0
