"""The programs that make images: Apptainer, buildah or podman.

Apptainer runs by spython: always a folder (`--sandbox`), never with sudo. spython hides failures
(its result says nothing, its library code calls `sys.exit`), so what counts is the folder that is
on disk afterwards.
"""

from __future__ import annotations

import io
import os
import pwd
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prorl.errors import StorageError, UserError
from prorl.sandbox.images.layers import ToolFailed

# ---- .sif and definition files


def build(source: str, recipe: str, work: Path) -> None:
    """`singularity build --sandbox WORK/tree RECIPE`, by spython; it worked if that is there."""
    client, tree = client_class(), work / "tree"
    program = shutil.which("singularity") or shutil.which("apptainer")
    if not program:
        raise StorageError(
            "neither singularity nor apptainer is installed; see configs/install-apptainer.sh"
        )
    for name in ("bin", "home", "tmp"):
        (work / name).mkdir(exist_ok=True)
    # spython finds `singularity` by PATH alone, and Apptainer keeps its state below HOME
    (work / "bin" / "singularity").symlink_to(program)
    os.environ["PATH"] = f"{work / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    os.environ["HOME"] = os.environ["APPTAINER_CONFIGDIR"] = os.environ["APPTAINER_CACHEDIR"] = str(
        work / "home"
    )
    os.environ["APPTAINER_TMPDIR"] = str(work / "tmp")
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


# ---- a Dockerfile


def dockerfile_program() -> str:
    """The path of what builds a Dockerfile here, or an empty string."""
    return shutil.which("buildah") or shutil.which("podman") or ""


def build_dockerfile(recipe: Path, layout: Path) -> None:
    """Make what a Dockerfile says, by buildah or podman, as an OCI layout with one image.

    Its base comes from where that program looks. Raises UserError where there is neither.
    """
    program = dockerfile_program()
    if not program:
        raise UserError(
            f"{recipe} needs buildah or podman",
            "one that is installed",
            "apt-get install buildah, or `prorl image pull` what another machine has built",
        )
    # its storage is the user's own: base images are pulled once
    os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    number = layout.with_name("image-id")
    words = [program, "build", "--isolation", "chroot", "--iidfile", str(number)]
    _run(str(recipe), [*words, "--file", str(recipe), str(recipe.parent)], mistake=True)
    image = number.read_text()
    _run(str(recipe), [program, "push", "--quiet", image, f"oci:{layout}"])
    _run(str(recipe), [program, "rmi", image])


def _run(source: str, argv: list[str], *, mistake: bool = False) -> None:
    """Run a program; `mistake`: the source is to blame where it fails."""
    if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ToolFailed(f"{source}: {os.path.basename(argv[0])} failed", mistake=mistake)
