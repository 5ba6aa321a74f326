"""Tests of the messages and leftovers of a service and of a node of this host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.cli.commands.node import scratch
from prorl.linux.procfs import descendants

PRORL = str(Path(sys.executable).with_name("prorl"))


def test_serve_says_that_its_server_is_dead_and_probed_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        url = f"http://127.0.0.1:{occupied.getsockname()[1]}"
    root = ["--root", str(tmp_path / "root")]
    argv = [sys.executable, "-m", "prorl.cli", "serve", "--policy", url, *root]
    argv += ["--set", "service.tokenizer=bytes"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        first_line = next((line for line in service.stdout if line.startswith("waiting")), "")
        service.send_signal(signal.SIGINT)
        rest = service.stdout.read()
    assert first_line == f"waiting  {url} is ejected: a probe was refused; it is probed on\n"
    assert rest.endswith("stopped\n")


def test_serve_says_which_process_was_killed(tmp_path: Path) -> None:
    argv = [PRORL, "serve", "--policy", "oracle", "--root", str(tmp_path / "root")]
    argv += ["--set", "service.workers=1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        next(line for line in service.stdout if line.startswith("stop"))
        worker = next(pid for pid in descendants(service.pid) if "worker-0" in cmdline(pid))
        os.kill(worker, signal.SIGKILL)
        restart = next((line for line in service.stdout if line.startswith("restart")), "")
        service.send_signal(signal.SIGINT)
        rest = service.stdout.read()
    assert restart.startswith("restart  worker-0 was killed by SIGKILL: started again"), restart
    assert rest.endswith("stopped\n")


def cmdline(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    """Fills a disk; returns the file to remove again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return ballast


def test_serve_says_that_the_disk_is_full_and_that_it_goes_on(small_disk: Path) -> None:
    argv = [PRORL, "serve", "--policy", "oracle", "--root", str(small_disk)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        next(line for line in service.stdout if line.startswith("connect"))
        ballast = fill(small_disk)
        warning = next(line for line in service.stdout if line.startswith("warning"))
        ballast.unlink()
        assert next(line for line in service.stdout if line.startswith("working"))
        service.send_signal(signal.SIGINT)
    assert warning == f"warning  the disk of {small_disk} is full\n"


def test_serve_on_a_full_disk_says_so_in_a_single_line(small_disk: Path) -> None:
    fill(small_disk)
    argv = [PRORL, "serve", "--policy", "oracle", "--root", str(small_disk)]
    process = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert re.fullmatch(r"error: .*(is full|No space left on device).*\n", process.stderr)


def test_a_nodes_own_folder_goes_when_it_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch(None, "n7") as folder:
        assert folder == tmp_path / "prorl-node-n7"
        (folder / "logs").mkdir(parents=True)
    assert not folder.exists()
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(RuntimeError), scratch(None, "n7"):
        raise RuntimeError
    assert folder.exists()
    folder_of_node = tmp_path / "given"
    with scratch(folder_of_node, "n7") as folder:
        folder.mkdir()
    assert folder_of_node.exists()


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["--as", "prorl-agent"], "queue.py"),
        (["--view", "0"], "types.py"),
        *(
            pytest.param(words, file, marks=pytest.mark.slow)
            for words, file in (
                (["--as", "prorl-agent"], "types.py"),
                (["--as", "prorl-agent"], "email.py"),
                (["--view", "0"], "queue.py"),
                (["--view", "0"], "email.py"),
            )
        ),
    ],
)
def test_a_file_of_the_users_named_as_a_module_breaks_no_child(
    tmp_path: Path, file: str, words: list[str]
) -> None:
    (tmp_path / file).write_text("raise SystemExit('the user module was imported')\n")
    inline = ["--set", "service.workers=0", "--set", "service.sandbox.kind=pyns"]
    argv = [PRORL, "serve", "--policy", "oracle", *inline, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as service:
        assert service.stdout is not None
        first = service.stdout.readline()
        service.send_signal(signal.SIGINT)
        service.stdout.read()
    assert first.startswith(("speaks", "look at"))


def test_a_child_that_dies_at_its_start_ends_the_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        inline = ["--set", "service.workers=0", "--set", "service.sandbox.kind=pyns"]
        argv = [PRORL, "serve", "--policy", "oracle", *inline, "--as", f"prorl-agent:{port}"]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode
    assert f"error: no prorl-agent: port {port}: " in done.stderr
