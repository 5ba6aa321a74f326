"""What Apptainer builds, by spython: always a folder (`--sandbox`), never with sudo.

spython hides failures (its result says nothing, its library code calls `sys.exit`), so what counts
is the folder that is on disk afterwards.
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prorl.errors import StorageError
from prorl.sandbox.images.layers import ToolFailed


def build(source: str, recipe: str, work: Path) -> None:
    """`singularity build --sandbox WORK/tree RECIPE`, by spython; it worked if that is there."""
    client, tree = client_class(), work / "tree"
    _environment(work)
    with redirect_stdout(io.StringIO()) as said:
        try:
            client.build(
                recipe=recipe, image=str(tree), sandbox=True, sudo=False, options=["--fix-perms"]
            )
        except SystemExit:
            pass  # how its library code gives up; what is on disk decides
    # it says everything twice
    print("\n".join(dict.fromkeys(said.getvalue().splitlines())), flush=True)
    if not tree.is_dir():
        raise failed(source)


def client_class() -> Any:
    """spython's Client. Raises StorageError where it is not installed."""
    try:
        from spython.main import Client
    except ImportError:
        raise StorageError("spython is not installed; pip install 'prorl[apptainer]'") from None
    return Client


def failed(source: str) -> ToolFailed:
    """What is raised where no folder came out."""
    return ToolFailed(f"{source}: Apptainer made nothing", mistake=True)


def _environment(work: Path) -> None:
    """Point PATH and HOME into the workplace.

    spython finds `singularity` by PATH alone, and Apptainer keeps its state below HOME.
    """
    program = shutil.which("singularity") or shutil.which("apptainer")
    if not program:
        raise StorageError(
            "neither singularity nor apptainer is installed; see configs/install-apptainer.sh"
        )
    for name in ("bin", "home", "tmp"):
        (work / name).mkdir(exist_ok=True)
    (work / "bin" / "singularity").symlink_to(program)
    os.environ["PATH"] = f"{work / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    os.environ["HOME"] = os.environ["APPTAINER_CONFIGDIR"] = os.environ["APPTAINER_CACHEDIR"] = str(
        work / "home"
    )
    os.environ["APPTAINER_TMPDIR"] = str(work / "tmp")
