"""The lineage that a trainer reports of a checkpoint, checked where it comes in."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import ConflictError, UserError
from prorl.schema import ARROW_ERRORS, TRAINED
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir
from prorl.storage.files.parts import aligned

MAX_BYTES = 256 << 20
"""Most bytes of one step's rows: 60 million tokens with the learner's logprobs."""

_SAME = ("consumer", "checkpoint", "parent_checkpoint")

ANCESTRY = """
with recursive chain as (
    select distinct checkpoint, parent_checkpoint, step from trained
    where checkpoint = '{checkpoint}'
    union
    select t.checkpoint, t.parent_checkpoint, t.step
    from (select distinct checkpoint, parent_checkpoint, step from trained) t
    join chain on t.checkpoint = chain.parent_checkpoint
)
select trained.* from trained join chain using (checkpoint, parent_checkpoint, step)
order by step, delivery_seq, sequence_id
"""
"""Every sequence that went into a checkpoint or into what it was trained from."""


class Recorded(NamedTuple):
    run: str
    rows: pa.Table

    @property
    def key(self) -> str:
        """Consumer and checkpoint, by which the record is known: said again, it adds nothing. The
        first "/" ends the consumer, which has none of its own.
        """
        consumer, checkpoint = (
            str(self.rows.column(name)[0].as_py()) for name in ("consumer", "checkpoint")
        )
        return f"{consumer.replace('%', '%25').replace('/', '%2F')}/{checkpoint}"

    def check(self, delivered: int) -> None:
        """Raise ConflictError for groups that were not handed out."""
        last = pc.max(self.rows.column("delivery_seq")).as_py()
        if last >= delivered:
            raise ConflictError(
                f"lineage of group {last} of run {self.run}, which has delivered {delivered}",
                "groups that were streamed",
                "is this the run that the checkpoint was trained on?",
            )


def read_recorded(body: bytes) -> Recorded:
    """The body of a `record` action. Raises UserError or SchemaError for anything else."""
    if len(body) > MAX_BYTES:
        raise UserError(f"{len(body):,} bytes of lineage", f"at most {MAX_BYTES:,}")
    try:
        rows = pa.ipc.open_stream(body).read_all()
        rows.validate(full=True)
    except ARROW_ERRORS as error:
        raise UserError(
            f"lineage that is no Arrow stream: {error}", "what `record` sends"
        ) from None
    run = _run_of(rows.schema)
    rows = aligned(rows, TRAINED, "lineage")  # an older client's lack the youngest columns
    nulls = [f.name for f in TRAINED if not f.nullable and rows.column(f.name).null_count]
    if nulls or not rows.num_rows:
        raise UserError(f"lineage with nothing in {', '.join(nulls) or 'it'}", "rows without nulls")
    several = [name for name in _SAME if len(rows.column(name).unique()) > 1]
    if several:
        raise UserError(f"lineage with several {', '.join(several)}", "one checkpoint's rows")
    return Recorded(run, rows.replace_schema_metadata())


def recorded_run(body: bytes) -> str:
    """The run that a `record` body is about; empty for no such body."""
    try:
        return _run_of(pa.ipc.open_stream(body).schema)
    except ARROW_ERRORS:
        return ""


def _run_of(schema: pa.Schema) -> str:
    return ((schema.metadata or {}).get(b"prorl.run") or b"").decode(errors="replace")


def append_recorded(directory: RunDir, recorded: Recorded) -> bool:
    """Make them durable; False when they are there. Raises StorageError."""
    name = pa.repeat(pa.scalar(recorded.run, pa.utf8()), recorded.rows.num_rows)
    rows = recorded.rows.set_column(0, TRAINED.field("run_id"), name)
    return AppendedTable(directory, "trained").append(rows.cast(TRAINED), recorded.key)
