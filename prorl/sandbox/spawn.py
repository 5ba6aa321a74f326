"""A sandboxd of one's own, as a child process, for benchmarks and scripts.

The service's is started by its supervisor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from prorl.errors import UnavailableError
from prorl.linux import locks
from prorl.sandbox.host import UnixSandboxHost

PREFIX = "prl-own-"


@contextmanager
def _folder() -> Iterator[str]:
    """A fresh folder, gone afterwards.

    Its lock says that its owner lives: folders of owners that were killed go, too.
    """
    for path in Path("/tmp").glob(f"{PREFIX}*"):
        _remove_if_dead(path)
    folder, lock = "", -1
    while lock < 0:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        lock = _lock(folder)  # none when somebody took the new folder for a dead one's
    try:
        Path(folder).chmod(0o711)  # the sandboxes' own uids must pass through
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: str | Path) -> int:
    """A descriptor that has the folder locked; -1 when another has, or it is gone, or not ours."""
    try:
        handle = locks.take(folder, locks.FOLDER)
    except OSError:
        return -1
    if os.fstat(handle).st_uid == os.geteuid() and Path(folder).is_dir():
        return handle
    os.close(handle)
    return -1


def _remove_if_dead(folder: Path) -> None:
    lock = _lock(folder)
    if lock >= 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@asynccontextmanager
async def spawned(
    kind: str, *, warm: int = 0, max_sandboxes: int = 512, images: str = ""
) -> AsyncIterator[tuple[UnixSandboxHost, int]]:
    """A running sandboxd: (client, pid); `images`: its registry. Raises UnavailableError."""
    with _folder() as folder:
        options = ["--kind", kind, "--warm", str(warm), "--max-sandboxes", str(max_sandboxes)]
        options += ["--images", images] if images else []
        # A sandboxd whose socket and root are in this folder; it ends with this process.
        own = ["--socket", f"{folder}/sd", "--root", f"{folder}/root"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prorl.sandbox.node.daemon", *own, *options),
            *("--parent-pid", str(os.getpid())),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if await process.stdout.readline() != b"ready\n":
                said = (await process.stderr.read()).decode("utf-8", "replace").strip()
                raise UnavailableError(said)
            async with UnixSandboxHost(f"{folder}/sd") as host:
                yield host, process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()
