"""Prepared workspaces: made once a node, copied to the siblings of a task.

The first caller of a key does its own work and packs the workspace into sandboxd's folder; equal
keys wait for it by a lock, which ends with its holder: where the work failed, or whoever did it
died, the next one does it. Nothing but the workspace is copied: not /tmp, no process, no shell's
state. Where a copy would take longer than the work, or be too large, an empty file says so and
everybody works. `key` names all that the work depends on; the sandbox must be fresh.

The least recently used go when all are larger than the limit. Nothing survives sandboxd.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prorl.linux import locks
from prorl.protocols import Sandbox

MAX_SNAPSHOT_BYTES = 192 << 20
"""The limit of one workspace: while it is packed it takes that room in the workspace itself."""
PACKING = ".new"
LOOK_S = 0.05
"""Between two looks at a lock: there is nothing to wait on."""


async def prepared(
    folder: Path, limit_bytes: int, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
) -> bool:
    """Do the work, or copy what it made; true for a copy. Raises as the work does, SandboxError."""
    place = folder / hashlib.sha256(key.encode()).hexdigest()
    async with _alone(place.with_suffix(".lock")):
        try:
            snapshot = place.open("rb")
        except FileNotFoundError:
            began = time.monotonic()
            await work()
            await _keep(place, limit_bytes, sandbox, time.monotonic() - began)
            return False
    with snapshot:  # it may be removed while it is read
        if not os.fstat(snapshot.fileno()).st_size:
            await work()
            return False
        os.utime(snapshot.fileno())
        await sandbox.restore(f"/proc/self/fd/{snapshot.fileno()}")
        return True


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    while True:
        try:
            lock = locks.take(path)
            break
        except BlockingIOError:
            await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        os.close(lock)


async def _keep(place: Path, limit_bytes: int, sandbox: Sandbox, work_s: float) -> None:
    began, packed = time.monotonic(), place.with_suffix(PACKING)
    try:
        num_bytes = await sandbox.snapshot(str(packed), min(limit_bytes, MAX_SNAPSHOT_BYTES))
        if num_bytes and time.monotonic() - began < work_s:
            packed.rename(place)
            _trim(place.parent, limit_bytes)
        else:
            place.touch()
    finally:
        packed.unlink(missing_ok=True)


def _trim(folder: Path, limit_bytes: int) -> None:
    files = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # others trim, too
            about = path.stat()
            if about.st_size and path.suffix != PACKING:
                files.append((about.st_mtime_ns, about.st_size, path))
    files.sort()
    too_much = sum(num_bytes for _, num_bytes, _ in files) - limit_bytes
    for _, num_bytes, path in files:
        if too_much <= 0:
            return
        path.unlink(missing_ok=True)
        too_much -= num_bytes
