"""The file editor and `exec`, straight against the server's classes and through a sandbox."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from prorl.tools.server.files import MAX_FILE_BYTES, Files
from prorl.tools.server.place import Folder


def run(files: Files, command: str, **arguments: Any) -> tuple[int, str]:
    done = files.run({"command": command, **arguments}, time.monotonic() + 5)
    return done["exit_code"], done["output"].value().decode()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(Folder(str(tmp_path)))


def test_create_view_replace_insert(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a" / "f.py"
    assert run(files, "create", path="a/f.py", file_text="one\ntwo\nthree\n")[0] == 0
    assert run(files, "view", path="a/f.py") == (0, "     1\tone\n     2\ttwo\n     3\tthree\n")
    assert run(files, "view", path="a/f.py", view_range=[2, -1]) == (
        0,
        "     2\ttwo\n     3\tthree\n",
    )
    assert run(files, "view", path="a") == (0, "f.py\n")
    assert run(files, "str_replace", path="a/f.py", old_str="two", new_str="2")[0] == 0
    assert run(files, "insert", path="a/f.py", insert_line=1, new_str="one and a half")[0] == 0
    assert path.read_text() == "one\none and a half\n2\nthree\n"


def test_bytes_that_are_no_text_survive_an_edit(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xff\xfe one \x00\r\n")
    assert run(files, "str_replace", path="f", old_str="one", new_str="two")[0] == 0
    assert (tmp_path / "f").read_bytes() == b"\xff\xfe two \x00\r\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "dance", "path": "f"},
        {"command": "view"},
        {"command": "view", "path": "none"},
        {"command": "view", "path": "f", "view_range": [5, 6]},
        {"command": "view", "path": "f", "view_range": "all"},
        {"command": "view", "path": "a\0b"},
        {"command": "create", "path": "g"},
        {"command": "str_replace", "path": "f", "old_str": "x", "new_str": "y"},
        {"command": "str_replace", "path": "f", "old_str": "a", "new_str": "y"},
        {"command": "str_replace", "path": "f", "old_str": "", "new_str": "y"},
        {"command": "str_replace", "path": "one", "old_str": "a"},
        {"command": "insert", "path": "f", "insert_line": 9, "new_str": "y"},
        {"command": "insert", "path": "f", "insert_line": "1", "new_str": "y"},
        {"command": "view", "path": "pipe"},
        {"command": "create", "path": "pipe", "file_text": "x"},
        {"command": "view", "path": "/dev/zero"},
        {"command": "view", "path": "huge"},
    ],
)
def test_the_agents_mistakes_are_output(
    files: Files, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "f").write_text("a\na\n")
    (tmp_path / "one").write_text("a\n")
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    command = arguments.pop("command")
    code, output = run(files, command, **arguments)
    assert code == 1
    assert output.startswith("error: ")
    assert (tmp_path / "f").read_text() == "a\na\n"
    assert (tmp_path / "one").read_text() == "a\n", "what to write was not said"
