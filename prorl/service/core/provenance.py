"""What made a run: which policy, which tokenizer and template, which sandboxes, which code.

Written into the manifest when the run is made, so that a copied directory can be told from another
one years later. Weights that are published later are versions of the log, not of this.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import prorl
from prorl.backends.catalogue import checkpoint
from prorl.config import RunConfig, ServiceConfig
from prorl.types import Json

EDGE_BYTES = 32 << 20
"""Of a file the first and the last so many are hashed."""


def provenance(
    service: ServiceConfig, run: RunConfig, served: Mapping[str, Json] = MappingProxyType({})
) -> dict[str, Json]:
    """JSON values; `turns.backend` is a key of `backends`; no hash of what is not here.

    `served`: what model servers say of their models; a `root` that is a folder here is hashed.

    Tokenizer and template are hashed where they were proved: `renderer` of the manifest.
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
        "topology": service.topology,
        "code_sha256": code_sha256(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _backend(service: ServiceConfig, name: str, served: Mapping[str, Json]) -> dict[str, Json]:
    policy = service.models.get(name, name)
    folder = (checkpoint(policy) if ":" in policy else policy) or str(served.get("root") or "")
    found: dict[str, Json] = {
        "policy": policy,
        "sha256": fingerprint(Path(folder)) if folder else "",
    }
    return {**found, "served": dict(served)} if served else found


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
    """SHA-256 of every Python file of the installed package, by path.

    An edited checkout has another one than the release of the same version.
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
