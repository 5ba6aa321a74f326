"""A small honest `Sandbox` for tests of envs and agents: real processes in a folder, no isolation,
no persistent shells.
"""

from __future__ import annotations

import asyncio
import signal
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prorl.types import Json, SandboxRef, ToolResult


class LocalSandbox:
    """Implements `prorl.protocols.Sandbox`; `calls` keeps what crossed, for assertions."""

    def __init__(self, folder: Path) -> None:
        self.ref = SandboxRef("test", folder.name, "")
        self.folder = folder
        self.calls: list[tuple[str, Mapping[str, Json]]] = []

    async def call(self, tool: str, arguments: Mapping[str, Json], timeout_s: float) -> ToolResult:
        self.calls.append((tool, arguments))
        if tool == "bash":
            return await self.exec(["bash", "-c", arguments["command"]], timeout_s)
        if tool == "python":
            return await self.exec(["python3", "-c", arguments["code"]], timeout_s)
        await self.put(arguments["path"], arguments["file_text"].encode())
        return ToolResult(output="written")

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.folder,
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        timed_out, output = False, b""
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate(stdin)
        except TimeoutError:
            timed_out = True
        finally:
            self._kill_group(process.pid)
            await process.wait()
        code = process.returncode or 0
        exit_code = 124 if timed_out else code if code >= 0 else 128 - code
        text = output.decode("utf-8", "replace")
        return ToolResult(
            output=text,
            exit_code=exit_code,
            duration_s=time.monotonic() - began,
            timed_out=timed_out,
        )

    def _kill_group(self, pid: int) -> None:
        import os

        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        (self.folder / path).write_bytes(content)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return (self.folder / path).read_bytes()[:max_bytes]

    async def snapshot(self, path: str, max_bytes: int) -> int:
        with tarfile.open(path, "w") as tar:
            tar.add(self.folder, arcname=".")
        return Path(path).stat().st_size

    async def restore(self, path: str) -> None:
        with tarfile.open(path) as tar:
            tar.extractall(self.folder, filter="tar")

    async def close(self) -> None:
        pass
