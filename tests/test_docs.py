"""Tests that the files, commands and SQL which README and docs name exist; and that the
documentation builds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from prorl.cli import summary
from prorl.cli.app import COMMANDS, build, dispatch
from prorl.cli.demo.report import BY_VERSION_SQL as DEMO_SQL
from prorl.errors import GraderError
from prorl.limits import Deadline
from prorl.rubric import Rubric, reward
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.filter import check_filter
from prorl.trainer.adapters import TESTED_VERSIONS
from prorl.types import FailureCode, Task
from prorl.view.opened import Opened

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md")])
ROOMS = ("prorl", "stages", "storage", "trainer", "tests", "configs", "docs")


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)(?:\s[^`]*)?`", page.read_text())
    ours = [name for name in named if name.split("/")[0] in ROOMS and name != "prorl/NAME.py"]
    missing = [name for name in ours if "NAME" not in name and not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    commands = re.findall(r"^    prorl (\w+)", text, re.M) + re.findall(r"`prorl (\w+)", text)
    assert set(commands) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = page.read_text()
    named_targets = re.findall(r"^    make ([a-z-]+)", text, re.M) + re.findall(
        r"`make ([a-z-]+)", text
    )
    assert set(named_targets) <= targets


@pytest.mark.parametrize("page", [*PAGES, ROOT / "configs" / "Containerfile"], ids=names)
def test_pages_install_prorl_from_a_path_and_extras_that_exist(page: Path) -> None:
    """prorl is on no index: whoever took its name there would have every reader of the page."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for line in re.findall(r"(?:pip3?|pipx|uv add|uv pip) install ([^`\n&]*)", page.read_text()):
        words = shlex.split(line.split("   ")[0], posix=True)
        assert not [word for word in words if re.match(r"prorl($|[\[=<>~!])", word)], line
        for word in words:
            named = re.fullmatch(r"(?:\.|/src|PATH/\S+)\[([\w,]+)\]", word)
            assert named is None or set(named[1].split(",")) <= extras.keys(), line


def test_the_trl_page_installs_the_version_that_its_adapter_was_tried_with() -> None:
    page = (ROOT / "docs" / "trainer.md").read_text()
    (version,) = set(re.findall(r"trl==([\d.]+)", page))
    assert version.startswith(f"{TESTED_VERSIONS['trl']}.")


def test_the_command_lines_of_the_cluster_page_parse() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text().replace("\\\n", "")
    lines = re.findall(r"^ {7}prorl (.*)$", text, re.M)
    assert [line.split()[0] for line in lines] == ["image", "serve", "status", "node"]
    for line in lines:
        ignored = build().parse_args(shlex.split(line), exit_on_error=False, print_error=False)[2]
        assert not ignored


class Judge(BaseHTTPRequestHandler):
    """A model server that replies with `text`."""

    text = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps({"choices": [{"message": {"content": self.text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


def test_the_judge_of_the_docs_scores_and_fails_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    recipe = next(
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "JUDGE" in code
    )
    names: dict[str, Any] = {
        "json": json,
        "os": os,
        "urllib": urllib,
        "reward": reward,
        "Task": Task,
    }
    exec(recipe, names)
    server = HTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
    task, rubric = Task(task_id="t", env="e", prompt="1+1?"), Rubric((names["judged"], 1.0))

    async def score() -> float:
        return (await rubric.score(task, b"2", None, Deadline(30.0))).reward

    for text, expected in (("7", 0.7), ("11", 1.0), ("-3", 0.0)):
        Judge.text = text
        assert asyncio.run(score()) == expected
    Judge.text = "good"
    with pytest.raises(GraderError) as error:
        asyncio.run(score())
    assert error.value.code is FailureCode.GRADER_ERROR
    server.shutdown()
    server.server_close()


def test_the_envs_with_turns_of_the_docs_pass_check(
    tmp_path: Path, sandbox_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    spelling, mean = (code for code in codes if "def respond" in code)
    (row,) = re.findall(r'^    (\{"task_id": "mean/1".*)$', text, re.M)
    task = json.loads(row)
    task["data"]["wheels"] = "host"  # a test asks no index
    (tmp_path / "mean.py").write_text(mean)
    (tmp_path / "spelling.py").write_text(spelling)
    data = {"word": "yes"}
    other = {"task_id": "s", "env": "spelling.py:Spelling", "prompt": "Spell it.", "data": data}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(task)}\n{json.dumps(other)}\n")
    code = dispatch(["check", str(tmp_path / "tasks.jsonl"), "--sandbox", sandbox_kind])
    assert "reference right" in capsys.readouterr().out
    assert code == 0


def test_the_filter_of_the_docs_is_valid() -> None:
    sql = re.search(r"```sql\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    assert sql
    check_filter(sql[1])


def _queries() -> dict[str, str]:
    """Each SELECT that a page, a help text or a last line names for `prorl sql`, by where it is."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "prorl").rglob("*.py")]
    queries = {"failed": summary.FAILED_SQL, "by_task": summary.BY_TASK_SQL, "demo": DEMO_SQL}
    for file in files:
        for number, query in enumerate(re.findall(SQL_LINE, file.read_text(), re.DOTALL)):
            queries[f"{file.name}-{number}"] = " ".join(query[1].split())
    return queries


SQL_LINE = r"""prorl sql [^`"'\n{]*(["'])(select [^\\]*?)\1"""
QUERIES = _queries()


@pytest.mark.parametrize("where", QUERIES)
def test_each_select_of_the_docs_runs(where: str) -> None:
    run = str(ROOT / "tests" / "storage" / "golden_root" / "r")
    assert StoredRun(run).sql(QUERIES[where]).num_columns
    assert Opened(run).ask(QUERIES[where]) is not None


def test_the_docs_name_selects() -> None:
    assert len(QUERIES) > 8


def test_pages_say_what_the_code_says() -> None:
    """docs/settings.md, docs/columns.md and the docstrings in pages: `python docs/write.py`."""
    argv = [sys.executable, str(ROOT / "docs" / "write.py"), "--check"]
    check = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (check.stdout, check.returncode) == ("", 0)


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the documentation's generator (dependency group `docs`)")
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(ROOT / "docs")]
    done = subprocess.run(
        [*argv, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
