"""The provenance of a run, in words and hashes, to compare two runs by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePath

import orjson

from prorl.config import JOB_FILE
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json

DIGITS = 12
"""The digits of a hash that people compare."""

_TASKS = """
select count(*) as n, format('{:x}', bit_xor(md5_number(task))) as digest
from (select distinct env, task from tasks)
"""
_ENVS = "select distinct env from tasks order by env"


def provenance(stored: StoredRun, ask: Callable[[str], list[dict[str, Json]]]) -> dict[str, str]:
    """Returns the run's provenance by what it is; what the run does not know is left out. `ask`:
    SQL of its tables. Tasks are those that the run was given, whatever file they came from; files
    are those of `prorl run`, which are the task file and users' envs. A setting of the run is named
    `run.KEY`, as on a command line.
    """
    manifest = stored.manifest
    renderer = manifest.get("renderer") or {}
    (tasks,) = ask(_TASKS)
    facts = {
        "policy": ", ".join(sorted(map(_policy, dict(manifest.get("backends") or {}).values()))),
        "tokenizer": str(renderer.get("tokenizer_sha256", ""))[:DIGITS],
        "chat template": str(renderer.get("template_sha256", ""))[:DIGITS],
        "tasks": f"{tasks['n']:,} {tasks['digest']}"[: DIGITS + 8] if tasks["n"] else "",
        "envs": ", ".join(row["env"] for row in ask(_ENVS)),
        **dict(_files(stored)),
        "prorl": f"{manifest.get('code_version') or ''} {_digest(manifest.get('code_sha256'))}",
        **dict(_settings("run", {**dict(manifest.get("config") or {}), "run_id": None})),
    }
    return {name: text for name, text in facts.items() if text.strip()}


def _settings(name: str, value: Json) -> Iterator[tuple[str, str]]:
    """Yields each setting below a name; what is empty counts as not set."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _settings(f"{name}.{key}", below)
    elif value not in (None, "", []):
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _digest(value: Json) -> str:
    return str(value or "")[:DIGITS]


def _policy(backend: Json) -> str:
    served = backend.get("served") or {}
    names = (backend.get("policy"), served.get("model"), served.get("root"))
    words = list(dict.fromkeys(str(word) for word in names if word))
    return " ".join([*words, _digest(backend.get("sha256"))]).strip()


def _files(stored: StoredRun) -> Iterator[tuple[str, str]]:
    if not stored.directory.has(JOB_FILE):
        return
    try:
        hashes = orjson.loads(stored.directory.read(JOB_FILE)).get("sha256") or {}
        for path, digest in hashes.items():
            yield f"file {PurePath(path).name}", str(digest)[:DIGITS]
    except (ValueError, AttributeError):  # a copy may be damaged
        yield JOB_FILE, "unreadable"
