"""`prorl import`: rollouts of others as a run."""

from __future__ import annotations

from pathlib import Path

from prorl.analysis.foreign import read_lines
from prorl.analysis.importing import import_rows
from prorl.analysis.traces import read_dump
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
    """Make a run of other people's rollouts: JSON lines, Parquet, a JSON document, slime's .pt.

    Rows are as TRL, verl or `prorl export` have them, or ATIF, traces and results of verifiers,
    NeMo Gym's, OpenEnv's, messages. The run can be seen, queried and verified like any other, and
    replayed where it has ids and logprobs; what the rows lack is absent. A row that is not sound is
    named by its line, and then nothing is written.

    Example: prorl import rollouts.parquet --name theirs && prorl replay theirs

    Parameters
    ----------
    file
        .jsonl, .json, .parquet or .pt.
    name
        What the run is called.
    root
        Folder of the runs on this host.
    """

    if not NAME.fullmatch(name):
        raise UserError(f"run name {name!r}", "letters, digits, `_`, `.`, `-`")
    if not file.is_file():
        raise UserError(f"no file {file}", "a .jsonl, .json, .parquet or .pt file")
    directory = Path(root) / name
    lines = read_dump(file) if file.suffix == ".pt" else read_lines(file)
    count = import_rows(lines, directory, file.name)
    found = {"run": name, "rollouts": count, "directory": str(directory)}
    answer(found, [f"{name}: {count:,} rollouts in {directory}"], json=json)
    return 0
