"""A sandboxd of one's own, as a child process, for benchmarks and scripts.

The service's is started by its supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prorl.errors import UnavailableError
from prorl.sandbox.host import UnixSandboxHost


def command(folder: Path | str, kind: str, **settings: Any) -> list[str]:
    """The command line of a sandboxd whose socket `sd` and root are in a folder.

    It ends with this process.
    """
    arguments = {
        "socket": f"{folder}/sd",
        "root": f"{folder}/root",
        "kind": kind,
        "parent_pid": os.getpid(),
        **settings,
    }
    return [sys.executable, "-P", "-m", "prorl.sandbox.node.daemon", json.dumps(arguments)]


@asynccontextmanager
async def spawned(
    kind: str, *, warm: int = 0, max_sandboxes: int = 512, images: str = "", **settings: Any
) -> AsyncIterator[tuple[UnixSandboxHost, int]]:
    """A running sandboxd: (client, pid); `images`: its registry, `settings`: more of
    `node/settings.py`. Raises UnavailableError.
    """
    with tempfile.TemporaryDirectory(prefix="prl-box-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the sandboxes' own uids must pass through
        process = await asyncio.create_subprocess_exec(
            *command(
                folder, kind, warm=warm, max_sandboxes=max_sandboxes, images=images, **settings
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if await process.stdout.readline() != b"ready\n":
                message = (await process.stderr.read()).decode("utf-8", "replace").strip()
                raise UnavailableError(message)
            async with UnixSandboxHost(f"{folder}/sd") as host:
                yield host, process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()
