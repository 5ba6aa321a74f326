"""What a service waits for and no counter tells: an image in the making, a server that is dead."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from prorl.cli.commands.node import scratch
from prorl.cli.commands.serve import dead_server
from prorl.cli.progress import StageLoad, figures, snapshot
from prorl.cli.waits import image_making_s, server_trouble
from prorl.sandbox.images.registry import Registry
from prorl.types import Stage


def test_an_image_in_the_making_is_seen_and_one_that_a_dead_maker_left_is_not(
    tmp_path: Path,
) -> None:
    assert image_making_s(tmp_path / "none") == 0.0
    registry = Registry(tmp_path)
    registry.open()
    with registry.workplace():
        assert 0.0 < image_making_s(tmp_path) < 60.0
    assert image_making_s(tmp_path) == 0.0
    (tmp_path / "work" / "dead.lock").touch()
    assert image_making_s(tmp_path) == 0.0


def test_the_line_of_a_run_says_that_init_waits_for_an_image() -> None:
    gauges = {"slots": 4, "busy": 1, "queued": 0, "tokens": 0}
    run = {"state": "open", "counts": {}, "reward_mean": None, "stages": {"init": gauges}}
    now = snapshot(run, 1, 1.0, image_s=41.0)
    assert now.pools == {Stage.INIT: StageLoad(slots=4, busy=1)}
    said = "INIT waits for an image or packages that are being made, for 41 s so far"
    assert said in figures(now, now)
    assert "INIT waits" not in figures(snapshot(run, 1, 1.0), now)


@contextmanager
def _server(code: int) -> Iterator[str]:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("code", "said"), [(200, ""), (401, ""), (503, "it answered 503")])
def test_a_server_says_itself_whether_it_is_well(code: int, said: str) -> None:
    with _server(code) as url:
        assert server_trouble(url) == said


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
    assert f"{url}: asked GET /health, " in said
    assert "Connection refused; it is probed on, and rollouts wait until it answers" in said
    assert rest.endswith("stopped\n")


def test_what_is_no_server_is_not_asked() -> None:
    assert asyncio.run(dead_server("scripted:oracle")) == ""


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
