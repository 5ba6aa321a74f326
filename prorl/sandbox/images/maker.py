"""Makes images, in the child process of `child.py`.

Sources: a folder, a .sif, a definition file, a Dockerfile; `builder.py` has the programs for it.

As root a definition's %post runs with the capabilities of an ordinary container engine, and a .sif
is unpacked as `nobody`: what an image holds is foreign. As an ordinary user %post is root in a user
namespace only (Apptainer's fakeroot).
"""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
from pathlib import Path

from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.linux import calls
from prorl.linux.forked import Forked
from prorl.sandbox.images.builder import (
    build,
    build_dockerfile,
    client_class,
    failed,
)
from prorl.sandbox.images.layers import ToolFailed, make_layer
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Image, Registry, is_name, is_sif
from prorl.sandbox.images.stack import merge
from prorl.sandbox.images.tree import add_mount_points, copy_tree, digest_of, has_shell, tidy

SOURCES = "a folder (also a Dockerfile's), FILE.sif or FILE.def"
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
DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
"""Where a task's or a build's folder has it."""
FROM = re.compile(r"(?im)^(\s*from:\s*)(\S+)\s*$")


def make(registry: Registry, job: dict[str, str]) -> Image:
    """The image or layer that a job asks for.

    A job is `{"do": "unpack", "source": SIF}`, `{"do": "pull", "source", "name", "mirrors"}`,
    `{"do": "build", "source", "name", "replace"}`, or a layer's (`layers.py`).

    Raises UserError, ToolFailed, OSError.
    """
    registry.open()
    if job["do"] == "layer":
        return make_layer(registry, job)
    if job["do"] == "pull":
        return Pull(registry, json.loads(job["mirrors"])).pull(job["name"], job["source"])
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
        if recipe := next((p for name in DOCKERFILES if (p := Path(source, name)).is_file()), None):
            build_dockerfile(recipe, work / "layout")
            return Pull(registry, {}).image(f"oci:{work / 'layout'}", str(recipe))
        tree = work / "tree"
        _fill(registry, source, work)
        _check(tree, source)
        digest = digest_of(str(tree))
        if registry.has(digest):
            return registry.image(digest)
        with registry.lock(digest):
            return registry.keep(tree, digest, source)


def _fill(registry: Registry, source: str, work: Path) -> None:
    """Make the folder `tree` of a workplace from a source that is no .sif. Raises UserError."""
    if os.path.isdir(source):
        copy_tree(source, str(work / "tree"), str(registry.root))
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
    """The folder of a .sif, unpacked by the first who asks."""
    if not is_sif(sif):
        raise UserError(f"{sif} is no SIF image", SOURCES)

    def fill(work: Path) -> None:
        if os.getuid() == 0:
            _unpack_as_nobody(sif, work)
        else:
            build(sif, sif, work)
        _check(work / "tree", sif)

    return registry.make(registry.digest_of_file(sif), sif, fill)


def _unpack_as_nobody(sif: str, work: Path) -> None:
    """Unpack as `nobody`, in a mount namespace of its own.

    Folders that `nobody` may not enter do not matter there.
    """
    client_class()  # imported while we can still read it
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
                build(sif, str(place / "image.sif"), place)
            except ToolFailed:
                os._exit(1)  # its words are on standard output
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise failed(sif)


# ---- a definition file


def _definition(registry: Registry, source: str, work: Path) -> None:
    """What a definition file makes, whatever Apptainer can bootstrap here.

    That is localimage (a path, or a name of this registry), scratch, debootstrap.
    """
    text = Path(source).read_text()
    if re.search(r"(?im)^\s*bootstrap:\s*localimage\s*$", text):
        text = FROM.sub(lambda match: match[1] + _base(registry, match[2], work), text)
    copy = work / "image.def"
    copy.write_text(text)
    if os.getuid() == 0:
        os.environ["APPTAINER_NO_PRIVS"] = "1"
        os.environ["APPTAINER_ADD_CAPS"] = ",".join(f"CAP_{name}" for name in POST_CAPABILITIES)
    else:
        # else files that %post gives away are a stranger's, whom we may not touch
        os.environ["APPTAINER_IGNORE_SUBUID"] = "1"
    build(source, str(copy), work)


def _base(registry: Registry, base: str, work: Path) -> str:
    """A name of the registry or a .sif becomes its folder; other words stay as they are."""
    if is_name(base) and not os.path.exists(base):
        try:
            found = registry.find(base)
        except NotFoundError:
            return base
        below = registry.stack(found.digest)
        if len(below) == 1:
            return below[0]
        merge(below[::-1], work / "base")
        return str(work / "base")
    return (
        _unpacked(registry, os.path.abspath(base)).path
        if os.path.isfile(base) and is_sif(base)
        else base
    )
