"""`prorl doctor` says in words what is wrong with a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from prorl.cli.app import dispatch
from prorl.cli.probes import _images


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare(1) of util-linux")
def test_a_user_namespace_with_a_single_uid_is_reported(tmp_path: Path) -> None:
    """Else `[Errno 22] Invalid argument`, and as its fix \"run as root\" to somebody who is."""
    unshare = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    command = [*unshare, sys.executable, "-m", "prorl.cli", "doctor", "--root", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    line = next(line for line in output.splitlines() if "sandbox local" in line)
    assert "a user namespace that has one uid" in line
    assert "run as root" not in line
    assert "range of uids" in line


def test_it_says_which_way_images_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SANDBOX__IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("PATH", str(tmp_path))
    check = _images()
    assert (check.level, check.subject) == ("warn", "images")
    assert "stacked by overlayfs" in check.detail or "merged by hard links" in check.detail
    assert "Dockerfiles by none" in check.detail
    assert "buildah" in check.fix


METRICS = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="40000"} 1.0'


@pytest.mark.parametrize(
    ("page", "code", "words"),
    [
        (METRICS, 0, "640000 tokens of KV cache hold 156 rollouts of 4096 tokens at a time"),
        (METRICS, 0, "32 slots leave it idle: --set service.run.slots=156"),
        ("", 1, "states no size of its KV cache: give service.run.slots its --max-num-seqs"),
    ],
)
def test_a_servers_cache_says_how_many_slots_fill_it(
    page: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            """Nothing: the test's own output is looked at."""

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert dispatch(["doctor", "--server", url, "--max-tokens", "4096"]) == code
        server.shutdown()
    assert words in capsys.readouterr().out
