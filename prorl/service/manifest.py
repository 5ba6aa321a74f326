"""`ROOT/<run>/manifest.json`: what a copied run directory must say of itself.

Written once, when the run is made, before it is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson

from prorl.config import RunConfig, ServiceConfig
from prorl.errors import ConflictError, StorageError
from prorl.schema import SCHEMA_VERSION, check_version
from prorl.service.provenance import provenance
from prorl.service.state import RunRecord
from prorl.storage.layout import RunDir
from prorl.types import Json

MANIFEST = "manifest.json"


def code_version() -> str:
    """The installed prorl's version."""
    try:
        return version("prorl")
    except PackageNotFoundError:
        return "unknown"


def write_manifest(
    service: ServiceConfig, run: RunConfig, created_at: float, renderer: Json = None
) -> Path:
    """Make the directory and the manifest of a run that the log does not know; one that is there
    with the same config and nothing stored (we died before the log had the run) stays.

    Raises ConflictError when the directory belongs to another run or holds trajectories,
    SchemaError when it is of another version, StorageError.
    """
    folder = service.root / run.run_id
    path = folder / MANIFEST
    config = run.model_dump(mode="json")
    if folder.exists() and not folder.is_dir():
        raise ConflictError(
            f"{folder} is a file of the service", "a name that is free", "choose another run_id"
        )
    try:
        found = _read(path)
        if found is not None:
            check_version(found.get("schema_version"), f"run directory {folder}")
            if found.get("config") != config:
                raise ConflictError(
                    f"{folder} holds another run",
                    "a directory that does not exist",
                    "choose another run_id",
                )
            if RunDir(folder).written():
                raise ConflictError(
                    f"{folder} holds trajectories of a run that this root's log does not know",
                    "a directory that does not exist",
                    f"`prorl adopt {folder}` makes it known, or choose another run_id",
                )
            return path
        folder.mkdir(parents=True, exist_ok=True)
        if any(not name.startswith(".") for name in os.listdir(folder)):
            raise ConflictError(
                f"{folder} holds other files",
                "a directory that does not exist or is empty",
                "choose another run_id",
            )
        _write(path, _content(service, run, config, created_at, renderer))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: {error.strerror or error}") from error
    return path


def check_there(service: ServiceConfig, run_id: str) -> None:
    """Raises ConflictError when somebody has removed the directory of a run that the log knows."""
    path = service.root / run_id / MANIFEST
    if not path.exists():
        raise ConflictError(
            f"run {run_id!r} is known here, but {path} is gone",
            "its directory in its place",
            "choose another run_id",
        )


def check_directories(root: Path, runs: Iterable[RunRecord]) -> None:
    """Before a service goes on with its open runs.

    Raises ConflictError when a directory holds commits that the log does not know: then the log is
    older than what it would write to.
    """
    for run in runs:
        if run.state == "open":
            RunDir(root / run.run_id).check_known(run.next_commit - 1)


def _content(
    service: ServiceConfig, run: RunConfig, config: Json, created_at: float, renderer: Json
) -> dict[str, Json]:
    return {
        "run_id": run.run_id,
        "schema_version": SCHEMA_VERSION,
        "code_version": code_version(),
        "created_at": created_at,
        **provenance(service, run),
        "renderer": renderer,
        "config": config,
    }


def _read(path: Path) -> dict[str, Json] | None:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        raise StorageError(f"{path} is not JSON: move it away to use this directory") from None
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, Json]) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temp.open("wb") as file:
        file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temp.rename(path)
    for folder in (path.parent, path.parent.parent):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
