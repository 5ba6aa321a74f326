"""`prorl import`: token-carrying rows of others as a run."""

from __future__ import annotations

from pathlib import Path

from prorl.analysis.foreign import read_lines
from prorl.analysis.importing import import_rows
from prorl.cli.options import JsonObject
from prorl.cli.output import answer
from prorl.config import NAME
from prorl.errors import UserError


def import_(
    file: Path,
    /,
    *,
    name: str,
    root: str = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Make a run of token-carrying rows: JSON lines or Parquet.

    The rows are as TRL, verl or `prorl export` have them. The run can be replayed, queried and
    verified like any other. A row that is not sound is named by its line, and then nothing is
    written.

    Example: prorl import rollouts.parquet --name theirs && prorl replay theirs

    Parameters
    ----------
    file
        .jsonl or .parquet with token ids, mask, logprobs and reward.
    name
        What the run is called.
    root
        Folder of the runs on this host.
    """

    if not NAME.fullmatch(name):
        raise UserError(f"run name {name!r}", "letters, digits, `_`, `.`, `-`")
    if not file.is_file():
        raise UserError(f"no file {file}", "a .jsonl or .parquet file")
    directory = Path(root) / name
    count = import_rows(read_lines(file), directory, file.name)
    found = {"run": name, "sequences": count, "directory": str(directory)}
    answer(found, [f"{name}: {count:,} sequences in {directory}"], json=json)
    return 0
