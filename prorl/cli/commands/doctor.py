"""`prorl doctor`: probes of this machine, each with its fix.

A failed probe makes the exit code 1; a warning does not.
"""

from __future__ import annotations

from pathlib import Path

from prorl.cli.options import JsonList
from prorl.cli.output import clean, say, say_json
from prorl.cli.probes import probes


def doctor(*, root: Path = Path("prorl-runs"), json: JsonList = False) -> int:
    """Probe this machine: packages, sandboxes, disk, sockets, limits.

    Each finding comes with its fix.

    Parameters
    ----------
    root
        Where runs would be stored: its disk is probed.
    """
    findings = []
    for finding in probes(root):
        findings.append(finding)
        if not json:
            say(
                f"{finding.level:<5} {finding.what:<17} {clean(finding.found)}"
                + (f"  -> {finding.fix}" if finding.fix else "")
            )
    if json:
        say_json([finding._asdict() for finding in findings])
    return 1 if any(finding.level == "fail" for finding in findings) else 0
