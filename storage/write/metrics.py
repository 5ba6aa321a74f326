"""The figures that a trainer logs of a step (`Client.log`), checked where they come in.

{"run": "mine", "consumer": "primary", "step": 7, "version": 3, "key": "...",
 "values": {"loss": 0.12, "grad_norm": 0.9}}
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta

from prorl.errors import UserError
from prorl.schema import METRICS
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir

MAX_VALUES = 1000
"""In one call; a trainer that logs each layer by itself has some hundreds."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class LoggedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    step: Annotated[int, Meta(ge=0, le=2**62)]
    values: Annotated[dict[Name, float], Meta(min_length=1, max_length=MAX_VALUES)]
    key: Name
    """Identifies the call: a call that is retried adds nothing."""
    consumer: Name = "primary"
    version: Annotated[int, Meta(ge=0, lt=2**31)] | None = None


def read_logged(body: bytes) -> LoggedStep:
    """The body of a `log` action. Raises UserError for anything else."""
    try:
        logged = msgspec.json.decode(body, type=LoggedStep)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"metrics: {error}", "what `Client.log` sends") from None
    wrong = [name for name, value in logged.values.items() if not math.isfinite(value)]
    if wrong:
        raise UserError(f"metrics with no finite number for {', '.join(wrong[:5])}", "numbers")
    return logged


def append_logged(directory: RunDir, logged: LoggedStep) -> bool:
    """Make the values durable; False when this call's are there. Raises StorageError."""
    shared = {
        "run_id": logged.run,
        "consumer": logged.consumer,
        "step": logged.step,
        "version": logged.version,
        "time": datetime.now(UTC),
    }
    rows = [shared | {"name": name, "value": value} for name, value in logged.values.items()]
    return AppendedTable(directory, "metrics").append(
        pa.Table.from_pylist(rows, METRICS), logged.key
    )
