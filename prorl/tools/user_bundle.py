"""Packs users' tools into one zip that sandboxes read.

It holds each tool's top-level package, and an index of where each tool is.

Reads files and metadata only: no code of a user's runs here, since sandboxd may be root. Equal
packages give equal bytes. Bounded by `MAX_BYTES`; a tool whose package cannot be packed is left
out, with the reason kept for whoever asks for it.
"""

from __future__ import annotations

import io
import json
import zipfile
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from prorl.errors import ConfigError
from prorl.plugins import TOOLS, registered
from prorl.tools.bundle import STAMP

INDEX = "prorl-tools.json"
"""In the zip: name -> [module, attribute]. The reader is `prorl/tools/server/user_tool.py`."""
MAX_BYTES = 16 << 20
"""Of one package: every sandbox of the node reads the zip."""
COMPILED = (".so", ".pyd", ".dylib")


class UserBundle(NamedTuple):
    """Users' tools as one zip, and those that could not be packed."""

    content: bytes
    problems: dict[str, str]
    """Registered tools that are not in it, and why."""
    names: frozenset[str]
    """Tools that are in it."""


def build() -> UserBundle:
    """Pack every registered tool into one zipapp."""
    members: dict[str, bytes] = {}
    index: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    for name, point in sorted(registered(TOOLS).items()):
        try:
            members.update(_package(point))
        except (ConfigError, OSError, ImportError, ValueError) as error:
            problems[name] = f"tool {name!r} ({point.value}) cannot be packed: {error}"
        else:
            index[name] = [point.module, point.attr]
    return UserBundle(
        _zip({INDEX: json.dumps(index).encode(), **members}), problems, frozenset(index)
    )


def _zip(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, STAMP), members[name])
    return out.getvalue()


def _package(point: EntryPoint) -> dict[str, bytes]:
    """The files of the package or module that a tool lives in, by their names in the zip."""
    top = point.module.partition(".")[0]
    spec = find_spec(top)
    if spec is None:
        raise ConfigError(f"there is no module {top!r}")
    if not spec.has_location or spec.origin is None:
        raise ConfigError(
            f"{top} is a namespace package", "a package with an __init__.py, or a module"
        )
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        paths, root = [origin], origin.parent
    else:
        paths, root = _files_below(origin.parent), origin.parent.parent
    _check(top, paths)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _files_below(folder: Path) -> list[Path]:
    """A package's own files, in one order everywhere."""
    found = sorted(folder.rglob("*"))
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _check(top: str, paths: list[Path]) -> None:
    """Raise ConfigError for a package that sandboxes could not read, or would read for long."""
    mend = "move the tool into a package of its own"
    if compiled := [path.name for path in paths if path.suffix in COMPILED]:
        raise ConfigError(f"{top} holds compiled {compiled[0]}", "Python and data files", mend)
    if (total := sum(path.stat().st_size for path in paths)) > MAX_BYTES:
        raise ConfigError(f"{top} has {total} bytes", f"at most {MAX_BYTES}", mend)
