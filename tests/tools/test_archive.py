"""Snapshots by the image's tar and by Python: the same files, modes and links on the other side,
and a limit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl.tools import bundle
from prorl.tools.server import frames


class Client:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = frames.FrameBuffer()

    def __call__(self, body: bytes = b"", **header: Any) -> frames.Frame:
        frames.send(self._connection, {"id": 1, **header}, body)
        while (frame := self._buffer.next()) is None:
            data = self._connection.recv(1 << 16)
            assert data, "the server hung up"
            self._buffer.feed(data)
        return frame


@contextmanager
def _server(pyz: Path, workspace: Path, path: str) -> Iterator[Client]:
    with socket.socket(socket.AF_UNIX) as listener:
        address = str(workspace.parent / f"{workspace.name}.s")
        listener.bind(address)
        listener.listen(1)
        status_read, status_write = os.pipe()
        config = {
            "listener": listener.fileno(),
            "status": status_write,
            "workspace": str(workspace),
            "env": {"PATH": path},
            "tools": [],
        }
        argv = [sys.executable, "-I", "-S", str(pyz), json.dumps(config)]
        process = subprocess.Popen(argv, pass_fds=(listener.fileno(), status_write))
    os.close(status_write)
    try:
        assert os.read(status_read, 100) == b"ok\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            yield Client(client)
    finally:
        os.close(status_read)
        process.kill()
        process.wait()


def _listing(folder: Path) -> list[tuple[str, int, str]]:
    return sorted(
        (
            str(path.relative_to(folder)),
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    )


@pytest.mark.parametrize("first", ["/usr/bin:/bin", "/nowhere"], ids=["tar", "python"])
@pytest.mark.parametrize("second", ["/usr/bin:/bin", "/nowhere"], ids=["tar", "python"])
def test_a_workspace_crosses_whole(tmp_path: Path, first: str, second: str) -> None:
    bundle.write(tmp_path / "server.pyz")
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (old / "a/b").mkdir(parents=True)
    (old / "a/b/text").write_text("x" * 5000)
    (old / "run").write_text("#!/bin/sh\n")
    (old / "run").chmod(0o750)
    (old / ".hidden").write_text("h")
    (old / "link").symlink_to("a/b/text")
    (old / "nowhere").symlink_to("/no/such")
    os.link(old / "run", old / "same")
    (old / "a b\n c").write_text("odd name")
    with _server(tmp_path / "server.pyz", old, first) as ask:
        refused = ask(op="pack", max_bytes=1000).header
        assert (refused["ok"], "more than 1000 bytes" in refused["error"]) == (False, True)
        size = ask(op="pack", max_bytes=1 << 20).header["size"]
        content = ask(op="pack_read", offset=0, max_bytes=1 << 20).body
        assert len(content) == size
    with _server(tmp_path / "server.pyz", new, second) as ask:
        assert ask(content[:4096], op="unpack", offset=0, last=False).header["ok"]
        assert ask(content[4096:], op="unpack", offset=4096, last=True).header == {
            "id": 1,
            "ok": True,
        }
        assert _listing(new) == _listing(old)
        assert not ask(b"no archive", op="unpack", offset=0, last=True).header["ok"]
