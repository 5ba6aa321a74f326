"""What a service and a node of this host say and leave behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.cli.commands.node import scratch


def test_serve_says_that_its_server_is_dead_and_probed_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    inline = ["--set", "service.topology=inline", "--root", str(tmp_path / "root")]
    argv = [sys.executable, "-m", "prorl.cli", "serve", "--policy", url, *inline]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        said = next((line for line in service.stdout if line.startswith("waiting")), "")
        service.send_signal(signal.SIGINT)
        rest = service.stdout.read()
    assert said == f"waiting  {url} is ejected: a probe was refused; it is probed on\n"
    assert rest.endswith("stopped\n")


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
    given = tmp_path / "given"
    with scratch(given, "n7") as folder:
        folder.mkdir()
    assert given.exists()
