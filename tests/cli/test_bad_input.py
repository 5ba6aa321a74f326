"""Bad input to the real program: one line that says what was given, what was expected and how to
mend it; nothing left behind.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.schema.fields import SCHEMA_VERSION
from prorl.supervisor.root import box_dir

Prorl = Callable[..., subprocess.CompletedProcess[str]]

GOOD = {"task_id": "1", "env": "noop", "prompt": "do nothing"}


@pytest.fixture
def prorl(tmp_path: Path) -> Prorl:
    def run(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("PRORL_")
        } | more
        command = [sys.executable, "-m", "prorl.cli", *argv]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
            timeout=60,
            check=False,
        )

    return run


def _check(
    done: subprocess.CompletedProcess[str], folder: Path, *expected: str, code: int = 2
) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for words in expected:
        assert words in done.stderr
    assert not done.stdout
    assert not (folder / "prorl-runs").exists()
    assert not box_dir(folder / "prorl-runs").exists()
    assert not list(
        Path("/tmp").glob(box_dir(folder / "prorl-runs").name.removesuffix("box") + "*")
    )


def _tasks(*rows: object) -> dict[str, str]:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in (GOOD, *rows))
    return {"tasks.jsonl": text}


SECOND = {**GOOD, "task_id": "2"}
WIDE = {f"column_{number}": number for number in range(200)}
RUN = "run --tasks tasks.jsonl"
OF_RUN = {"r/commits/x": "", "r/manifest.json": json.dumps({"schema_version": SCHEMA_VERSION})}
NEWER = {"new/manifest.json": json.dumps({"schema_version": 99})}


@pytest.mark.parametrize(
    ("files", "line", "expected"),
    [
        (_tasks("{"), RUN, "line 2: '{' is not valid JSON"),
        (_tasks({**SECOND, "env": "nop"}), RUN, "unknown env 'nop'; expected one of"),
        (
            _tasks({**SECOND, "env": "math", "data": {}}),
            RUN,
            "data.answer is None; expected the reference answer",
        ),
        ({"tasks.jsonl": json.dumps(WIDE)}, RUN, "are of no known format; expected one of"),
        (
            {"tasks.jsonl": '{"question": "1+1?"}'},
            RUN,
            "gsm8k (lacks answer)",
        ),
        ({"tasks.jsonl": '{"question": '}, RUN, "is not valid JSON (unexpected end of data); exp"),
        (
            {**_tasks(), "c.yaml": "service: {init: {slot: 3}}"},
            f"{RUN} -c c.yaml",
            "`init.slot`; expected a known key; did you mean `slots`?",
        ),
        (
            {**_tasks(), "file": ""},
            f"{RUN} --root file/root",
            "Not a directory; expected a folder",
        ),
        (
            _tasks(),
            f"{RUN} --set service.sandbox.kind=docker",
            "unknown sandbox kind 'docker'; expected one of apptainer, auto",
        ),
        (NEWER, "replay new", f"expected schema {SCHEMA_VERSION}; read it with that version"),
        (OF_RUN, "sql r 'select nonsense from rollouts'", "nonsense"),
    ],
)
def test_bad_input_is_a_single_line(
    prorl: Prorl, tmp_path: Path, files: dict[str, str], line: str, expected: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    done = prorl(*shlex.split(line))
    _check(done, tmp_path, expected)
    assert len(done.stderr) < 800


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "--policy=http://127.0.0.1:{}",
            "nothing listens at http://127.0.0.1:{}; expected a model server; start the model",
        ),
        (
            "--set=service.http_port={}",
            "port {} of 127.0.0.1: Address already in use; expected a free port",
        ),
    ],
)
def test_an_address_that_is_not_as_it_should_be(
    prorl: Prorl, tmp_path: Path, option: str, expected: str
) -> None:
    """A model server that is not there, and a port that is taken."""
    (tmp_path / "tasks.jsonl").write_text(_tasks()["tasks.jsonl"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if "policy" in option:
            server.close()
        line = f"{RUN} --set service.tokenizer=bytes {option.format(port)}"
        done = prorl(*line.split())
    _check(done, tmp_path, expected.format(port))


@pytest.mark.parametrize("line", [["show"], ["run", "--tasks", "none.jsonl"], ["serve"]])
def test_faults_that_do_not_exist_are_refused_before_anything_begins(
    prorl: Prorl, tmp_path: Path, line: list[str]
) -> None:
    done = prorl(*line, PRORL_FAILPOINTS="log.wriiten:kill")
    _check(done, tmp_path, "PRORL_FAILPOINTS: 'log.wriiten:kill'; expected NAME:FAULT", "unset it")


def test_a_process_of_a_service_refuses_faults_that_do_not_exist(tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    config.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "prorl.deploy.service", "--config", str(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "PRORL_FAILPOINTS": "junk"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "PRORL_FAILPOINTS: 'junk'; expected NAME:FAULT" in done.stderr
