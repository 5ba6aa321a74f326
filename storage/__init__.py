"""Run directories: written by the store, read by anyone with Parquet, served to trainers.

They are served over Flight, live or replayed.

Read `files/layout.py` (what lies where), then `write/writer.py` (how it gets there),
`serve/delivery.py` and `serve/endpoint.py` (how trainers get it). The names below are for
users; they load on first use, since the store's parts are heavy and one process rarely needs
all of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "prorl.storage":
    raise ImportError("import prorl.storage instead of storage")

if TYPE_CHECKING:
    from prorl.storage.read.catalog import StoredRun, query
    from prorl.storage.read.replay import open_replay
    from prorl.storage.read.runs import list_runs
    from prorl.storage.serve.filter import check_filter

__all__ = ["StoredRun", "check_filter", "list_runs", "open_replay", "query"]

_HOMES = {
    "StoredRun": "read.catalog",
    "list_runs": "read.runs",
    "query": "read.catalog",
    "check_filter": "serve.filter",
    "open_replay": "read.replay",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
