"""Ends and removes what a dead sandboxd left.

It goes by sandbox id and process start time, never by a process's name.

While a sandbox lives, `<root>/live/<id>` says what it consists of. The next sandboxd in this root
reads these notes (`sweep`), and so does any other sandboxd of this user that opens: the root of a
run that is never resumed has nobody else (`sweep_orphans`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from prorl.linux import calls, procfs
from prorl.linux.procfs import start_ticks
from prorl.sandbox.node import cgroups
from prorl.sandbox.node.paths import SocketFolder, orphans
from prorl.sandbox.node.uids import Uids, kill_uid
from prorl.sandbox.trees import remove_tree
from prorl.waits import wait_limit_s

EXIT_S = wait_limit_s("sandbox.exit")
REMOVALS, REMOVE_AGAIN_S = 5, 1.0
"""Tries to remove a folder, and seconds between two."""
FOLDERS = ("live", "work", "trash")
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
SUPPORT = "support"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The things of which one sandbox consists on the host."""

    sandbox_id: str
    pid: int
    """The process of the launcher; 0 before it is known."""
    start_ticks: int | None
    """The start time of `pid`; None when it has ended before anybody asked."""
    uid: int
    socket: str
    folder: str
    cgroups: tuple[str, ...]


def write_note(root: Path, note: Note) -> None:
    """Remember a sandbox (atomically: a reader never sees half a note)."""
    target = f"{root}/live/{note.sandbox_id}"
    temporary = f"{target}.tmp"
    try:
        with open(temporary, "wb", buffering=0) as file:
            text = orjson.dumps(note)
            if file.write(text) != len(text):  # the disk has become full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
        os.rename(temporary, target)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _read_note(path: Path) -> Note | None:
    """A note, or None for what a machine's crash has left of one. Nothing of that sandbox lives."""
    try:
        fields = json.loads(path.read_text())
        return Note(**{**fields, "cgroups": tuple(fields["cgroups"])})
    except (ValueError, TypeError, KeyError):
        path.unlink()
        return None


def drop_note(root: Path, sandbox_id: str) -> None:
    (root / "live" / sandbox_id).unlink(missing_ok=True)


async def sweep(root: Path, uids: Uids) -> int:
    """End everything that is noted in `root` and move its folders to the trash.

    Returns how many sandboxes that were.
    """
    notes = [
        note for path in sorted((root / "live").iterdir()) if (note := _read_note(path)) is not None
    ]
    for note in notes:
        await end_launcher(note)
        with uids.holding_dead_block(note.uid) as is_dead:
            if is_dead:
                await end_uid(note)
        remove_remains(note, root / "trash")
        await cgroups.remove(note.cgroups)
        drop_note(root, note.sandbox_id)
    for path in (root / "work").iterdir():  # made, but not yet noted
        path.rename(root / "trash" / path.name)
    return len(notes)


async def sweep_orphans(mine: SocketFolder, uids: Uids) -> int:
    """Clear up after every sandboxd of this user that is dead; returns how many those were."""
    count = 0
    for folder in orphans(mine):
        try:
            if folder.root is not None and all((folder.root / name).is_dir() for name in FOLDERS):
                await sweep(folder.root, uids)
                await asyncio.to_thread(remove_root, folder.root)
            await cgroups.remove_parents(folder.name)
            folder.remove()
            count += 1
        except OSError:
            pass  # not now: whoever opens next tries again
        finally:
            folder.release()
    return count


async def remove_later(path: Path) -> None:
    """Remove something that was moved to the trash, however long that takes.

    It is tried again when descriptors or the like are short.
    """
    for _ in range(REMOVALS):
        try:
            await asyncio.to_thread(remove_tree, str(path))
            return
        except OSError:
            await asyncio.sleep(REMOVE_AGAIN_S)


def remove_root(root: Path) -> None:
    """Remove everything in a dead daemon's root that is ours. Blocking.

    The root itself goes when nothing else is in it.
    """
    for path in (root / "trash").iterdir():
        remove_tree(str(path))
    remove_folders(root)
    _rmdir(root)


def remove_folders(root: Path) -> None:
    """The folders that every daemon makes in its root; what is not empty stays."""
    remove_tree(str(root / SUPPORT))
    for name in FOLDERS:
        _rmdir(root / name)


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # not empty: shared with something that we do not know


async def end_launcher(note: Note) -> None:
    """TERM, then KILL to the launcher if it is still the same process; KILL alone to a pid 1."""
    numbers = (signal.SIGTERM, signal.SIGKILL)
    for number in numbers[1:] if procfs.is_init(note.pid) else numbers:
        if note.start_ticks is not None and start_ticks(note.pid) == note.start_ticks:
            try:
                os.kill(note.pid, number)
            except ProcessLookupError:
                pass
            await _wait_exit(note.pid, note.start_ticks)


async def end_uid(note: Note) -> None:
    for _ in range(int(EXIT_S / 0.02)):
        with suppress(OSError):  # short of descriptors: nobody has been looked for
            if note.uid < 0 or not kill_uid(note.uid):
                return
        await asyncio.sleep(0.02)


def remove_remains(note: Note, trash: Path) -> None:
    """Remove the socket, and move the folder to the trash.

    An agent can make a folder that takes minutes to remove.
    """
    if note.socket:
        Path(note.socket).unlink(missing_ok=True)
    if note.folder:
        Path(f"{note.folder}.passwd").unlink(missing_ok=True)
        try:
            os.rename(note.folder, trash / note.sandbox_id)
        except FileNotFoundError:
            pass


async def _wait_exit(pid: int, ticks: int) -> None:
    """Waits until the process has ended; checks each 5 ms, since it is nobody's child here."""
    for _ in range(int(EXIT_S / 0.005)):
        if start_ticks(pid) != ticks:
            return
        await asyncio.sleep(0.005)


def remove_strays(uids: Container[int]) -> None:
    """Remove what these uids left on the host outside of their sandboxes' folders; none of them may
    have a process left. Blocking.

    For kinds that share the host's files and IPC namespace: the next sandbox of that uid would own
    it. Looked for where any user may write: `SHARED_FOLDERS`, and folders of root's below them. Not
    found: a file in a folder that another sandbox opened to everybody, which goes with that one.
    """
    for stray in procfs.sysv_objects():
        if stray.uid in uids or stray.creator in uids:
            with suppress(OSError):  # gone meanwhile
                calls.remove_sysv(stray.kind, stray.id)
    for folder in {os.path.realpath(folder) for folder in SHARED_FOLDERS}:
        _remove_strays_in(folder, uids)


def _remove_strays_in(folder: str, uids: Container[int]) -> None:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            about = entry.stat(follow_symlinks=False)
            if about.st_uid in uids:
                remove_tree(entry.path)
            # Only root's: into another's we could be led astray by a link that takes its place.
            elif stat.S_ISDIR(about.st_mode) and about.st_mode & 0o002 and about.st_uid == 0:
                _remove_strays_in(entry.path, uids)
        except OSError:
            continue  # gone meanwhile
