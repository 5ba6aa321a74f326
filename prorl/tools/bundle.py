"""Packs the tool server and ptyprocess into one zipapp: for any Python >= 3.8 in any image."""

from __future__ import annotations

import importlib.util
import io
import marshal
import zipfile
from functools import cache
from importlib import resources
from pathlib import Path

ENTRY = b"from prorl.tools.server.main import main\nmain()\n"
STAMP = (2020, 1, 1, 0, 0, 0)
"""Of every member, so that equal sources give equal bytes."""


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
    out = io.BytesIO()  # stored, not deflated: unpacking costs a start more than reading
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, STAMP), members[name])
    return out.getvalue()


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
