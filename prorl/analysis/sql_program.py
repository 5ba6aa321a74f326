"""Users' SQL with a time limit, in a helper: one huge value cannot be interrupted, only killed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from prorl.analysis.opened import open_runs
from prorl.errors import NotFoundError, StorageError, UserError
from prorl.helper.child import Answer, serve


def prepare() -> Answer:
    """Its imports are all that it needs."""
    return _answer


def _answer(question: tuple[tuple[str, ...], str, str]) -> Any:
    """Write what a SELECT gives as an Arrow file."""
    places, statement, path = question
    try:
        found = open_runs(*places).sql(statement).arrow()
    except UserError as error:
        return ["refused", error.given, error.expected, error.hint]
    except (StorageError, NotFoundError) as error:
        return ["damaged", str(error)]
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, found.schema) as writer:
        writer.write_table(found)
    return ["written"]


if __name__ == "__main__":
    serve(prepare)
