"""`prorl adopt`: make a run directory known to a root whose log lacks it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.errors import ConfigError


def adopt(directory: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Make a control log for a run directory that has none: copied from elsewhere, or its log was
    lost. The run is read only from then on; no service may work on the root meanwhile.

    Example: prorl adopt copied-root/my-run

    Parameters
    ----------
    directory
        The run directory, in the root that is to know it.
    json
        Print what was found as one JSON object.
    """
    from prorl.cli.output import say, say_json
    from prorl.service.adopt import adopt as make_known
    from prorl.service.log import ControlLog
    from prorl.storage.catalog import StoredRun

    if not directory.is_dir():
        raise ConfigError(f"no folder {directory}", "the path of a run directory: ROOT/RUN")
    stored = StoredRun(directory.absolute())
    log = ControlLog(directory.absolute().parent / "control.db")
    try:
        found = make_known(stored, log)
    finally:
        log.close()
    if json:
        say_json(found._asdict())
        return 0
    lost = f", {found.missing:,} rollouts that no commit holds are lost" if found.missing else ""
    say(
        f"adopted  {found.run_id}: {found.groups:,} groups, {found.rollouts - found.missing:,}"
        f" rollouts in {found.commits:,} commits{lost}; read only"
    )
    return 0
