"""The tool server as one zipapp, in other Pythons when there are some."""

from __future__ import annotations

import ast
import io
import json
import marshal
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from prorl.tools import bundle
from prorl.tools.server import frames

OLDEST = (3, 8)


def members(data: bytes) -> dict[str, object]:
    """Returns what is packed; code as it is loaded, for its bytes depend on what else is in
    memory.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        content_by_name = {name: packed.read(name) for name in packed.namelist()}
    return {
        name: marshal.loads(content[16:]) if name.endswith(".pyc") else content
        for name, content in content_by_name.items()
    }


def test_equal_sources_give_equal_members_and_no_package_but_ptyprocess() -> None:
    data = bundle.build()
    assert members(data) == members(bundle.build.__wrapped__())
    assert data is bundle.build(), "a pool that tries a kind and the own one are two"
    assert len(data) < 600_000
    allowed = {
        *sys.stdlib_module_names,
        "prorl",
        "ptyprocess",
        "IPython",
        "traitlets",
        "jupyter_client",
        "zmq",
        "__builtin__",
    }
    for name in zipfile.ZipFile(io.BytesIO(data)).namelist():
        if name.endswith(".pyc"):
            continue
        source = zipfile.ZipFile(io.BytesIO(data)).read(name).decode()
        tree = ast.parse(source, name, feature_version=OLDEST)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert {module.partition(".")[0] for module in names} <= allowed, name


def test_the_server_imports_nothing_dear(tmp_path: Path) -> None:
    """Each costs a cold start milliseconds; json, re, signal and socket all build enums."""
    bundle.write(tmp_path / "server.pyz")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'server.pyz')!r}); import"
        " prorl.tools.server.main; from prorl.tools.server.terminal import load; load();"
        " print(*sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    dear = {
        "collections",
        "ctypes",
        "enum",
        "functools",
        "json",
        "re",
        "shutil",
        "signal",
        "socket",
        "tempfile",
        "typing",
    }
    loaded = set(completed.stdout.split())
    assert "ptyprocess" in loaded
    assert not dear & loaded


def pythons() -> list[str]:
    """This one, the system's, and those beside ours (pyenv and its like keep versions in one
    folder).
    """
    beside = (
        path
        for path in Path(sys.base_prefix).parent.glob("3.*/bin/python3.*")
        if path.suffix[1:].isdigit()
    )
    supported = {str(path) for path in beside if (3, int(path.suffix[1:])) >= OLDEST}
    return sorted({sys.executable, *supported, *filter(None, [shutil.which("/usr/bin/python3")])})


@pytest.mark.parametrize("python", pythons(), ids=lambda path: "-".join(Path(path).parts[-3:]))
def test_it_serves(python: str, tmp_path: Path) -> None:
    bundle.write(tmp_path / "server.pyz")
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        status_read, status_write = os.pipe()
        fds = (listener.fileno(), status_write)
        config = {
            "listener": fds[0],
            "status": fds[1],
            "workspace": str(tmp_path),
            "env": {"PATH": os.environ["PATH"]},
        }
        argv = [python, "-I", "-S", str(tmp_path / "server.pyz"), json.dumps(config)]
        process = subprocess.Popen(argv, pass_fds=fds)
        os.close(status_write)
    try:
        assert os.read(status_read, 100) == b"ok\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            for tool, arguments, output in (
                ("bash", {"command": "echo $((6*7))"}, b"42\n"),
                ("python", {"code": "6*7"}, b"42\n"),
            ):
                header = {
                    "id": 1,
                    "op": "call",
                    "tool": tool,
                    "arguments": arguments,
                    "timeout_s": 5,
                }
                frames.send(client, header)
                buffer = frames.FrameBuffer()
                while (frame := buffer.next()) is None:
                    buffer.feed(client.recv(1 << 16))
                assert frame.body == output
    finally:
        os.close(status_read)
        process.kill()
        process.wait()
