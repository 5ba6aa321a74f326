"""The file system that a pyns sandbox sees.

It is built on a tmpfs over /tmp of a private mount namespace, then pivoted into. With an image only
its parts are built there: they move into the image once that is the root, so that its links lead
nowhere else.

Host folders come in read-only: /usr, a few files of /etc, and the Python that the tool server runs
in, at its own path. Such a folder may lie where the sandbox's uid cannot go (a home of mode 0700);
it is opened before privileges are dropped.

What is equal in all sandboxes is a list of calls that is made once, by the zygote: deciding costs a
launcher more than doing, for each page of Python that it touches is first copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from glob import glob
from typing import Any, NamedTuple

from prorl.linux import calls
from prorl.sandbox.kind import MAX_PTYS
from prorl.sandbox.kinds.common import show_stack
from prorl.sandbox.kinds.engine_support import (
    ETC,
    IMAGE_SUPPORT,
    MOUNT_POINT_BYTES,
    SUPPORT,
    clone,
    inside,
    parts,
)
from prorl.sandbox.launch.spec import (
    BIN,
    LAYER,
    WORKSPACE,
    Launch,
    interpreter,
    interpreter_roots,
    package_folders,
)

ROOT = "/tmp"
"""The place where the new root is mounted, in a mount namespace of its own."""
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC_FOLDERS = ("alternatives", "ssl")
ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "protocols", "services")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
FOLDERS = (
    "usr",
    "etc",
    "proc",
    "dev",
    "tmp",
    "var",
    "run",
    "home",
    "root",
    WORKSPACE[1:],
    "old",
    "opt",
    "opt/prorl",
    BIN[1:],
    LAYER[1:],
)
"""The folders of the new root; the old one is moved to `old` for a moment."""
MOVED = {
    "/proc": "/proc",
    "/dev": "/dev",
    "/tmp": "/tmp",
    "/var/tmp": "/tmp",
    WORKSPACE: WORKSPACE,
    SUPPORT: SUPPORT,
}
"""Into an image, from where they are built."""
IMAGE_FOLDERS = ("/tmp", WORKSPACE)
"""The folders that a sandbox leaves to the image whose `workdir` it works in."""
SHM_BYTES = 64 << 20
"""Size of /dev/shm, as container engines have it."""
DEVPTS = f"newinstance,ptmxmode=0666,mode=620,max={MAX_PTYS}"
"""Options of a devpts of a sandbox's own."""
HIDDEN = "size=4k,nr_inodes=1,mode=755"
"""Options of what covers a folder that is not shown."""
SAFE = calls.MS_NOSUID | calls.MS_NODEV


class SystemCall(NamedTuple):
    call: Callable[..., object]
    arguments: tuple[Any, ...]


class Source(NamedTuple):
    """A host folder to be shown inside at `target`."""

    target: str
    fd: int
    detached: bool
    """A clone of the mount (made as root, or for the network), else an O_PATH descriptor."""
    is_file: bool = False
    is_networks: bool = False
    """The operator's, for sandboxes with a network: it is shown over what an image has there, when
    the host's root has gone and no descriptor of it can be bound.
    """


def open_sources(launch: Launch) -> list[Source]:
    """Open the interpreter's folders, before privileges are dropped: the uid may not enter them."""
    folders = [(path, path) for path in interpreter_roots()]
    folders += [(launch.layer, LAYER)] if launch.layer else []
    if launch.image:
        support = f"{os.path.dirname(launch.server)}/{IMAGE_SUPPORT}"
        folders = [(support, SUPPORT), *parts()]
    own = [pair.split(":") for pair in launch.files]
    return [
        *(_open_source(launch, path, target) for path, target in folders),
        *(
            Source(target, calls.clone_tree(path), True, not os.path.isdir(path), is_networks=True)
            for path, target in own
        ),
    ]


def _open_source(launch: Launch, path: str, target: str) -> Source:
    is_file = not os.path.isdir(path)
    if launch.uid >= 0:
        return Source(target, calls.clone_tree(path), True, is_file)
    return Source(target, os.open(path, os.O_PATH | os.O_CLOEXEC), False, is_file)


def open_image(launch: Launch) -> list[int]:
    if not launch.image:
        return []
    if launch.uid >= 0:
        return clone(launch)
    return [calls.clone_tree(path) for path in (launch.image, *launch.under)]


def build_root(launch: Launch, sources: list[Source], image: list[int]) -> None:
    """Mount everything and make it this process's root.

    The working directory becomes the workspace.
    """
    for step in steps(bool(image)):
        step.call(*step.arguments)
    if not keeps_folders(launch):
        size = f"size={launch.spec.tmp_bytes},nr_inodes=64k,mode=1777"
        calls.mount("tmpfs", f"{ROOT}/tmp", "tmpfs", SAFE, size)
        size = f"size={launch.spec.workspace_bytes},nr_inodes=256k,mode=755"
        calls.mount("tmpfs", f"{ROOT}{WORKSPACE}", "tmpfs", SAFE, size)
    # After what could cover them: a virtual environment may lie below /tmp.
    later = [source for source in sources if image and source.is_networks]
    for source in sources:
        if source not in later:
            _show(source, ROOT)
    if image:
        _enter_image(launch, image)
        for source in later:
            _show(source, "")
    else:
        os.chdir(ROOT)
        calls.pivot_root(".", "old")
        calls.umount_detach("/old")
        os.rmdir("/old")
    if not launch.spec.overlay_bytes:
        calls.mount(None, "/", None, calls.MS_REMOUNT | calls.MS_RDONLY | calls.MS_BIND | SAFE)
    os.chdir("/" if keeps_folders(launch) else WORKSPACE)


def keeps_folders(launch: Launch) -> bool:
    """Returns whether /workspace and /tmp are the image's own, in its overlay."""
    return bool(launch.image and launch.spec.workdir)


def _enter_image(launch: Launch, image: list[int]) -> None:
    """Make the image, under a tmpfs for what is written, the root, and move our parts into it."""
    for path in third_party():
        calls.mount("tmpfs", ROOT + inside(path), "tmpfs", SAFE, HIDDEN)
    moves = {target: path for target, path in MOVED.items() if path not in IMAGE_FOLDERS}
    moved = [
        (target, calls.clone_tree(ROOT + path))
        for target, path in (moves if keeps_folders(launch) else MOVED).items()
    ]
    above, stack = f"{ROOT}/above", f"{ROOT}/stack"
    size = f"size={launch.spec.overlay_bytes or MOUNT_POINT_BYTES},nr_inodes=256k,mode=755"
    for folder in (above, stack):
        os.mkdir(folder)
    calls.mount("tmpfs", above, "tmpfs", SAFE, size)
    for name in ("upper", "work"):
        os.mkdir(f"{above}/{name}", 0o755)
    show_stack(launch, image, stack, above)
    os.chdir(f"{stack}/image")
    calls.pivot_root(".", ".")
    calls.umount_detach(".")
    os.chdir("/")
    for target, fd in moved:
        os.makedirs(target, exist_ok=True)
        calls.attach_tree(fd, target)
        os.close(fd)
    os.makedirs("/etc", exist_ok=True)
    if not os.path.exists("/etc/hosts") or not os.path.getsize("/etc/hosts"):
        _file("/etc/hosts", ETC["hosts"].encode())


@cache
def steps(with_image: bool) -> tuple[SystemCall, ...]:
    """The calls that are equal in all sandboxes of this zygote, in order."""
    pythons = (f"{ROOT}{BIN}/{name}" for name in ("python", "python3"))
    return (
        SystemCall(calls.mount, (None, "/", None, calls.MS_REC | calls.MS_PRIVATE)),
        SystemCall(calls.mount, ("tmpfs", ROOT, "tmpfs", SAFE, "size=4m,nr_inodes=4k,mode=755")),
        *(SystemCall(os.mkdir, (f"{ROOT}/{name}",)) for name in FOLDERS),
        *(SystemCall(os.symlink, (interpreter(), python)) for python in pythons),
        SystemCall(os.symlink, ("../tmp", f"{ROOT}/var/tmp")),
        *(() if with_image else (*_system(), *_etc())),
        *_devices(),
        SystemCall(calls.mount, ("proc", f"{ROOT}/proc", "proc", SAFE | calls.MS_NOEXEC)),
        SystemCall(calls.mount, ("/dev/null", f"{ROOT}/proc/cmdline", None, calls.MS_BIND)),
    )


def _read_only(source: str, target: str) -> SystemCall:
    # A flag that the host's mount has locked must be repeated, or the remount is refused.
    noexec = calls.MS_NOEXEC if os.statvfs(source).f_flag & os.ST_NOEXEC else 0
    flags = calls.MS_BIND | calls.MS_REMOUNT | calls.MS_RDONLY | SAFE | noexec
    return SystemCall(calls.mount, (None, target, None, flags))


def _bind(source: str, target: str) -> list[SystemCall]:
    return [
        SystemCall(calls.mount, (source, target, None, calls.MS_BIND | calls.MS_REC)),
        _read_only(source, target),
    ]


def _system() -> list[SystemCall]:
    steps = _bind("/usr", f"{ROOT}/usr")
    for path in third_party():
        steps.append(SystemCall(calls.mount, ("tmpfs", ROOT + path, "tmpfs", SAFE, HIDDEN)))
    for name in LINKS:
        path = f"/{name}"
        if os.path.islink(path):
            steps.append(SystemCall(os.symlink, (os.readlink(path), f"{ROOT}/{name}")))
        elif os.path.isdir(path):
            steps += [SystemCall(os.mkdir, (f"{ROOT}/{name}",)), *_bind(path, f"{ROOT}/{name}")]
    return steps


@cache
def third_party() -> list[str]:
    """Returns the host's folders of Python packages, but for those that the tool server runs with.

    A copy of what a task is about must not lie there to be read.
    """
    patterns = [f"/usr/{lib}/python3*/*-packages" for lib in ("lib", "local/lib")]
    folders = {os.path.realpath(path) for pattern in patterns for path in glob(pattern)}
    return sorted(folders.difference(map(os.path.realpath, package_folders())))


def _show(source: Source, root: str) -> None:
    target = root + source.target
    os.makedirs(os.path.dirname(target) if source.is_file else target, exist_ok=True)
    if source.is_file and not os.path.exists(target):
        _file(target)
    if source.detached:
        calls.attach_tree(source.fd, target)
    else:
        calls.mount(f"/proc/self/fd/{source.fd}", target, None, calls.MS_BIND | calls.MS_REC)
    os.close(source.fd)
    step = _read_only(target, target)
    step.call(*step.arguments)


def _etc() -> list[SystemCall]:
    steps = []
    for name in ETC_FOLDERS:
        if os.path.isdir(f"/etc/{name}"):
            steps += [
                SystemCall(os.mkdir, (f"{ROOT}/etc/{name}",)),
                *_bind(f"/etc/{name}", f"{ROOT}/etc/{name}"),
            ]
    for name in ETC_FILES:
        if os.path.isfile(f"/etc/{name}"):
            steps += [
                SystemCall(_file, (f"{ROOT}/etc/{name}",)),
                *_bind(os.path.realpath(f"/etc/{name}"), f"{ROOT}/etc/{name}"),
            ]
    for name, text in ETC.items():
        steps.append(SystemCall(_file, (f"{ROOT}/etc/{name}", text.encode())))
    return steps


def _file(path: str, content: bytes = b"") -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if content:
        os.write(fd, content)
    os.close(fd)


def _devices() -> list[SystemCall]:
    dev = f"{ROOT}/dev"
    size = "size=64k,nr_inodes=64,mode=755"
    steps = [SystemCall(calls.mount, ("tmpfs", dev, "tmpfs", calls.MS_NOSUID, size))]
    for name in DEVICES:
        steps += [
            SystemCall(_file, (f"{dev}/{name}",)),
            SystemCall(calls.mount, (f"/dev/{name}", f"{dev}/{name}", None, calls.MS_BIND)),
        ]
    steps += [
        SystemCall(os.symlink, (target, f"{dev}/{name}")) for name, target in DEVICE_LINKS.items()
    ]
    steps += [SystemCall(os.mkdir, (f"{dev}/{name}",)) for name in ("pts", "shm")]
    flags = calls.MS_NOSUID | calls.MS_NOEXEC
    size = f"size={SHM_BYTES},nr_inodes=4k,mode=1777"
    read_only = calls.MS_REMOUNT | calls.MS_RDONLY | calls.MS_NOSUID | calls.MS_BIND
    return [
        *steps,
        SystemCall(calls.mount, ("devpts", f"{dev}/pts", "devpts", flags, DEVPTS)),
        SystemCall(calls.mount, ("tmpfs", f"{dev}/shm", "tmpfs", SAFE, size)),
        SystemCall(calls.mount, (None, dev, None, read_only)),
    ]
