"""`ROOT/<run>/manifest.json`: what a copied run directory must say of itself. Written once, when
the run is made, before it is accepted.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import orjson

import prorl
from prorl.backends.catalogue import checkpoint
from prorl.config import RunConfig, ServiceConfig
from prorl.config.layout import about
from prorl.errors import (
    ConflictError,
    ForeignDirectoryError,
    NotFoundError,
    SchemaError,
    StorageError,
)
from prorl.linux.failpoints import failpoint
from prorl.linux.files import make_folder
from prorl.plugins import version_of
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.state import RunRecord
from prorl.storage.files.durable import check_conditional, write_durably
from prorl.storage.files.layout import MANIFEST, RunDir, check_manifest, manifest_digest
from prorl.storage.files.objects import NameConflictError, ask
from prorl.types import Json

OWNER = ".owner"
"""Below `store.url`: which root writes there."""


def code_version() -> str:
    try:
        return version("prorl")
    except PackageNotFoundError:
        return "unknown"


def write_manifest(
    service: ServiceConfig,
    run: RunConfig,
    created_at: float,
    renderer: Json = None,
    owner: str = "",
    served: Mapping[str, Json] = MappingProxyType({}),
) -> RunDir:
    """Make the directory and the manifest of a run that the log does not know.

    One that is there with the same config and owner and nothing stored (we died before the log had
    the run) stays. `owner`: of the root, `ControlLog.owner`. `served`: by name, what model servers
    say of their models.

    Raises ConflictError when the directory belongs to another run or holds trajectories,
    SchemaError when it is of another version, StorageError.
    """
    directory = RunDir(service.run_directory(run.run_id))
    config = run.model_dump(mode="json")
    try:
        if not _is_there(directory, config, owner):
            content = {
                "run_id": run.run_id,
                "schema_version": SCHEMA_VERSION,
                "code_version": code_version(),
                "created_at": created_at,
                **provenance(service, run, served),
                "renderer": renderer,
                "config": config,
                "owner": owner,
            }
            _make(directory, content)
            failpoint("manifest.written")
    except NameConflictError:
        hint = "choose another run_id"
        problem = f"{directory.where} is being made by another service"
        raise ConflictError(problem, "a directory that does not exist", hint) from None
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{directory.where}: {error.strerror or error}") from error
    return directory


def _is_there(directory: RunDir, config: Json, owner: str) -> bool:
    """Returns whether our manifest of this config stands there already. Raises ConflictError for a
    file, for another run, and where trajectories are stored.
    """
    if directory.local and Path(directory.root).is_file():
        problem = f"{directory.where} is a file of the service"
        raise ConflictError(problem, "a name that is free", "choose another run_id")
    manifest = _read(directory)
    if manifest is None:
        return False
    expected, hint = "a directory that does not exist", "choose another run_id"
    if manifest.get("config") != config:
        raise ConflictError(f"{directory.where} holds another run", expected, hint)
    if directory.written():
        raise ConflictError(
            f"{directory.where} holds trajectories of a run that this root's log does not know",
            expected,
            f"`prorl sql`, `replay`, `export` and `report` read it as it is; {hint}",
        )
    if manifest.get("owner") != owner:
        problem = f"{directory.where} holds a run of another service's root"
        raise ConflictError(problem, expected, hint)
    return True


def claim_store(service: ServiceConfig, owner: str) -> None:
    """Take `store.url` for this root: one service writes there, as one does in a root on a disk.
    Raises ConflictError when another root has it, ConfigError, StorageError.
    """
    if not service.store.url:
        return
    store = RunDir(service.store.url)
    if store.local:
        make_folder(Path(store.root))
    check_conditional(store.fs, store.root)
    try:
        write_durably(store.fs, store.path(OWNER), owner.encode())
    except NameConflictError:
        raise ConflictError(
            f"{service.store.url} belongs to another service's root",
            "a url that no other service writes to",
            f"choose another, or remove {store.path(OWNER)} if that root is gone",
        ) from None


def check_there(service: ServiceConfig, run_id: str) -> None:
    """Raises ConflictError when somebody has removed the directory of a run that the log knows."""
    run = RunDir(service.run_directory(run_id))
    run.fs.invalidate_cache()
    path = run.path(MANIFEST)
    if not run.has(MANIFEST):
        raise ConflictError(
            f"run {run_id!r} is known here, but {path} is gone",
            "its directory in its place",
            "choose another run_id",
        )


def refusal_of(service: ServiceConfig, run_id: str) -> str:
    """Returns why this prorl cannot go on with a run: another version wrote its directory. Else
    empty.
    """
    try:
        RunDir(service.run_directory(run_id)).manifest()
    except NotFoundError:
        pass  # somebody removed it, which `check_there` reports
    except SchemaError as error:
        return str(error)
    return ""


def foreign_directories(
    service: ServiceConfig, runs: Iterable[RunRecord]
) -> Iterator[tuple[RunRecord, str]]:
    """Open runs whose directories hold commits that the log does not know, before a service goes
    on with them, and the reason: the log is older than what it would write to.
    """
    for run in runs:
        try:
            RunDir(service.run_directory(run.run_id)).check_commits(run.commits.next_commit - 1)
        except ForeignDirectoryError as error:
            yield run, str(error)


def read_renderer(service: ServiceConfig, run_id: str) -> Json:
    """Read what was proved of a run's renderer when it was made; None where nothing is said."""
    manifest = _read(RunDir(service.run_directory(run_id))) or {}
    renderer = manifest.get("renderer")
    return renderer if isinstance(renderer, dict) and "sample_ids" in renderer else None


def _read(run: RunDir) -> dict[str, Json] | None:
    run.fs.invalidate_cache()
    path = run.path(MANIFEST)
    try:
        parsed = orjson.loads(run.read(MANIFEST))
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        raise StorageError(f"{path} is not JSON: move it away to use this directory") from None
    values = parsed if isinstance(parsed, dict) else {}
    check_manifest(values, f"run directory {run.where}")
    return values


def _make(run: RunDir, content: dict[str, Json]) -> None:
    if run.local:
        folder = Path(run.root)
        make_folder(folder)
        others = any(not name.startswith(".") for name in os.listdir(folder))
    else:
        check_conditional(run.fs, run.root.rpartition("/")[0])
        others = bool(ask(run.fs, lambda: run.fs.find(run.root, maxdepth=1)))
    if others:
        raise ConflictError(
            f"{run.where} holds other files",
            "a directory that does not exist or is empty",
            "choose another run_id",
        )
    content = {**content, "digest": manifest_digest(content)}
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"
    write_durably(run.fs, run.path(MANIFEST), data)


# ---- what made a run: which policy, tokenizer, sandboxes, code

EDGE_BYTES = 32 << 20
"""The length of the first and of the last part of a file that are hashed."""


def provenance(
    service: ServiceConfig, run: RunConfig, served: Mapping[str, Json] = MappingProxyType({})
) -> dict[str, Json]:
    """JSON values; `turns.backend` is a key of `backends`; no hash of what is not here. `served`:
    what model servers say of their models; a `root` that is a folder here is hashed. `users_code`:
    SHA-256 of the files that the run's config names as `file.py:attr`; `rollouts.env_sha256` has
    that of the env that scored a rollout, since tasks name it. Tokenizer and template are hashed
    where they were proved: `renderer` of the manifest.
    """
    backends = run.backends or service.backends
    return {
        "backends": {name: _backend(service, name, served.get(name) or {}) for name in backends},
        "model": service.model,
        "tokenizer": run.renderer.model or service.tokenizer,
        "sandbox": {
            "kind": service.sandbox.kind,
            "image": service.sandbox.image,
            "node": service.node_id,
        },
        "layout": about(service),
        "code_sha256": code_sha256(),
        "users_code": {
            name: version_of([name])
            for name in (run.agent, run.renderer.name, *run.env)
            if name.rpartition(":")[0].endswith(".py")
        },
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _backend(service: ServiceConfig, name: str, served: Mapping[str, Json]) -> dict[str, Json]:
    policy = service.models.get(name, name)
    folder = (checkpoint(policy) if ":" in policy else policy) or str(served.get("root") or "")
    entry: dict[str, Json] = {
        "policy": policy,
        "sha256": fingerprint(Path(folder)) if folder else "",
    }
    return {**entry, "served": dict(served)} if served else entry


def fingerprint(folder: Path) -> str:
    """SHA-256 over the names, sizes and contents of a folder's files; empty when there is none.
    Blocking: a moment for a checkpoint of many shards, of which it reads the ends.
    """
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


@cache
def code_sha256() -> str:
    """SHA-256 of every Python file of the installed package, by path. An edited checkout has
    another one than the release of the same version.
    """
    digest, root = hashlib.sha256(), Path(prorl.__file__).parent
    paths = (
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)  # links in a checkout
        for name in names
        if name.endswith(".py")
    )
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()
