"""Packs the tool server with ptyprocess, and users' tools: for any Python >= 3.8 in any image."""

from __future__ import annotations

import importlib.util
import io
import json
import marshal
import zipfile
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prorl.errors import ConfigError
from prorl.plugins import TOOLS, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY = b"from prorl.tools.server.main import main\nmain()\n"
STAMP = (2020, 1, 1, 0, 0, 0)
"""The time of every member: not when it was packed."""


@cache
def build() -> bytes:
    """The zipapp's bytes; run it as `python3 FILE CONFIG_JSON`.

    Built once a process: sandboxd writes it for the pool that tries a kind, and for its own.

    `prorl/tools/server/main.py` says what CONFIG_JSON holds.
    """
    members = {"__main__.py": ENTRY, "prorl/__init__.py": b"", "prorl/tools/__init__.py": b""}
    catalogue = resources.files("prorl.tools") / "catalogue.py"
    members["prorl/tools/catalogue.py"] = catalogue.read_bytes()
    members.update(_sources("prorl.tools.server", "prorl/tools/server"))
    members.update(_sources("ptyprocess", "ptyprocess"))
    members.update(
        {name + "c": _compiled(name, source) for name, source in members.items() if source}
    )
    return _zip(members)


def _compiled(name: str, source: bytes) -> bytes:
    """Bytecode for our own Python, which is the one that runs it in most sandboxes.

    Another Python finds the source beside it.

    Compiling at each start would cost more than everything else in a start. Format: PEP 552,
    unchecked.
    """
    code = compile(source, name, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    return (
        importlib.util.MAGIC_NUMBER
        + unchecked
        + importlib.util.source_hash(source)
        + marshal.dumps(code)
    )


def write(path: Path) -> None:
    """Write the zipapp where every user may read it."""
    path.write_bytes(build())
    path.chmod(0o644)


def _sources(package: str, folder: str) -> dict[str, bytes]:
    return {
        f"{folder}/{entry.name}": entry.read_bytes()
        for entry in resources.files(package).iterdir()
        if entry.name.endswith(".py")
    }


INDEX = "prorl-tools.json"
"""In the zip: name -> [module, attribute]. The reader is `prorl/tools/server/user_tool.py`."""
MAX_BYTES = 16 << 20
"""The limit of one package: every sandbox of the node reads the zip."""
COMPILED = (".so", ".pyd", ".dylib")


class UserBundle(NamedTuple):
    """Users' tools as one zip, and those that could not be packed."""

    content: bytes
    problems: dict[str, str]
    """Registered tools that are not in it, and why."""
    names: frozenset[str]
    """Tools that are in it."""


def build_user() -> UserBundle:
    """Pack the package of every registered tool into one zip, with an index of where each tool is.

    Reads files and metadata only: no code of a user's runs here, since sandboxd may be root.
    """
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
    out = io.BytesIO()  # stored, not deflated: unpacking costs a start more than reading
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
    files = sorted(folder.rglob("*"))
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


def _check(top: str, paths: list[Path]) -> None:
    """Raise ConfigError for a package that sandboxes could not read, or would read for long."""
    mend = "move the tool into a package of its own"
    if compiled := [path.name for path in paths if path.suffix in COMPILED]:
        raise ConfigError(f"{top} holds compiled {compiled[0]}", "Python and data files", mend)
    if (total := sum(path.stat().st_size for path in paths)) > MAX_BYTES:
        raise ConfigError(f"{top} has {total} bytes", f"at most {MAX_BYTES}", mend)
