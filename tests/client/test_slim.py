"""A trainer's image: the client works with the core dependencies alone, as pyproject names them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

from prorl.analysis.synthetic import group
from prorl.analysis.synthetic_runs import write_run
from tests.client.replay_process import served
from tests.trainer.tiny_model import SHAPE

ROOT = Path(__file__).parents[2]
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

PROGRAM = """
import json, sys
import prorl, prorl.client.ranks, prorl.client.mix
from prorl.client.records import Feed
tasks = prorl.load_tasks(sys.argv[2])
fed = [len(group) for group in Feed(sys.argv[1], "demo", consumer="slim")]
client = prorl.connect(sys.argv[1])
batches = 0
for batch in client.stream("demo", "other"):
    batches += batch.num_groups
    try:
        batch.torch()
    except ModuleNotFoundError as error:
        assert "batch.torch() needs torch: install it, or use" in str(error)
    else:
        raise AssertionError("torch is here")
client.commit("demo@1", "other")
print(json.dumps([sum(fed), batches, len(list(tasks))]))
"""


def needed() -> set[str]:
    """Distributions of the core dependencies and what they bring, from what is installed here."""
    waiting, names = [re.split(r"[<>=!~ ;\[]", requirement)[0] for requirement in CORE], set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in names:
            names.add(name)
            waiting += [
                re.split(r"[<>=!~ ;\[(]", requirement)[0]
                for requirement in requires(name) or []
                if "extra ==" not in requirement and "python_version" not in requirement
            ]
    return names


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the core dependencies' packages and no others."""
    folder: Path = tmp_path_factory.mktemp("slim")
    for name in needed():
        for file in distribution(name).files or []:
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(source)
    (folder / "prorl").symlink_to(ROOT / "prorl")
    return folder


def run(slim: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", code, *arguments]
    environment = {"PYTHONPATH": str(slim), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_streams_records_and_commits(slim: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "train.jsonl"
    tasks.write_text('{"task_id": "a", "env": "noop", "prompt": "x"}\n')
    stored = write_run(tmp_path / "demo", [group(i, SHAPE) for i in range(3)], "demo")
    with served(stored) as location:
        done = run(slim, PROGRAM, location, str(tasks))
    assert done.returncode == 0, done.stderr
    sequences, groups, num_tasks = json.loads(done.stdout)
    assert (sequences >= 3 * SHAPE.n, groups, num_tasks) == (True, 3, 1)


def test_says_in_a_line_what_the_client_alone_has_not(slim: Path) -> None:
    code = "import sys; sys.argv = ['prorl', 'serve']; from prorl.cli import main; main()"
    done = run(slim, code)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: \w+ is not installed: .*extra `serve`.*\n", done.stderr)
    opened = run(slim, "import prorl; prorl.open('x')")
    assert "extra `serve`" in opened.stderr.splitlines()[-1]


def test_the_core_is_seven_packages() -> None:
    assert len(CORE) == 7
