"""Runs a program and writes down, in order, what it and its children do to the files of a folder.

The order is that of the calls' beginnings; since nobody is answered before a call has ended, a mark
that the caller sets after an answer comes after everything that the answer rests on. Not seen:
memory-mapped writes (SQLite's shared memory, which is no part of what is durable) and io_uring.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.power import launch
from tests.faults.power.disk import Disk

RECEIVE, ANSWER = 0xC0502100, 0xC0182101
GO_ON = 1
AT_FDCWD = -100
MAX_PATH = 4096


class Change(NamedTuple):
    """One thing that was done, as a call of a method of `Disk`."""

    what: str
    args: tuple[Any, ...]
    more: dict[str, Any]

    @property
    def syncs(self) -> bool:
        """Returns whether something is durable that was not."""
        return self.what == "sync"

    def do(self, disk: Disk) -> None:
        """Do it again."""
        getattr(disk, self.what)(*self.args, **self.more)


class Mark(NamedTuple):
    """The promises that somebody had been given by then."""

    what: str
    value: Any


class Task:
    """A thread of the program that stands still in a system call."""

    def __init__(self, number: int) -> None:
        self._proc = Path(f"/proc/{number}")

    def memory(self, address: int, length: int) -> bytes:
        """Some of its memory."""
        with (self._proc / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)

    def text(self, address: int) -> Path:
        """A path that it names."""
        page = 4096 - address % 4096
        content = self.memory(address, page)
        while b"\0" not in content and len(content) < MAX_PATH:
            content += self.memory(address + len(content), 4096)
        return Path(os.fsdecode(content.partition(b"\0")[0]))

    def at(self, folder: int, address: int) -> Path:
        """The same, from an open folder on."""
        link = "cwd" if folder == AT_FDCWD else f"fd/{folder}"
        return Path(os.readlink(self._proc / link)) / self.text(address)

    def file(self, descriptor: int) -> Path:
        """Returns the path of a descriptor."""
        return Path(os.readlink(self._proc / "fd" / str(descriptor)))

    def offset(self, descriptor: int) -> int | None:
        """Returns where the next write goes; None for the end."""
        words = (self._proc / "fdinfo" / str(descriptor)).read_text().split()
        flags = int(words[words.index("flags:") + 1], 8)
        return None if flags & os.O_APPEND else int(words[words.index("pos:") + 1])

    def vector(self, address: int, count: int) -> bytes:
        """Returns the content of an `iovec[]`."""
        words = struct.iter_unpack("PN", self.memory(address, 16 * count))
        return b"".join(self.memory(base, length) for base, length in words)


Fail = Callable[[str, Path], int]


class Recorder:
    """`with Recorder(folder, argv) as recorder:` runs a program; `steps` is what it did."""

    def __init__(
        self, folder: Path, argv: Sequence[str], *, fail: Fail = lambda name, path: 0, **more: Any
    ) -> None:
        """`fail`: asked before each change below the folder; an errno makes the call fail."""
        self._fail = fail
        self.steps: list[Change | Mark] = []
        self.problem: BaseException | None = None
        self._folder, self._argv, self._more = folder.resolve(), argv, more
        self._names = {number: name for name, number in launch.CALLS.items()}
        self._sizes = Disk()

    def __enter__(self) -> Recorder:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, launch.__file__, str(theirs.fileno()), *self._argv]
            fds = [theirs.fileno()]
            self.process = subprocess.Popen(argv, pass_fds=fds, **self._more)
        _, handles, _, _ = socket.recv_fds(ours, 1, 1)
        assert handles, "the program ended before it was heard"
        self._handle = handles[0]
        self._thread = threading.Thread(target=self._listen, name="recorder")
        self._thread.start()
        ours.send(b"!")
        ours.close()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._thread.join()
        os.close(self._handle)

    def mark(self, what: str, value: Any) -> None:
        """Write down that somebody was promised something."""
        self.steps.append(Mark(what, value))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        while True:
            ((_, events),) = poll.poll()
            if events & select.POLLIN:
                self._record_call()
            elif events & select.POLLHUP:
                return

    def _record_call(self) -> None:
        notice = bytearray(80)
        try:
            fcntl.ioctl(self._handle, RECEIVE, notice)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return  # killed before it was heard
            raise
        number, thread, _, call, _, _, *args = struct.unpack("QIIiIQ6Q", notice)
        failure = 0
        try:
            for change in self._read(Task(thread), self._names[call], args):
                failure = failure or self._fail(change.what, change.args[0])
                if not failure:
                    change.do(self._sizes)
                    self.steps.append(change)
        except FileNotFoundError:
            pass  # no such descriptor, or killed meanwhile: the call changes nothing either
        except OSError as error:
            if Path(f"/proc/{thread}").exists():
                self.problem = self.problem or error
        finally:
            answer = bytearray(struct.pack("QqiI", number, 0, -failure, 0 if failure else GO_ON))
            try:
                fcntl.ioctl(self._handle, ANSWER, answer)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise

    def _read(self, task: Task, name: str, args: list[int]) -> Iterator[Change]:
        for change in _READERS[name](task, [_signed(arg) for arg in args], self._sizes_of):
            paths = [_below(path, self._folder) for path in change.args if isinstance(path, Path)]
            inside = [path for path in paths if path is not None]
            if inside:
                assert len(inside) == len(paths), f"{change}: out of the folder or into it"
                rest = [value for value in change.args if not isinstance(value, Path)]
                if change.what == "change" and rest[0] is None:
                    rest[0] = self._sizes.size(inside[0])
                yield Change(change.what, (*inside, *rest), change.more)

    def _sizes_of(self, path: Path) -> int:
        relative = _below(path, self._folder)
        return self._sizes.size(relative) if relative is not None else 0


def _signed(value: int) -> int:
    """Descriptors are ints; addresses stay below 2^63."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 and value < 1 << 32 else value


def _below(path: Path, folder: Path) -> Path | None:
    try:
        return Path(os.path.normpath(path)).relative_to(folder)
    except ValueError:
        return None


Reader = Callable[[Task, list[int], Callable[[Path], int]], list[Change]]


def _change(what: str, *args: Any, **more: Any) -> list[Change]:
    return [Change(what, args, more)]


def _opened(path: Path, flags: int) -> list[Change]:
    if flags & os.O_DIRECTORY or not flags & (os.O_CREAT | os.O_TRUNC):
        return []
    return _change("create", path, empty=bool(flags & os.O_TRUNC))


def _copied(task: Task, source: int, target: int, count: int, offset: int) -> list[Change]:
    """Returns the bytes that the kernel copies from file to file, read from the source."""
    path = task.file(target)
    if not path.is_absolute() or not task.file(source).is_file():
        return []
    begin = task.offset(source) or 0
    with task.file(source).open("rb") as file:
        file.seek(begin)
        return _change("change", path, offset, file.read(count))


_READERS: dict[str, Reader] = {
    "write": lambda t, a, _: (
        _change("change", t.file(a[0]), t.offset(a[0]), t.memory(a[1], a[2]))
        if t.file(a[0]).is_absolute()
        else []
    ),
    "pwrite64": lambda t, a, _: _change("change", t.file(a[0]), a[3], t.memory(a[1], a[2])),
    "writev": lambda t, a, _: (
        _change("change", t.file(a[0]), t.offset(a[0]), t.vector(a[1], a[2]))
        if t.file(a[0]).is_absolute()
        else []
    ),
    "pwritev": lambda t, a, _: _change("change", t.file(a[0]), a[3], t.vector(a[1], a[2])),
    "sendfile": lambda t, a, _: _copied(t, a[1], a[0], a[3], t.offset(a[0]) or 0),
    "copy_file_range": lambda t, a, _: _copied(t, a[0], a[2], a[4], t.offset(a[2]) or 0),
    "fallocate": lambda t, a, size: (
        _change("change", t.file(a[0]), a[2] + a[3], None)
        if a[2] + a[3] > size(t.file(a[0])) and not a[1]
        else []
    ),
    "truncate": lambda t, a, _: _change("change", t.at(AT_FDCWD, a[0]), a[1], None),
    "ftruncate": lambda t, a, _: _change("change", t.file(a[0]), a[1], None),
    "fsync": lambda t, a, _: _change("sync", t.file(a[0])),
    "fdatasync": lambda t, a, _: _change("sync", t.file(a[0])),
    "open": lambda t, a, _: _opened(t.at(AT_FDCWD, a[0]), a[1]),
    "creat": lambda t, a, _: _opened(t.at(AT_FDCWD, a[0]), os.O_CREAT | os.O_TRUNC),
    "openat": lambda t, a, _: _opened(t.at(a[0], a[1]), a[2]),
    "mkdir": lambda t, a, _: _change("make_folder", t.at(AT_FDCWD, a[0])),
    "mkdirat": lambda t, a, _: _change("make_folder", t.at(a[0], a[1])),
    "rmdir": lambda t, a, _: _change("remove", t.at(AT_FDCWD, a[0])),
    "unlink": lambda t, a, _: _change("remove", t.at(AT_FDCWD, a[0])),
    "unlinkat": lambda t, a, _: _change("remove", t.at(a[0], a[1])),
    "rename": lambda t, a, _: _change("move", t.at(AT_FDCWD, a[0]), t.at(AT_FDCWD, a[1])),
    "renameat": lambda t, a, _: _change("move", t.at(a[0], a[1]), t.at(a[2], a[3])),
    "renameat2": lambda t, a, _: _change("move", t.at(a[0], a[1]), t.at(a[2], a[3])),
    "link": lambda t, a, _: _change("link", t.at(AT_FDCWD, a[0]), t.at(AT_FDCWD, a[1])),
    "linkat": lambda t, a, _: _change("link", t.at(a[0], a[1]), t.at(a[2], a[3])),
}


def available() -> str:
    """Empty, or why nothing can be recorded here."""
    if not launch.CALLS:
        return "no table of system calls for this processor"
    action = ctypes.c_uint32(launch.NOTIFY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(launch.SYS_SECCOMP, 2, 0, ctypes.byref(action)):
        return "this kernel's seccomp has no listeners"
    return ""
