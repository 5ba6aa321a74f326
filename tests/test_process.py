"""Tests of how a process of the service starts, logs and ends: each life is a real process."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from prorl.config import ServiceConfig
from prorl.types import Json

HEAD = """
    import asyncio, logging, sys
    from pathlib import Path
    from prorl.errors import ConfigError, UnavailableError
    from prorl.process import live, say_ready, stopping, until_first

    async def serve(config):
        stop = stopping()
        say_ready(node=config.node_id)
"""


def _start(folder: Path, body: str, **config: Json) -> subprocess.Popen[bytes]:
    path = folder / "service.json"
    path.write_text(
        ServiceConfig(node_id="n1").model_dump_json() if not config else json.dumps(config)
    )
    script = (
        dedent(HEAD)
        + "".join(f"    {line}\n" for line in dedent(body).strip().splitlines())
        + "live(Path(sys.argv[1]), serve)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _end(process: subprocess.Popen[bytes]) -> tuple[int, str, list[dict[str, Json]]]:
    out, log = process.communicate(timeout=60)
    return process.returncode, out.decode(), [json.loads(line) for line in log.splitlines()]


def test_it_reports_ready_and_exits_with_0_on_request(tmp_path: Path) -> None:
    process = _start(tmp_path, "await until_first(asyncio.sleep(60), stop.wait())")
    assert process.stdout is not None
    assert process.stdout.readline() == b'ready {"node":"n1"}\n'
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == 0


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ("raise ConfigError('token is empty', 'a token')", ["token is empty; expected a token"]),
        (
            (
                "raise ExceptionGroup('two', [UnavailableError('a'), ExceptionGroup('in',"
                " [UnavailableError('b')])])"
            ),
            ["a", "b"],
        ),
    ],
)
def test_what_somebody_can_mend_is_a_line_each_and_1(
    tmp_path: Path, body: str, events: list[str]
) -> None:
    code, _, log = _end(_start(tmp_path, body))
    assert (code, [line["event"] for line in log]) == (1, events)
    assert {line["level"] for line in log} == {"error"}


@pytest.mark.parametrize(
    "body", ["1 / 0", "raise ExceptionGroup('x', [UnavailableError('a'), ZeroDivisionError()])"]
)
def test_a_bug_of_ours_is_a_traceback_and_70(tmp_path: Path, body: str) -> None:
    code, _, log = _end(_start(tmp_path, body))
    assert code == 70
    assert log[-1]["level"] == "critical"
    assert "ZeroDivisionError" in log[-1]["traceback"]


def test_a_task_that_dies_with_nobody_waiting_ends_the_process(tmp_path: Path) -> None:
    body = """
        async def part():
            1 / 0
        asyncio.get_running_loop().create_task(part())
        asyncio.get_running_loop().call_soon(print, "goes on")
        await stop.wait()
    """
    code, _, log = _end(_start(tmp_path, body))
    assert (code, log[-1]["level"]) == (70, "critical")
    assert "ZeroDivisionError" in log[-1]["traceback"]


def test_a_wrong_config_is_a_single_line_and_exit_code_1(tmp_path: Path) -> None:
    code, out, log = _end(_start(tmp_path, "pass", nodeid="n1"))
    assert (code, out) == (1, "")
    assert "unknown key `nodeid`; expected a known key; did you mean `node_id`?" in log[0]["event"]


def test_extra_fields_of_a_log_line_are_in_it(tmp_path: Path) -> None:
    body = """
        logging.getLogger("a").warning("%s files", 3)
        logging.getLogger("b").info("removed", extra={"files": [Path("x")]})
    """
    code, _, log = _end(_start(tmp_path, body))
    assert code == 0
    assert [{**line, "at": 0} for line in log] == [
        {"at": 0, "level": "warning", "logger": "a", "event": "3 files"},
        {"at": 0, "level": "info", "logger": "b", "event": "removed", "files": ["x"]},
    ]


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent in between starts it and is killed."""
    child = f"{dedent(HEAD)}    await asyncio.sleep(30)\nlive(Path(sys.argv[1]), serve)\n"
    (tmp_path / "service.json").write_text("{}")
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1],"
        " sys.argv[2]]).wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, child, str(tmp_path / "service.json")],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith(b"ready ")
    parent.kill()
    parent.wait()
    assert select.select([parent.stdout], [], [], 10)[0]
    assert parent.stdout.read() == b""  # the last holder of the pipe is gone
    parent.stdout.close()
