"""The gateway's process: killed where it hurts, started again from its log, refused when it must
not start.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.service.log.log_schema import LOG_VERSION
from prorl.types import Json
from tests.service.running_gateway import TOKEN, settings


@contextmanager
def gateway(
    tmp_path: Path, failpoints: str = "", **more: Json
) -> Iterator[subprocess.Popen[bytes]]:
    config = tmp_path / "service.json"
    alone = {"workers": "nodes", "store": {"own_process": True}}
    values = settings(tmp_path, **alone, **more)
    config.write_text(values.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "prorl.deploy.service", "--config", str(config)],
        env=os.environ | {"PRORL_FAILPOINTS": failpoints},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(b"ready "), process.communicate()[1].decode()
    return str(json.loads(line[6:])["http"])


def call(url: str, method: str, path: str, body: Json = None) -> tuple[int, Json]:
    """A request; 0 when the connection broke."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, data, headers, method=method), timeout=10
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, None


def body(*keys: str) -> Json:
    task = {"task_id": "t", "env": "noop", "prompt": "p"}
    return {"groups": [{"task": task, "n": 2, "key": key} for key in keys]}


def test_killed_between_commit_and_reply_a_retry_gives_the_same_group(tmp_path: Path) -> None:
    with gateway(tmp_path, "log.accepted:kill@1") as process:
        url = ready(process)
        assert call(url, "POST", "/v1/runs", {"run_id": "r"})[0] == 201
        assert call(url, "POST", "/v1/runs/r/groups", body("k")) == (0, None)
        assert process.wait(10) == -signal.SIGKILL
    with gateway(tmp_path) as process:
        url = ready(process)
        status, answer = call(url, "POST", "/v1/runs/r/groups", body("k"))
        assert status == 200, "it was accepted before the kill"
        assert [(g["group_id"], g["first_rollout_id"], g["created"]) for g in answer["groups"]] == [
            (0, 0, False)
        ]
        assert call(url, "GET", "/v1/runs/r")[1]["counts"]["queued"] == 2


def test_sigterm_ends_it_cleanly_and_soon(tmp_path: Path) -> None:
    with gateway(tmp_path) as process:
        url = ready(process)
        call(url, "POST", "/v1/runs", {"run_id": "r"})
        process.terminate()
        assert process.wait(60) == 0
    manifest = json.loads((tmp_path / "root" / "r" / "manifest.json").read_text())
    assert manifest["config"]["run_id"] == "r"
    assert [name for name in os.listdir(tmp_path / "root" / "r") if name.endswith(".tmp")] == []


def test_a_wrong_start_is_refused_in_a_single_line(tmp_path: Path) -> None:
    def refusal(**more: Json) -> str:
        with gateway(tmp_path, **more) as process:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 1
            assert out == b""
        (line,) = [json.loads(line)["event"] for line in err.splitlines()]
        return str(line)

    assert "`token` is empty" in refusal(token="")
    with gateway(tmp_path) as process:
        port = int(ready(process).rpartition(":")[2])
        assert "in use by another gateway" in refusal()
        assert "choose another `http_port`" in refusal(http_port=port, root=tmp_path / "other")
    log = sqlite3.connect(tmp_path / "root" / "control.db")
    log.execute("UPDATE meta SET value = ?", (LOG_VERSION + 1,))
    log.commit()
    log.close()
    assert "which made it, or another root" in refusal()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_port_and_root_are_free_again(tmp_path: Path, number: signal.Signals) -> None:
    with gateway(tmp_path) as process:
        port = int(ready(process).rpartition(":")[2])
        process.send_signal(number)
        process.wait(60)
    with gateway(tmp_path, http_port=port) as process:
        assert ready(process).endswith(f":{port}")
