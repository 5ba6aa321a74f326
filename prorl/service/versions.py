"""The table `versions` of a run directory: which weights each policy version is, and who took them.

The log decides; this is for readers of the directory, written behind the log and before the trainer
has its answer. A version that is said again adds nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from prorl.schema import APPENDED
from prorl.service.weights import Record
from prorl.storage.layout import RunDir


def keep_version(directory: RunDir, record: Record, at: float) -> bool:
    """Append one; `at` in seconds since 1970. False when it is there. Raises StorageError."""
    from prorl.storage.appended import AppendedTable  # Parquet: megabytes that few gateways need

    schema = APPENDED["versions"]
    row = {
        "run_id": record.run_id,
        "version": record.version,
        "path": record.path,
        "pause": record.pause,
        "adapter": record.adapter,
        "took": list(record.took),
        "failed": [f"{name}: {why}" for name, why in record.failed.items()],
        "load_s": record.load_s,
        "at": datetime.fromtimestamp(at, UTC),
    }
    rows = pa.Table.from_pylist([row], schema=schema)
    return AppendedTable(directory, "versions").append(rows, str(record.version))
