"""What made a run: which policy, which tokenizer and template, which sandboxes, which code.

Written into the manifest when the run is made, so that a copied directory can be told from another
one years later. Weights that are published later are versions of the log, not of this.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import prorl
from prorl.backends.catalogue import checkpoint
from prorl.config import RunConfig, ServiceConfig
from prorl.types import Json

WHOLE_BYTES = 64 << 20
"""Larger files are hashed by their size, their first and their last `EDGE_BYTES`."""

EDGE_BYTES = 1 << 20

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
_TEMPLATE = ("chat_template.jinja", "tokenizer_config.json")


def provenance(service: ServiceConfig, run: RunConfig) -> dict[str, Json]:
    """JSON values; `turns.backend` is a key of `backends`; no hash of what is not here."""
    backends = run.backends or service.backends
    model = run.renderer.model or service.tokenizer
    tokenizer = Path(model)
    return {
        "backends": {name: _backend(service, name) for name in backends},
        "model": service.model,
        "tokenizer": model,
        "tokenizer_sha256": fingerprint(tokenizer, _TOKENIZER),
        "renderer_sha256": fingerprint(tokenizer, _TEMPLATE),
        "sandbox": {
            "kind": service.sandbox.kind,
            "image": service.sandbox.image,
            "node": service.node_id,
        },
        "topology": service.topology,
        "code_sha256": code_sha256(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _backend(service: ServiceConfig, name: str) -> dict[str, Json]:
    policy = service.models.get(name, name)
    folder = checkpoint(policy) if ":" in policy else policy
    return {"policy": policy, "sha256": fingerprint(Path(folder)) if folder else ""}


def fingerprint(folder: Path, names: Iterable[str] = ()) -> str:
    """SHA-256 over the names and contents of a folder's files.

    Of those named, if any are; empty when there is no such folder. Blocking: seconds for a
    checkpoint of many shards.
    """
    if not folder.is_dir():
        return ""
    wanted = set(names)
    digest = hashlib.sha256()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in (path for path in files if not wanted or path.name in wanted):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_content_hash(path))
    return digest.hexdigest()


def _content_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        first = file.read(EDGE_BYTES)
        file.seek(-EDGE_BYTES, os.SEEK_END)
        return hashlib.sha256(first + file.read(EDGE_BYTES)).digest()


@cache
def code_sha256() -> str:
    """SHA-256 of every Python file of the installed package, by path.

    An edited checkout has another one than the release of the same version.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_code().items()):
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _code() -> dict[str, Path]:
    """Python files by name in the package; some of its folders are links in a checkout."""
    root = Path(prorl.__file__).parent
    paths = (
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    )
    return {path.relative_to(root).as_posix(): path for path in paths}
