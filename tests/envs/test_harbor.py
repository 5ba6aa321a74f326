"""Task folders of Harbor and terminal-bench: what is read, what tests say, whose fault it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.envs.harbor import HarborEnv, all_passed, reward_of, shell
from prorl.errors import GraderError, RolloutError, TaskError
from prorl.limits import Deadline
from prorl.tasks import load_tasks, read_tasks
from prorl.testing import LocalSandbox
from prorl.types import Json, Stage, Task, ToolResult

ENV = HarborEnv()
TOML = """version = "1.0"
[verifier]
timeout_sec = 90.0
[verifier.env]
LEVEL = "2"
[environment]
memory_mb = 4096
"""
YAML = "instruction: Count.\nmax_test_timeout_sec: 30\n"


def _harbor(folder: Path, name: str = "count", **files: str) -> Path:
    parts = {
        "task.toml": TOML,
        "instruction.md": "Count.\n",
        "environment/Dockerfile": "FROM a\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo 4 > /app/out\n",
        "solution/data.txt": "4\n",
        **files,
    }
    for path, text in parts.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    return folder / name


def _task(folder: Path) -> Task:
    (task,) = load_tasks(_harbor(folder))
    return task


def test_a_folder_of_task_folders_is_read(tmp_path: Path) -> None:
    _harbor(tmp_path)
    old = tmp_path / "old"
    old.mkdir()
    for name, text in {"task.yaml": YAML, "run-tests.sh": "", "solution.sh": "true"}.items():
        (old / name).write_text(text)
    (tmp_path / "no-task").mkdir()
    found = read_tasks(tmp_path, check=ENV.check)
    assert found.about.endswith("2 tasks, read as task folders, for the env harbor")
    new, terminal = found.tasks
    assert (new.task_id, new.prompt, new.data["image"]) == ("count", "Count.\n", "count")
    assert new.data["timeout_s"] == 90.0
    assert new.data["environment"] == {"LEVEL": "2"}
    spec = ENV.sandbox(new, Stage.RUN)
    assert spec is not None
    assert (spec.memory_bytes, spec.fakeroot, spec.overlay_bytes) == (4 << 30, True, 1 << 30)
    assert (terminal.prompt, terminal.data["test"]) == ("Count.", "run-tests.sh")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"task.toml": "["}, "task.toml cannot be read"),
        ({"instruction.md": " "}, "it has no instruction"),
        ({"task.toml": "verifier = 3"}, "verifier is 3"),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, files: dict[str, str], says: str) -> None:
    _harbor(tmp_path, **files)
    with pytest.raises(TaskError, match=f"count: {says}"):
        load_tasks(tmp_path)
    _harbor(tmp_path, "good")
    found = read_tasks(tmp_path, skip_bad=True)
    assert (len(found.tasks), len(found.bad)) == (1, 1)


def test_the_reference_is_the_folders_solution(tmp_path: Path) -> None:
    calls = ENV.reference(_task(tmp_path)).calls
    assert [call.arguments.get("path", "") for call in calls] == [
        ".prorl/solution/data.txt",
        ".prorl/solution/solve.sh",
        "",
    ]
    assert calls[-1].arguments["command"].endswith("bash /solution/solve.sh")


@pytest.mark.parametrize(
    ("said", "value"),
    [("1", 1.0), ("0.25\n", 0.25), ("7", 0.0), ("nan", 0.0), ("yes", 0.0), ('{"a": true}', 1.0)],
)
def test_what_the_tests_wrote(said: str, value: Json) -> None:
    assert reward_of(said) == value


def test_a_summary_with_a_failure_is_no_pass() -> None:
    assert not all_passed("PASSED a\nERROR b - x")
    assert not all_passed("1 passed")


class Ran(LocalSandbox):
    said: str | None = None
    code = 0
    is_full = False

    async def exec(self, argv: object, timeout_s: float, stdin: bytes = b"") -> ToolResult:
        if argv == ["bash", "-c", shell.BRING]:
            return ToolResult(output="no room", exit_code=int(self.is_full))
        if self.said is not None:
            await self.put(shell.REWARD, self.said.encode())
        return ToolResult(output="PASSED t.py::a", exit_code=self.code)


async def test_tests_that_cannot_be_started_are_the_graders_fault(tmp_path: Path) -> None:
    task = _task(tmp_path)
    sandbox = Ran(tmp_path)
    assert (await ENV.score(task, b"", sandbox, Deadline(60.0))).reward == 0
    sandbox.code = 127
    with pytest.raises(GraderError, match="cannot be run"):
        await ENV.score(task, b"", sandbox, Deadline(60.0))
    sandbox.is_full = True
    with pytest.raises(GraderError, match="cannot be brought: no room"):
        await ENV.score(task, b"", sandbox, Deadline(60.0))
    sandbox.is_full = False
    sandbox.said = "0.5"
    assert (await ENV.score(task, b"", sandbox, Deadline(60.0))).reward == 0.5


async def test_tests_that_are_not_on_this_node_are_the_tasks_fault(tmp_path: Path) -> None:
    task = _task(tmp_path)
    (tmp_path / "count/tests/test.sh").unlink()
    with pytest.raises(RolloutError, match="its tests cannot be read here"):
        await ENV.score(task, b"", Ran(tmp_path), Deadline(60.0))


def test_nothing_of_the_verifiers_crosses() -> None:
    for folder in ("tests", "logs", "solution", "usr", "etc"):
        assert f"-path /{folder} " in shell.COLLECT
