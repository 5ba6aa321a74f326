"""The files of a folder of rows: those of its one split."""

from __future__ import annotations

import re
from pathlib import Path

import orjson

from prorl.errors import TaskError

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")


def is_rows(path: Path) -> bool:
    """Whether a file's name is one that rows have."""
    return path.name.endswith(_SUFFIXES)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder's one split. Raises TaskError."""
    if (splits := folder / "dataset_dict.json").exists():
        names = _splits(splits)
        if len(names) > 1:
            given = f"{folder} holds the splits {', '.join(names)}"
            raise TaskError(given, "one of them", f"name it: {folder / names[0]}")
        folder = folder / names[0]
    if (folder / "state.json").exists():
        return sorted(folder.glob("*.arrow"))
    found = sorted(path for path in folder.rglob("*") if is_rows(path) and _visible(path, folder))
    names = sorted({_SHARD.sub("", path.name.partition(".")[0]) for path in found})
    if len(names) != 1:
        raise TaskError(
            f"{folder} is a directory with {', '.join(names) or 'no task file'}",
            "files of one split",
            f"name one: {found[0]}" if found else "",
        )
    return found


def _visible(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return len(parts) <= 3 and not any(part.startswith((".", "_")) for part in parts)


def _splits(path: Path) -> list[str]:
    try:
        names = orjson.loads(path.read_bytes())["splits"]
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise TaskError(f"{path} cannot be read ({cause})", "what `datasets` writes") from cause
    if not isinstance(names, list) or not names or any("/" in str(name) for name in names):
        raise TaskError(f"{path} names the splits {names!r}", "what `datasets` writes")
    return [str(name) for name in names]
