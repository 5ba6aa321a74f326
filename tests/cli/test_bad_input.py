"""Bad input to the real program: one line that says what was given, what was expected and how to
mend it; nothing left behind.
"""

from __future__ import annotations

import json
import os
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


def _tasks(folder: Path, *rows: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def _check(done: subprocess.CompletedProcess[str], folder: Path, *said: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for words in said:
        assert words in done.stderr
    assert not done.stdout
    assert not (folder / "prorl-runs").exists()
    assert not box_dir(folder / "prorl-runs").exists()
    assert not list(
        Path("/tmp").glob(box_dir(folder / "prorl-runs").name.removesuffix("box") + "*")
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: '{' is not valid JSON"),
        ([1], "line 2: found list; expected one JSON object a line"),
        ({"task_id": "2", "prompt": "x"}, "line 2"),
        (GOOD, "task_id '1' is also on line 1"),
        ({**GOOD, "task_id": "2", "env": "nop"}, "unknown env 'nop'; expected one of"),
        (
            {"task_id": "2", "env": "math", "prompt": "x", "data": {}},
            "data.answer is None; expected the reference answer",
        ),
    ],
)
def test_a_malformed_task_row(prorl: Prorl, tmp_path: Path, row: object, said: str) -> None:
    _check(prorl("run", "--tasks", _tasks(tmp_path, GOOD, row)), tmp_path, said)


def test_an_unreadable_task_file(prorl: Prorl, tmp_path: Path) -> None:
    _check(
        prorl("run", "--tasks", "none.jsonl"), tmp_path, "no file none.jsonl; expected a task file"
    )
    _check(prorl("run", "--tasks", str(tmp_path)), tmp_path, "is a directory")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    _check(prorl("run", "--tasks", "broken.jsonl.gz"), tmp_path, "not a whole gzip file")


def test_an_unknown_config_key(prorl: Prorl, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("service: {init: {slot: 3}}\n")
    _check(
        prorl("run", "-c", "c.yaml", "--tasks", _tasks(tmp_path, GOOD)),
        tmp_path,
        "init.slot",
        "did you mean `slots`?",
    )


def test_a_missing_backend(prorl: Prorl, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    policy = ("--policy", f"http://127.0.0.1:{port}", "--set", "service.tokenizer=bytes")
    done = prorl("run", "--tasks", _tasks(tmp_path, GOOD), *policy)
    _check(
        done,
        tmp_path,
        f"http://127.0.0.1:{port}: ",
        "Connect call failed",
        "start it",
    )


def test_a_port_in_use(prorl: Prorl, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = prorl("run", "--tasks", _tasks(tmp_path, GOOD), "--set", f"service.http_port={port}")
    _check(
        done,
        tmp_path,
        f"http_port {port} on 127.0.0.1: Address already in use; expected a free port",
    )


def test_a_root_that_cannot_be_written(prorl: Prorl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _check(
        prorl("run", "--tasks", _tasks(tmp_path, GOOD), "--root", "file/root"),
        tmp_path,
        "Not a directory; expected a folder",
    )


def test_a_sandbox_kind_that_does_not_exist(prorl: Prorl, tmp_path: Path) -> None:
    done = prorl("run", "--tasks", _tasks(tmp_path, GOOD), "--set", "service.sandbox.kind=docker")
    _check(done, tmp_path, "unknown sandbox kind 'docker'", "expected one of apptainer, auto")


@pytest.mark.parametrize(
    "argv", [["show", "new"], ["sql", "new", "select 1"], ["verify", "new"], ["replay", "new"]]
)
def test_a_run_directory_of_a_newer_schema(prorl: Prorl, tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").write_text(json.dumps({"schema_version": 99}))
    _check(
        prorl(*argv),
        tmp_path,
        "schema version 99",
        f"expected version {SCHEMA_VERSION}",
        "upgrade prorl",
    )


def test_sql_that_is_not_one_select(prorl: Prorl, tmp_path: Path) -> None:
    (tmp_path / "r" / "commits").mkdir(parents=True)
    (tmp_path / "r" / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION}))
    _check(prorl("sql", "r", "drop table x"), tmp_path, "expected exactly one SELECT")
    _check(prorl("sql", "r", "select nonsense from rollouts"), tmp_path, "nonsense")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["sql"], "no RUN; see `prorl sql --help`"),
        (["run", "--tasks"], "`--tasks` stands alone; expected a value after it"),
        (["serve", "--port", "many"], "--port 'many'; expected a whole number"),
        (["serve", "--as", "slime"], "--as 'slime'; expected polar, nemo-gym, prorl-agent, or one"),
        (["verify", "a", "b", "c"], "is more than this command takes"),
        (["show", "--rot", "x"], "unknown option: --rot; did you mean --root?"),
        (["bench", "nothing"], "unknown benchmark 'nothing'; expected one of"),
        (["show", "r", "9"], "a rollout is chosen by `--rollout 9`; see `prorl show --help`"),
        (["replay", "r", "--port", "99999"], "--port 99999; expected 1 to 65535; leave it out"),
        (
            ["serve", "--policy", "htp://127.0.0.1:8000"],
            "of the unknown scheme 'htp'; expected one of scripted:oracle|flaky|noop|random|faulty,"
            " embedded:DIR, http://HOST:PORT, https://HOST:PORT",
        ),
    ],
)
def test_a_command_line_that_does_not_parse(
    prorl: Prorl, tmp_path: Path, line: list[str], said: str
) -> None:
    _check(prorl(*line), tmp_path, said)


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
        [sys.executable, "-m", "prorl.service", "--config", str(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "PRORL_FAILPOINTS": "junk"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "PRORL_FAILPOINTS: 'junk'; expected NAME:FAULT" in done.stderr


def test_rows_of_no_known_format_get_a_short_line(prorl: Prorl, tmp_path: Path) -> None:
    wide = {f"column_{number}": number for number in range(200)}
    done = prorl("run", "--tasks", _tasks(tmp_path, wide))
    _check(done, tmp_path, "are of no known format; expected one of prorl, humaneval", "docs/tasks")
    assert len(done.stderr) < 800
