"""The programs that make images: Apptainer, buildah or podman, mmdebstrap or debootstrap.

Apptainer runs by spython: always a folder (`--sandbox`), never with sudo. spython hides failures
(its result says nothing, its library code calls `sys.exit`), so what counts is the folder that is
on disk afterwards.
"""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prorl.errors import StorageError, UserError
from prorl.sandbox.images.layers import ToolFailed

MIRROR = re.compile(r"https?://\S+/debian/?(?=\s|$)")
WORKDIR_FILE = ".prorl-workdir"
"""Of an image: the working directory that its Dockerfile says; env `harbor` reads it."""
ENVIRONMENT_FILE = ".singularity.d/env/90-environment.sh"
"""Of an image: its variables, where Apptainer keeps them."""


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


def build_dockerfile(recipe: Path, tree: Path, work: Path) -> None:
    """Make what a Dockerfile says, by buildah or podman, whichever is installed.

    Its base comes from where that program looks. Raises UserError where there is neither.
    """
    program = shutil.which("buildah") or shutil.which("podman")
    if not program:
        raise UserError(
            f"{recipe} needs buildah or podman",
            "one that is installed",
            "apt-get install buildah, or give --from what another machine has built: its root"
            " file system as a folder, or a .sif",
        )
    # its storage is the user's own: base images are pulled once
    os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    number = work / "image-id"
    words = [program, "build", "--isolation", "chroot", "--iidfile", str(number)]
    words += ["--output", f"type=local,dest={tree}", "--file", str(recipe), str(recipe.parent)]
    _run(str(recipe), words, mistake=True)
    image = number.read_text()
    look = subprocess.run(
        [program, "inspect", "--type", "image", image], capture_output=True, text=True, check=True
    )
    about = json.loads(look.stdout)
    config = about[0]["Config"] if isinstance(about, list) else about["OCIv1"]["config"]
    _run(str(recipe), [program, "rmi", image])
    _write_inside(tree, WORKDIR_FILE, f"{config.get('WorkingDir') or '/'}\n")
    pairs = (pair.partition("=") for pair in config.get("Env") or ())
    lines = (f"export {name}={shlex.quote(value)}\n" for name, _, value in pairs)
    _write_inside(tree, ENVIRONMENT_FILE, "".join(lines))


def _write_inside(tree: Path, name: str, text: str) -> None:
    """Write a file of a foreign tree, none of whose links is followed."""
    place = tree
    for part in name.split("/"):
        place /= part
        if place.is_symlink():
            place.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


# ---- a Debian suite


def make_debian(suite: str, tree: Path, work: Path, job: dict[str, str]) -> None:
    """Make the folder of a Debian suite by mmdebstrap or debootstrap.

    Raises UserError, ToolFailed.
    """
    given = job.get("mirror") or _host_mirror()
    mirror = [given] if given else []
    words = ["--variant=minbase", *([f"--include={job['include']}"] if job.get("include") else [])]
    if shutil.which("mmdebstrap"):
        if os.getuid() != 0 and not _has_subuids():  # it makes files of other owners
            raise UserError(
                f"{job['source']} without root",
                "uids of one's own (/etc/subuid, newuidmap)",
                "add a line for this user to /etc/subuid and /etc/subgid, or build it as root",
            )
        archive = str(work / "root.tar")
        _run(job["source"], ["mmdebstrap", *words, "--format=tar", suite, archive, *mirror])
        tree.mkdir()
        unpack = ["tar", "--extract", "--file", archive, "--directory", str(tree)]
        _run(job["source"], [*unpack, "--no-same-owner", "--exclude=./dev/*"])
    elif shutil.which("debootstrap") and os.getuid() == 0:
        _run(job["source"], ["debootstrap", *words, suite, str(tree), *mirror])
    else:
        raise UserError(
            f"{job['source']} needs mmdebstrap, or debootstrap as root",
            "one that is installed",
            "apt-get install mmdebstrap",
        )


def _has_subuids() -> bool:
    """Whether this user may map a range of uids.

    Unpacking a package as `root` of a namespace needs it.
    """
    mine = (f"{os.getuid()}:", f"{pwd.getpwuid(os.getuid()).pw_name}:")
    path = Path("/etc/subuid")
    return (
        bool(shutil.which("newuidmap"))
        and path.is_file()
        and any(line.startswith(mine) for line in path.read_text().splitlines())
    )


def _host_mirror() -> str:
    """The Debian mirror that this machine uses itself, or an empty string."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.is_file():
            lines = [
                line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
            ]
            if match := MIRROR.search("\n".join(lines)):
                return match[0]
    return ""


def _run(source: str, argv: list[str], *, mistake: bool = False) -> None:
    """Run a program; `mistake`: the source is to blame where it fails."""
    if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ToolFailed(f"{source}: {os.path.basename(argv[0])} failed", mistake=mistake)
