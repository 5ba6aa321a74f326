"""Ends and removes what a dead sandboxd left: by sandbox id and process start time, never by a process's name.

While a sandbox lives, `<root>/live/<id>` says what it consists of. Whoever opens the root next reads these notes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from prorl.sandbox.trees import remove_tree

GONE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one sandbox consists of on the host."""

    sandbox_id: str
    pid: int
    """Of the launcher; 0 before it is known."""
    start_ticks: int
    uid: int
    socket: str
    folder: str
    cgroups: tuple[str, ...]


def start_ticks(pid: int) -> int:
    """When a process started (clock ticks since boot), or -1 when there is none. A zombie counts as none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def write_note(root: Path, note: Note) -> None:
    """Remember a sandbox (atomically: a reader never sees half a note)."""
    target = root / "live" / note.sandbox_id
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(note)))
    temporary.rename(target)


def drop_note(root: Path, sandbox_id: str) -> None:
    """Forget a sandbox that is gone."""
    (root / "live" / sandbox_id).unlink(missing_ok=True)


async def sweep(root: Path) -> int:
    """End and remove everything that is noted in `root`; returns how many sandboxes that were."""
    count = 0
    for path in sorted((root / "live").iterdir()):
        if path.suffix == ".tmp":
            path.unlink(missing_ok=True)
            continue
        fields = json.loads(path.read_text())
        note = Note(**{**fields, "cgroups": tuple(fields["cgroups"])})
        await end_processes(note)
        remove_remains(note, root / "trash")
        await remove_groups(note.cgroups)
        drop_note(root, note.sandbox_id)
        count += 1
    for path in (root / "trash").iterdir():
        await asyncio.to_thread(empty_trash, root / "trash", path.name)
    return count


async def end_processes(note: Note) -> None:
    """TERM, then KILL to the launcher if it is still the same process; then whatever has the sandbox's own uid."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if note.pid and start_ticks(note.pid) == note.start_ticks:
            _kill(note.pid, number)
            await _gone(note.pid, note.start_ticks)
    if note.uid >= 0:
        for _ in range(100):
            left = [pid for pid in _pids() if _uid_of(pid) == note.uid and start_ticks(pid) >= note.start_ticks]
            if not left:
                return
            for pid in left:
                _kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)


def remove_remains(note: Note, trash: Path) -> None:
    """The socket, and the folder, which goes to the trash: an agent can make one that takes minutes to remove."""
    if note.socket:
        Path(note.socket).unlink(missing_ok=True)
    if note.folder:
        Path(f"{note.folder}.passwd").unlink(missing_ok=True)
        try:
            os.rename(note.folder, trash / note.sandbox_id)
        except FileNotFoundError:
            pass


async def remove_groups(folders: tuple[str, ...]) -> None:
    """Remove control groups; one is busy until the last of its processes is reaped, which may be a moment after a SIGKILL."""
    for folder in folders:
        for _ in range(int(GONE_S / 0.01)):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                break
            except OSError:
                await asyncio.sleep(0.01)
            else:
                break


def empty_trash(trash: Path, sandbox_id: str) -> None:
    """Remove one folder for good. Blocking."""
    remove_tree(str(trash / sandbox_id))


async def _gone(pid: int, ticks: int) -> None:
    """Until the process has ended; checked each 5 ms, since it is nobody's child here."""
    for _ in range(int(GONE_S / 0.005)):
        if start_ticks(pid) != ticks:
            return
        await asyncio.sleep(0.005)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _uid_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
