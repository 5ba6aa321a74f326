"""`prorl export`: a stored run as others read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from cyclopts import Parameter

from prorl import exact_json
from prorl.analysis.export import FORMATS, LINES, arrow_schema
from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer, open_to_write
from prorl.cli.runs import run_directory
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json

ROWS = 256
"""In one batch."""

CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
---
Rollouts of the run `{run}`, written by `prorl export`: one row per token sequence.
"""


def export(
    run: StoredName,
    out: Path,
    /,
    *,
    format_: Annotated[str, Parameter(name="--as")],
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Write a stored run in a format of other tools, in the order of delivery.

    chat (JSON lines of messages), verl and trl (token ids, masks, logprobs; Parquet, or JSON lines
    for a file called .jsonl), atif (JSON lines), hf (a folder for datasets.load_dataset).

    Example: prorl export my-run my-run.parquet --as trl

    Parameters
    ----------
    out
        File, or folder for hf; nothing may be there.
    format_
        chat, verl, trl, atif or hf.
    all_
        Groups that the filter dropped, too, behind the others.
    """
    _check(format_, out)
    stored = StoredRun(run_directory(run, root))
    rows = FORMATS[format_](stored, all_)
    if format_ == "hf":
        (out / "data").mkdir(parents=True)
        (out / "README.md").write_text(CARD.format(run=stored.run_id))
        count = _parquet(out / "data" / "train-00000-of-00001.parquet", rows)
    elif format_ in LINES or out.suffix == ".jsonl":
        count = _lines(out, rows)
    else:
        count = _parquet(out, rows)
    total = stored.read("sequences", ["sequence_id"]).num_rows
    if format_ in LINES:
        total = stored.sql("select count(distinct rollout_id) as n from sequences")["n"][0].as_py()
    summary = {"run": stored.run_id, "rows": count, "of": total, "out": str(out)}
    share = "" if count == total else f" of {total:,}, those of kept groups (--all: every one)"
    answer(summary, [f"{stored.run_id}: {pluralize(count, 'row')}{share} in {out}"], json=json)
    return 0


def _check(format_: str, out: Path) -> None:
    if format_ not in FORMATS:
        raise UserError(f"format {format_!r}", f"one of {', '.join(FORMATS)}")
    if out.exists():
        raise UserError(f"{out} exists", "a path that does not exist yet")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: no folder {out.parent}", "a file that can be written")


def _lines(path: Path, rows: Iterable[Mapping[str, Json]]) -> int:
    count = 0
    with open_to_write(path) as file:
        for row in rows:
            file.write(exact_json.dumps(row).decode() + "\n")
            count += 1
    return count


def _parquet(path: Path, rows: Iterator[dict[str, Json]]) -> int:
    chunk = list(islice(rows, ROWS))
    if not chunk:
        raise UserError("the run has no sequence to export", "a run with kept groups")
    schema, count = arrow_schema(chunk[0]), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk:
            writer.write_table(pa.Table.from_pylist(chunk, schema))
            count += len(chunk)
            chunk = list(islice(rows, ROWS))
    return count
