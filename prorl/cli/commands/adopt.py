"""`prorl adopt`: make a run directory known to a root whose log lacks it."""

from __future__ import annotations

from pathlib import Path

from prorl.cli.options import JsonObject
from prorl.cli.output import answer
from prorl.errors import ConfigError
from prorl.service.adopt import Adopted
from prorl.service.adopt import adopt as make_known
from prorl.service.log import ControlLog
from prorl.storage.catalog import StoredRun


def adopt(directory: Path, /, *, json: JsonObject = False) -> int:
    """Make a control log for a run directory that has none.

    It was copied from elsewhere, or its log was lost. The run is read only from then on; no service
    may work on the root meanwhile.

    Example: prorl adopt copied-root/my-run

    Parameters
    ----------
    directory
        The run directory, in the root that is to know it.
    """
    if not directory.is_dir():
        raise ConfigError(f"no folder {directory}", "the path of a run directory: ROOT/RUN")
    found = _adopted(directory.absolute())
    answer(found._asdict(), [_line(found)], json=json)
    return 0


def _adopted(directory: Path) -> Adopted:
    log = ControlLog(directory.parent / "control.db")
    try:
        return make_known(StoredRun(directory), log)
    finally:
        log.close()


def _line(found: Adopted) -> str:
    lost = f", {found.missing:,} rollouts that no commit holds are lost" if found.missing else ""
    return (
        f"adopted  {found.run_id}: {found.groups:,} groups, {found.rollouts - found.missing:,}"
        f" rollouts in {found.commits:,} commits{lost}; read only"
    )
