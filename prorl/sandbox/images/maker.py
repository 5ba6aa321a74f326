"""Makes images, in the child process of `child.py`.

Sources: a folder; a .sif or a definition file, by Apptainer; a Dockerfile, by buildah or podman.

As root a definition's %post runs with the capabilities of an ordinary container engine, and a .sif
is unpacked as `nobody`: what an image holds is foreign. As an ordinary user %post is root in a user
namespace only (Apptainer's fakeroot).

Apptainer runs by spython: always a folder (`--sandbox`), never with sudo. spython hides failures
(its result says nothing, its library code calls `sys.exit`), so what counts is the folder that is
on disk afterwards.

What speaks HTTP is imported where it is needed: most jobs need none.
"""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from prorl.errors import ConflictError, NotFoundError, StorageError, UserError
from prorl.linux import calls
from prorl.linux.forked import ForkedChild
from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.layers import ToolFailed, make_layer
from prorl.sandbox.images.registry import Image, Registry, digest_of_sif, is_name, is_sif
from prorl.sandbox.images.stack import merge
from prorl.sandbox.images.tree import add_mount_points, check_shell, copy_tree, digest_of, tidy

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
FROM = re.compile(r"(?im)^([^\S\n]*from:[^\S\n]*)(\S+)[^\S\n]*$")


def make(
    registry: Registry, job: dict[str, str], begin_build: Callable[[], object] = lambda: None
) -> Image:
    """The image or layer that a job asks for.

    A job is `{"do": "unpack", "source": SIF}`, `{"do": "pull", "source", "name", "mirrors"}`,
    `{"do": "build", "source", "name", "replace", "settings"}`, `{"do": "dockerfile", "source",
    "name", "settings"}` (made once for each name), or a layer's (`layers.py`). `begin_build` is
    called when a Dockerfile's build begins, and not where another one builds it.

    Raises UserError, ToolFailed, OSError.
    """
    registry.open()
    if job["do"] == "layer":
        return make_layer(registry, job)
    if job["do"] == "pull":
        from prorl.sandbox.images.pull import Pull

        return Pull(registry, json.loads(job["mirrors"])).pull(job["name"], job["source"])
    if job["do"] == "unpack":
        return _unpacked(registry, job["source"])
    name = job["name"]
    if job["do"] == "dockerfile":
        with registry.lock(f"{name}.new"):  # others that want it wait for this build
            if name not in registry.names():
                return registry.name(name, _shared(registry, job, begin_build).digest)
        return registry.find(name)
    if not is_name(name):
        registry.name(name, "")  # says what a name is like
    if name in registry.names() and not job.get("replace"):
        raise ConflictError(
            f"image {name} exists",
            "a name that is free",
            "give --replace to make it stand for the new one",
        )
    return registry.name(name, _built(registry, job).digest)


def _shared(registry: Registry, job: dict[str, str], begin_build: Callable[[], object]) -> Image:
    """A Dockerfile's image: built here, or taken from the store of the build's settings.

    That a store fails costs a build, and no image: what it holds wrongly is replaced.
    """
    settings, name = json.loads(job["settings"]), job["name"]
    if not (url := settings.get("store")):
        begin_build()
        return _built(registry, job)
    from prorl.sandbox.images.pull import Pull
    from prorl.sandbox.images.store import ImageStore, ImageStoreError

    pull = Pull(registry, {})  # first: it forks, and file systems start threads
    store, shared = None, None
    with ExitStack() as stack:
        try:
            store = ImageStore(url)
            claim = store.claimed(name, can_build=bool(dockerfile.program()))
            if shared := stack.enter_context(claim):
                return pull.image(shared, str(dockerfile.recipe_of(Path(job["source"]))))
        except (ImageStoreError, UserError) as error:
            print(f"built here, since the store of images failed: {error}", flush=True)

        def put(archive: Path, work: Path) -> None:
            try:
                if store:
                    store.put(name, archive, work, replaces=shared is not None)
            except ImageStoreError as error:
                print(f"not in the store of images: {error}", flush=True)

        begin_build()
        return _built(registry, job, put)


def _built(
    registry: Registry, job: dict[str, str], put: Callable[[Path, Path], object] = lambda *_: None
) -> Image:
    """`put` gets a built docker-archive, and a folder for temporary files."""
    source = job["source"]
    if os.path.isfile(source) and is_sif(source):
        return _unpacked(registry, source)
    with registry.workplace() as work:
        if recipe := dockerfile.recipe_of(Path(source)):
            from prorl.sandbox.images.pull import Pull

            archive = dockerfile.build(recipe, work, json.loads(job.get("settings") or "{}"))
            image = Pull(registry, {}).image(f"docker-archive:{archive}", str(recipe))
            put(archive, work)
            return image
        tree = work / "tree"
        if os.path.isdir(source):
            copy_tree(source, str(tree), str(registry.root))
        elif source.endswith(".def") and os.path.isfile(source):
            _definition(registry, source, work)
        else:
            raise UserError(f"image source {source!r}", f"{SOURCES} that exists")
        _check(tree, source)
        return registry.make(
            digest_of(str(tree)), source, lambda place: os.rename(tree, place / "tree")
        )


def _check(tree: Path, source: str) -> None:
    tidy(str(tree))
    check_shell(str(tree), source)
    add_mount_points(str(tree))


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
    with redirect_stdout(io.StringIO()) as printed:
        try:
            client.build(
                recipe=recipe, image=str(tree), sandbox=True, sudo=False, options=["--fix-perms"]
            )
        except SystemExit:
            pass  # how its library code gives up; what is on disk decides
    # it says everything twice
    print("\n".join(dict.fromkeys(printed.getvalue().splitlines())), flush=True)
    if not tree.is_dir():
        raise failed(source)


def write_sif(registry: Registry, name: str, target: Path) -> None:
    """Write the image of a name as a .sif, which Apptainer runs elsewhere and tasks may name.

    Raises NotFoundError, ConflictError where the file exists, StorageError.
    """
    image = registry.find(name)
    if target.exists():
        raise ConflictError(f"{target} exists", "a path that is free", "remove it, or name another")
    if not (builder := shutil.which("apptainer") or shutil.which("singularity")):
        raise StorageError("neither apptainer nor singularity is installed")
    with registry.lock(image.digest, shared=True), registry.workplace() as work:
        merge(registry.stack(image.digest)[::-1], work / "tree")
        argv = [builder, "--silent", "build", str(work / "image.sif"), str(work / "tree")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StorageError(f"{name}: {builder} made no .sif: {done.stderr.strip()[-300:]}")
        shutil.move(work / "image.sif", target)


def client_class() -> Any:
    """spython's Client. Raises StorageError where it is not installed."""
    try:
        from spython.main import Client
    except ImportError:
        raise StorageError("spython is not installed; install prorl's extra `apptainer`") from None
    return Client


def failed(source: str) -> ToolFailed:
    """Returns the error to raise where no folder came out."""
    return ToolFailed(f"{source}: Apptainer made nothing", mistake=True)


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

    return registry.make(digest_of_sif(sif), sif, fill)


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
        with ForkedChild(sys.stdout.fileno()):
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


def _definition(registry: Registry, source: str, work: Path) -> None:
    """Builds a definition file, with whatever Apptainer can bootstrap here.

    That is localimage (a path, or a name of this registry), scratch, debootstrap.
    """
    text = Path(source).read_text()
    if re.search(r"(?im)^[^\S\n]*bootstrap:[^\S\n]*localimage[^\S\n]*$", text):
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
            image = registry.find(base)
        except NotFoundError:
            return base
        below = registry.stack(image.digest)
        if len(below) == 1:
            return below[0]
        merge(below[::-1], work / "base")
        return str(work / "base")
    return (
        _unpacked(registry, os.path.abspath(base)).path
        if os.path.isfile(base) and is_sif(base)
        else base
    )
