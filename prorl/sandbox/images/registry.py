"""The images of one node: NAME -> digest -> a folder that is a root file system.

Every sandbox shares it read-only.

    ROOT/names/NAME          a hard link to what it stands for now, DIGEST.json
    ROOT/images/DIGEST/      a folder, complete, for it came by rename; a stack of others has none
    ROOT/images/DIGEST.json  what it was made from, its size, the stack
    ROOT/blobs/DIGEST        a layer that is coming from a container registry, or what came of it
    ROOT/locks/DIGEST        shared: in use by a sandboxd; exclusive: being removed
    ROOT/locks/DIGEST.new    being made: others wait
    ROOT/work/TOKEN/         in the making; its maker holds TOKEN.lock: without, it is a dead one's

Locks are flock(2): they end with their holder, however it dies. A digest is the sha256 of a tree's
names, modes, links and contents, of a pulled image's configuration, of a layer's archive (`-plain`:
of a form that no overlay reads), of what a layer of packages is made from, or of a .sif's path,
size, mtime and inode. Owned by one user. Nodes may share it where flock(2) holds across them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from prorl.errors import ConflictError, NotFoundError, StorageError, UserError
from prorl.linux import calls, locks
from prorl.linux.files import write_private
from prorl.sandbox.images.tree import measure
from prorl.sandbox.trees import remove_tree
from prorl.types import DOCKER

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A registry name; whatever has a slash is a path."""
SIF_MAGIC, SIF_MAGIC_AT = b"SIF_MAGIC", 32
"""Sylabs' SIF format: a launch line of 32 bytes, then the magic."""
BUILT = "dockerfile-"
"""The beginning of the names of images that are built from a task's folder (`dockerfile.py`)."""
HUB = "docker.io"
"""The registry that engines put before a reference that names none."""
PULLING = "pulling"
"""The lock that pulls share."""
LISTED = 8
"""The most names that an error lists: a node may have a thousand."""
FOLDERS = ("names", "images", "blobs", "locks", "work", "failures")
FAILURE_S = 3600.0
"""The seconds for which a build that failed counts: a rollout that needs it is told at once. `prorl
run` and `prorl image build` try anew before that; with more, a mirror that is back would not be
seen by services that run on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of the registry, as `prorl image ls` shows it."""

    digest: str
    source: str
    """The source that it was made from, for people."""
    made_at: float
    """Seconds since the epoch."""
    bytes: int = 0
    files: int = 0
    layers: tuple[str, ...] = ()
    """Digests of what lies below its own folder, lowest first; others share them."""
    is_layer: bool = False
    path: str = field(default="", compare=False)
    """The path of its folder; empty for a stack."""
    names: tuple[str, ...] = field(default=(), compare=False)


def default_root() -> Path:
    """Returns the folder of images unless the configuration says otherwise: the user's cache
    folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl" / "images"


def plain(reference: str) -> str:
    """A reference without what container engines add by themselves.

    >>> plain("docker://docker.io/library/debian:latest")
    'docker://debian'
    """
    return reference.replace(f"//{HUB}/", "//").replace("//library/", "//").removesuffix(":latest")


def is_name(image: str) -> bool:
    """Returns whether a task's `image` is a name of the registry and no path."""
    return NAME.fullmatch(image) is not None


def is_sif(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(SIF_MAGIC_AT + len(SIF_MAGIC)).endswith(SIF_MAGIC)


def digest_of_sif(path: str) -> str:
    """Names what a .sif is unpacked to, as long as nobody changes the file."""
    about = os.stat(path)
    key = f"{os.path.realpath(path)}|{about.st_size}|{about.st_mtime_ns}|{about.st_ino}"
    return hashlib.sha256(os.fsencode(key)).hexdigest()


class Registry:
    """The images of one node, all state on disk; no method takes long unless it says so."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def open(self) -> None:
        """Make the folders, remove what dead makers left. Raises StorageError."""
        try:
            for name in FOLDERS:
                (self.root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise StorageError(f"image registry {self.root}: {error.strerror}") from error

    # ---- builds that failed

    def note_failure(self, name: str, reason: str) -> None:
        """Remember why a name's image cannot be built: who needs it next hears that at once."""
        write_private(self.root / "failures" / name, reason)

    def failure_of(self, name: str) -> str:
        """Returns why the last build failed; empty after FAILURE_S, and where none did."""
        path = self.root / "failures" / name
        try:
            is_recent = time.time() - path.stat().st_mtime < FAILURE_S
            return path.read_text() if is_recent else ""
        except OSError:
            return ""

    # ---- looking

    def digest_of_name(self, name: str) -> str:
        """Returns the digest that a name stands for. Raises NotFoundError that lists some of those
        that are there.
        """
        try:
            return _digest(self.root / "names" / name)
        except OSError:
            names = self.names()
            listed = ", ".join(names[:LISTED]) or "none yet; `prorl image build` makes one"
            if more := names[LISTED:]:
                listed += f" and {len(more)} more (`prorl image ls`)"
            raise NotFoundError(f"no image {name!r} in {self.root}; there are: {listed}") from None

    def find(self, name: str) -> Image:
        """The image that a name stands for, whatever others do, too. Raises NotFoundError."""
        return self.image(self.digest_of_name(name), (name,))

    def image(self, digest: str, names: tuple[str, ...] = ()) -> Image:
        """Returns the record of a digest, whose names the caller knows.

        Raises NotFoundError when its folder is not complete.
        """
        try:
            about = Image(**json.loads((self.root / "images" / f"{digest}.json").read_text()))
        except OSError:
            raise NotFoundError(f"no image {digest} in {self.root}") from None
        return replace(
            about,
            layers=tuple(about.layers),
            path="" if about.layers else str(self.folder(digest)),
            names=names,
        )

    def stack(self, digest: str) -> list[str]:
        """The folders of an image, topmost first."""
        return [
            str(self.folder(layer)) for layer in reversed(self.image(digest).layers or (digest,))
        ]

    def folder(self, digest: str) -> Path:
        """The path where the tree of a digest is, or will be once it is made."""
        return self.root / "images" / digest

    def names(self, digest: str = "") -> list[str]:
        """All names, or those of one digest."""
        folder = self.root / "names"
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return [
            path.name
            for path in paths
            if is_name(path.name) and (not digest or _digest(path) == digest)
        ]

    def list(self) -> list[Image]:
        """Every image, named ones first."""
        folder = self.root / "images"
        digests = [path.stem for path in folder.glob("*.json")] if folder.is_dir() else []
        names: dict[str, list[str]] = {}
        for name in self.names():
            names.setdefault(_digest(self.root / "names" / name), []).append(name)
        return sorted(
            (self.image(digest, tuple(names.get(digest, ()))) for digest in digests),
            key=lambda image: (not image.names, image.names, image.digest),
        )

    # ---- making and removing

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """A folder to make an image in.

        Whatever is still in it at the end is removed, by us or by whoever comes after our death.
        """
        folder = self.root / "work" / secrets.token_hex(8)
        with locks.locked(folder.with_suffix(".new"), wait=True):
            # seen by others only when it is locked
            folder.with_suffix(".new").rename(folder.with_suffix(".lock"))
            folder.mkdir()
            try:
                yield folder
            finally:
                remove_tree(str(folder))
                folder.with_suffix(".lock").unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        return self.folder(digest).with_suffix(".json").exists()

    def make(
        self,
        digest: str,
        source: str,
        fill: Callable[[Path], Sequence[str] | None],
        *,
        is_layer: bool = False,
    ) -> Image:
        """The image of a digest, made by the first who asks; others wait for it.

        `fill` makes the folder `tree` of a workplace, or gives the layers that are the image. It is
        on disk, then visible.
        """
        if not self.has(digest):
            with self.lock(f"{digest}.new"), self.workplace() as work:
                if not self.has(digest):
                    layers = fill(work) or ()
                    self._keep(work / "tree", digest, source, layers, is_layer)
        return self.image(digest)

    def _keep(
        self, tree: Path, digest: str, source: str, layers: Sequence[str], is_layer: bool
    ) -> None:
        num_bytes, num_files = (0, 0) if layers else measure(str(tree))
        about = {
            "digest": digest,
            "source": source,
            "made_at": time.time(),
            "bytes": num_bytes,
            "files": num_files,
            "layers": layers,
            "is_layer": is_layer,
        }
        target = self.folder(digest)
        if not layers:
            calls.sync_file_system(str(tree))
            with self.lock(digest):  # who removes it may be at it
                if target.exists():  # a maker died between the two renames
                    target.rename(tree.with_name("stale"))
                tree.rename(target)
        write_private(target.with_suffix(".json"), json.dumps(about))

    def name(self, name: str, digest: str) -> Image:
        """Let a name stand for a digest from now on; returns the image under it."""
        if not is_name(name):
            raise UserError(
                f"image name {name!r}",
                "letters, digits, `.`, `_`, `-`, at most 128, starting with a letter or digit",
            )
        about = self.image(digest, (name,))
        link = self.root / "names" / f".{name}.{secrets.token_hex(4)}"
        os.link(self.folder(digest).with_suffix(".json"), link)
        link.replace(self.root / "names" / name)
        link.unlink(missing_ok=True)  # where both were one file already
        return about

    def forget(self, name: str) -> Image:
        """Take a name away, and its folder when no other name stands for it.

        Raises NotFoundError; ConflictError while it is used.
        """
        image = self.find(name)
        if self.names(image.digest) == [name]:
            self.remove(image.digest)
        (self.root / "names" / name).unlink()
        return image

    def remove(self, digest: str) -> None:
        """Remove an image's folder. Raises ConflictError while a sandboxd uses it."""
        try:
            with self.lock(digest, wait=False), self.workplace() as work:
                self.folder(digest).with_suffix(".json").unlink(missing_ok=True)
                if self.folder(digest).exists():
                    self.folder(digest).rename(work / "tree")
        except BlockingIOError:
            raise ConflictError(
                f"image {digest[:12]} is in use",
                "one that no service uses",
                "stop the service that runs it first",
            ) from None

    def note_use(self, digest: str) -> None:
        """An image is used now: eviction goes by it."""
        os.utime(self.root / "locks" / digest)

    def used_at(self, image: Image) -> float:
        """Returns when a sandboxd last began to use it, else when it was made; seconds since the
        epoch.
        """
        try:
            return max(image.made_at, (self.root / "locks" / image.digest).stat().st_mtime)
        except OSError:
            return image.made_at

    def full(self) -> str:
        """Returns the message for a disk without room."""
        num_bytes = sum(each.bytes for each in self.list())
        room = os.statvfs(self.root)
        return (
            f"the disk of {self.root} has {room.f_bavail * room.f_frsize / 1e6:.0f} MB left and its"
            f" images take {num_bytes / 1e6:.0f} MB; `prorl image gc --older-than DAYS` or"
            " `--keep-gb GB` removes those that no service uses and that"
            " are pulled or built again when a task needs them"
        )

    def collect(
        self, older_than_s: float | None = None, keep_bytes: int | None = None
    ) -> tuple[Image, ...]:
        """Remove what no name stands for, and layers of no image; what is used stays.

        Before that images that were pulled, or built for tasks, lose their names: those that were
        not used for `older_than_s`, then, least recently used first, as many as are more than
        `keep_bytes`. They are made again when a task needs them. What `prorl image build` was given
        a name for stays.

        Raises ConflictError while images are pulled: a layer may be there before its image.
        """
        try:
            with self.lock(PULLING, wait=False):
                evicted = tuple(self._evict(older_than_s, keep_bytes))
                return (*evicted, *self._collect())
        except BlockingIOError:
            raise ConflictError(
                f"images are being pulled into {self.root}", "a time when none is", "try later"
            ) from None

    def _evict(self, older_than_s: float | None, keep_bytes: int | None) -> Iterator[Image]:
        there = {each.digest: each for each in self.list()}
        for image in sorted(filter(_is_made_again, there.values()), key=self.used_at):
            named = [each for each in there.values() if each.names]
            digests = {digest for each in named for digest in (each.digest, *each.layers)}
            total = sum(there[digest].bytes for digest in digests if digest in there)
            old = older_than_s is not None and self.used_at(image) < time.time() - older_than_s
            if old or (keep_bytes is not None and total > keep_bytes):
                with suppress(ConflictError):
                    self.remove(image.digest)
                    for name in image.names:
                        (self.root / "names" / name).unlink()
                    del there[image.digest]
                    yield image

    def _collect(self) -> Iterator[Image]:
        for layers in (False, True):
            there = self.list()
            used = {digest for each in there for digest in each.layers}
            for each in there:
                if each.is_layer == layers and not each.names and each.digest not in used:
                    with suppress(ConflictError):
                        self.remove(each.digest)
                        yield each
        for blob in (self.root / "blobs").iterdir():
            blob.unlink()

    def lock(
        self, digest: str, *, shared: bool = False, wait: bool = True
    ) -> AbstractContextManager[None]:
        """Hold an image: shared while it is used, alone while it is removed.

        Raises BlockingIOError when others have it and we shall not `wait`.
        """
        return locks.locked(self.root / "locks" / digest, shared=shared, wait=wait)

    def _sweep(self) -> None:
        for lock in (self.root / "work").glob("*.lock"):
            try:
                with locks.locked(lock):
                    remove_tree(str(lock.with_suffix("")))
                    lock.unlink(missing_ok=True)
            except BlockingIOError:
                continue  # its maker lives


def _is_made_again(image: Image) -> bool:
    """Tells whether an image with a name is pulled or built anew when a task needs it."""
    is_built = all(name.startswith(BUILT) for name in image.names)
    return bool(image.names) and (image.source.startswith(DOCKER) or is_built)


def _digest(note: Path) -> str:
    return str(json.loads(note.read_text())["digest"])
