"""Makes images, in the child process of `image_child.py`.

Sources: a folder, a .sif, a definition file, a Debian suite; no registry.

spython's Client builds what Apptainer understands (.sif, .def), always into a folder (`--sandbox`),
never with sudo. It hides failures (its result says nothing, its library code calls `sys.exit`), so
what counts is the folder that is on disk afterwards.

As root a definition's %post runs with the capabilities of an ordinary container engine, and a .sif
is unpacked as `nobody`: what an image holds is foreign. As an ordinary user %post is root in a user
namespace only (Apptainer's fakeroot).
"""

from __future__ import annotations

import fcntl
import io
import os
import pwd
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from prorl.errors import ConflictError, NotFoundError, StorageError, UserError
from prorl.linux import calls
from prorl.linux.forked import Forked
from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.layers import ToolFailed, make_layer
from prorl.sandbox.images.registry import Image, Registry, is_name, is_sif
from prorl.sandbox.images.tree import add_mount_points, copy_tree, digest_of, has_shell, tidy

DEBIAN = re.compile(r"debian:([a-z][a-z0-9-]*)")
SOURCES = "a folder (also a Dockerfile's), FILE.sif, FILE.def or debian:SUITE"
POST_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SYS_CHROOT",
]
FROM = re.compile(r"(?im)^(\s*from:\s*)(\S+)\s*$")
MIRROR = re.compile(r"https?://\S+/debian/?(?=\s|$)")


def make(registry: Registry, job: dict[str, str]) -> Image:
    """The image or layer that a job asks for.

    A job is `{"do": "unpack", "source": SIF}`, `{"do": "build", "source", "name", "include",
    "mirror", "replace"}`, or a layer's (`layers.py`).

    Raises UserError, ToolFailed, OSError.
    """
    registry.open()
    if job["do"] == "layer":
        return make_layer(registry, job)
    if job["do"] == "unpack":
        return _unpacked(registry, job["source"])
    name = job["name"]
    if not is_name(name):
        registry.name(name, "")  # says what a name is like
    if name in registry.names() and not job.get("replace"):
        raise ConflictError(
            f"image {name} exists",
            "a name that is free",
            "give --replace to make it stand for the new one",
        )
    return registry.name(name, _built(registry, job).digest)


def _built(registry: Registry, job: dict[str, str]) -> Image:
    source = job["source"]
    if os.path.isfile(source) and is_sif(source):
        return _unpacked(registry, source)
    with registry.workplace() as work:
        tree = work / "tree"
        _fill(registry, job, work)
        _check(tree, source)
        digest = digest_of(str(tree))
        if registry.has(digest):
            return registry.image(digest)
        with registry.lock(digest, fcntl.LOCK_EX):
            return registry.keep(tree, digest, source)


def _fill(registry: Registry, job: dict[str, str], work: Path) -> None:
    """Make the folder `tree` of a workplace from a source that is no .sif. Raises UserError."""
    source, tree = job["source"], work / "tree"
    if match := DEBIAN.fullmatch(source):
        _debian(match[1], tree, work, job)
    elif recipe := dockerfile.find(source):
        _dockerfile(registry, recipe, work)
    elif os.path.isdir(source):
        copy_tree(source, str(tree), str(registry.root))
    elif source.endswith(".def") and os.path.isfile(source):
        _definition(registry, source, work)
    else:
        raise UserError(f"image source {source!r}", f"{SOURCES} that exists")


def _check(tree: Path, source: str) -> None:
    tidy(str(tree))
    if not has_shell(str(tree)):
        raise UserError(
            f"{source} is no root file system: it has no bash", "bin/bash or usr/bin/bash in it"
        )
    add_mount_points(str(tree))


# ---- .sif


def _unpacked(registry: Registry, sif: str) -> Image:
    """The folder of a .sif, unpacked by the first who asks; others wait for its lock."""
    if not is_sif(sif):
        raise UserError(f"{sif} is no SIF image", SOURCES)
    digest = registry.digest_of_file(sif)
    if registry.has(digest):
        return registry.image(digest)
    with registry.lock(digest, fcntl.LOCK_EX):
        if registry.has(digest):
            return registry.image(digest)
        with registry.workplace() as work:
            tree = work / "tree"
            if os.getuid() == 0:
                _unpack_as_nobody(sif, work)
            else:
                _spython(sif, sif, work)
            _check(tree, sif)
            return registry.keep(tree, digest, sif)


def _unpack_as_nobody(sif: str, work: Path) -> None:
    """Unpack as `nobody`, in a mount namespace of its own.

    Folders that `nobody` may not enter do not matter there.
    """
    _client()  # imported while we can still read it
    place, nobody = Path("/mnt"), pwd.getpwnam("nobody")
    (work / "image.sif").touch()
    os.chown(work, nobody.pw_uid, nobody.pw_gid)
    pid = os.fork()
    if pid == 0:
        with Forked(sys.stdout.fileno()):
            calls.unshare(calls.CLONE_NEWNS)
            calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
            calls.mount(sif, str(work / "image.sif"), None, calls.MS_BIND)
            calls.mount(str(work), str(place), None, calls.MS_BIND | calls.MS_REC)
            calls.drop_to(nobody.pw_uid)
            try:
                _spython(sif, str(place / "image.sif"), place)
            except ToolFailed:
                os._exit(1)  # its words are on standard output
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise _failed(sif)


# ---- a definition file


def _definition(registry: Registry, source: str, work: Path) -> None:
    """What a definition file makes, whatever Apptainer can bootstrap here.

    That is localimage (a path, or a name of this registry), scratch, debootstrap.
    """
    text = Path(source).read_text()
    if re.search(r"(?im)^\s*bootstrap:\s*localimage\s*$", text):
        text = FROM.sub(lambda match: match[1] + _base(registry, match[2]), text)
    copy = work / "image.def"
    copy.write_text(text)
    if os.getuid() == 0:
        os.environ["APPTAINER_NO_PRIVS"] = "1"
        os.environ["APPTAINER_ADD_CAPS"] = ",".join(f"CAP_{name}" for name in POST_CAPABILITIES)
    else:
        # else files that %post gives away are a stranger's, whom we may not touch
        os.environ["APPTAINER_IGNORE_SUBUID"] = "1"
    _spython(source, str(copy), work)


def _dockerfile(registry: Registry, recipe: Path, work: Path) -> None:
    """What a Dockerfile makes on top of an image of this registry."""
    base = dockerfile.base_of(recipe.read_text())
    name = dockerfile.image_name(base)
    if name not in registry.names():
        raise UserError(
            f"{recipe}: its base {base} is not here",
            f"an image {name} in {registry.root}",
            f"prorl image build {name} --from FOLDER|FILE.sif|debian:SUITE",
        )
    made = work / "docker.def"
    made.write_text(dockerfile.definition(recipe, registry.find(name).path))
    _definition(registry, str(made), work)


def _base(registry: Registry, base: str) -> str:
    """A name of the registry or a .sif becomes its folder; other words stay as they are."""
    if is_name(base) and not os.path.exists(base):
        try:
            return registry.find(base).path
        except NotFoundError:
            return base
    return (
        _unpacked(registry, os.path.abspath(base)).path
        if os.path.isfile(base) and is_sif(base)
        else base
    )


# ---- a Debian suite


def _debian(suite: str, tree: Path, work: Path, job: dict[str, str]) -> None:
    given = job.get("mirror") or _host_mirror()
    mirror = [given] if given else []
    words = ["--variant=minbase", *([f"--include={job['include']}"] if job.get("include") else [])]
    if shutil.which("mmdebstrap"):
        _check_subuids(job["source"])
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


def _check_subuids(source: str) -> None:
    """Raise UserError where mmdebstrap could not make files of other owners."""
    if os.getuid() != 0 and not _has_subuids():
        raise UserError(
            f"{source} without root",
            "uids of one's own (/etc/subuid, newuidmap)",
            "add a line for this user to /etc/subuid and /etc/subgid, or build it as root",
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


def _run(source: str, argv: list[str]) -> None:
    if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ToolFailed(f"{source}: {argv[0]} failed", mistake=False)


# ---- spython


def _spython(source: str, recipe: str, work: Path) -> None:
    """`singularity build --sandbox WORK/tree RECIPE`, by spython; it worked if that is there."""
    client, tree = _client(), work / "tree"
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
        raise _failed(source)


def _client() -> Any:
    try:
        from spython.main import Client
    except ImportError:
        raise StorageError("spython is not installed; pip install 'prorl[apptainer]'") from None
    return Client


def _failed(source: str) -> ToolFailed:
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
