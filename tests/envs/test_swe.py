"""The swe env through real sandboxes: solutions pass, what only looks like one does not, and faults
lie with whom they belong.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.envs import get_env
from prorl.envs.swe import SweEnv, fields
from prorl.errors import GraderError, RolloutError, SandboxError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.spawn import spawned
from prorl.tasks import load_tasks
from prorl.types import FailureCode, Json, Score, Stage, Task, ToolCall

TASKS = {task.task_id: task for task in load_tasks(Path(__file__).with_name("swe_tasks.jsonl"))}
CALC, LRU = TASKS["calc-1"], TASKS["lru-1"]
ENV = SweEnv()
FIX = 'sed -i \'s/int(text.strip())/int(text.strip().replace(",", ""))/\' calc/parse.py'
NUMBERS = count()

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(sandbox_kind: str) -> AsyncIterator[UnixSandboxHost]:
    async with spawned(sandbox_kind) as (host, _):
        yield host


@asynccontextmanager
async def _prepared(host: UnixSandboxHost, task: Task, stage: Stage) -> AsyncIterator[Sandbox]:
    spec = ENV.sandbox(task, stage)
    assert spec is not None
    ref = await host.start(f"run/{next(NUMBERS)}/1", stage, spec)
    async with host.connect(ref) as sandbox:
        await ENV.prepare(task, sandbox)
        yield sandbox
    await host.stop(ref)


def _task(task: Task = CALC, **data: Json) -> Task:
    return replace(task, data={**task.data, **data})


async def _change(host: UnixSandboxHost, task: Task, *calls: ToolCall) -> bytes:
    """The artifact of an agent that makes these calls; empty if it broke its workspace."""
    async with _prepared(host, task, Stage.RUN) as sandbox:
        for call in calls:
            done = await ENV.call(task, sandbox, call, 10.0)
            assert done.exit_code == 0, done.output
        try:
            return await ENV.artifact(task, "done", sandbox)
        except SandboxError as error:
            if error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return b""


async def _score(
    host: UnixSandboxHost, task: Task, artifact: bytes, eval_s: float = 120.0
) -> Score:
    async with _prepared(host, task, Stage.EVAL) as sandbox:
        return await ENV.score(task, artifact, sandbox, Deadline(eval_s))


async def _bash(host: UnixSandboxHost, command: str, task: Task = CALC) -> Score:
    return await _score(
        host, task, await _change(host, task, ToolCall("bash", {"command": command}))
    )


# ---- what counts


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_the_reference_resolves_it_and_nothing_does_not(
    host: UnixSandboxHost, task: Task
) -> None:
    get_env("swe").check(task)
    solved = await _score(host, task, await _change(host, task, *ENV.reference(task).calls))
    assert solved.reward == 1, solved.log
    assert {part.name: part.value for part in solved.parts} == {
        "resolved": 1.0,
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
    }
    assert await _change(host, task) == b""
    assert (await _score(host, task, b"")).reward == 0


async def test_edits_new_files_deletions_and_commits_of_the_agent_all_count(
    host: UnixSandboxHost,
) -> None:
    edit = ToolCall(
        "files",
        {
            "command": "str_replace",
            "path": "calc/parse.py",
            "old_str": "int(text.strip())",
            "new_str": "to_int(text)",
        },
    )
    first = "from calc.digits import to_int\n"
    insert = ToolCall(
        "files", {"command": "insert", "path": "calc/parse.py", "insert_line": 1, "new_str": first}
    )
    body = "def to_int(text):\n    return int(text.strip().replace(',', ''))\n"
    create = ToolCall("files", {"command": "create", "path": "calc/digits.py", "file_text": body})
    commit = ToolCall(
        "bash",
        {"command": "git add -A && git commit -qm 'mine' && rm README.md && printf 'a\\0b' > blob"},
    )
    artifact = await _change(host, CALC, edit, insert, create, commit)
    assert b"GIT binary patch" in artifact
    assert b"deleted file" in artifact
    assert (await _score(host, CALC, artifact)).reward == 1


async def test_half_a_solution_is_none_and_its_share_is_kept(host: UnixSandboxHost) -> None:
    read = "        if key in self._entries: self._entries.move_to_end(key)"
    half = f"sed -i 's/        return self._entries.get(key, default)/{read}\\n&/' lru.py"
    score = await _bash(host, half, LRU)
    assert score.reward == 0
    assert {part.name: part.value for part in score.parts} == {
        "resolved": 0.0,
        "fail_to_pass": 0.5,
        "pass_to_pass": 1.0,
    }
    broken = await _bash(
        host,
        f"{FIX}; sed -i 's/def parse/def parse(text): return 1234567\\ndef unused/' calc/parse.py",
    )
    assert (broken.reward, broken.parts[2].value) == (0, 0.0)


@pytest.mark.parametrize(
    "beside",
    [
        "git init -q vendored; echo x > vendored/file; git -C vendored add -A",
        "echo x > secret; chmod 000 secret; mkdir shut; echo x > shut/file; chmod 000 shut",
        "head -c 600000 /dev/urandom > core; yes | head -c 3000000 > build.log",
        "mkfifo pipe; ln -s / root; ln -s nowhere dangling",
        "for i in $(seq 300); do head -c 9000 /dev/urandom > data$i; done",
        "git config core.hooksPath /nowhere; git config diff.external false; git stash -q -u",
    ],
    ids=["a repository", "shut files", "large files", "odd files", "many files", "git's settings"],
)
async def test_a_fix_counts_beside_what_git_stumbles_over(
    host: UnixSandboxHost, beside: str
) -> None:
    score = await _bash(host, f"{beside}; {FIX}")
    assert score.reward == 1, score.log


@pytest.mark.parametrize(
    "then",
    [
        "sed -i 's/$/\\r/' calc/parse.py README.md; echo '* text=auto eol=crlf' > .gitattributes",
        "echo '*.py filter=mine diff=mine -text' > .gitattributes; git config core.autocrlf true",
        "git mv README.md README.rst; ln -s parse.py calc/also.py; ln -s README.rst README.md",
        "mkdir calc/new; git mv calc/parse.py calc/new/it.py; mv calc/new calc/parse;"
        " echo 'from calc.parse.it import parse' > calc/parse/__init__.py",
        "git commit -qam done; git checkout -q -b other; git gc -q; echo 'x = 1' > calc/argparse.py",
        "echo 1 > \"$(printf 'caf\\351.txt')\"; echo > 'what[1]*?.txt'; printf 'x = 1' > calc/last.py",
        "printf '[project]\\nname = \"calc\"\\n' > pyproject.toml; echo 'def test_mine(): pass' >"
        " tests/test_mine.py",
    ],
    ids=["line ends", "filters", "renames", "a package", "commits", "odd names", "settings"],
)
async def test_a_fix_counts_however_it_is_laid_down(host: UnixSandboxHost, then: str) -> None:
    score = await _bash(host, f"{FIX}; {then}")
    assert score.reward == 1, score.log


async def test_a_workspace_that_cannot_be_read_is_the_policys_failure_and_says_so(
    host: UnixSandboxHost,
) -> None:
    for command, says in (
        ("rm -rf .git", "its repository is broken"),
        ("yes | head -c 900000 | shuf -i 1-140000 > calc/parse.py", "are more than 524288 bytes"),
    ):
        async with _prepared(host, CALC, Stage.RUN) as sandbox:
            await sandbox.exec(["bash", "-c", command], 20.0)
            with pytest.raises(SandboxError, match=says) as caught:
                await ENV.artifact(CALC, "done", sandbox)
        assert caught.value.code is FailureCode.SANDBOX_BROKEN


# ---- what does not


TEST_COMMAND = "python3 -m unittest -v tests.test_parse"
SAY_OK = 'print("test_thousands (tests.test_parse.ParseTest) ... ok")'
PASS_ALL = (
    "import unittest\\nunittest.TestCase.run = lambda self, result: result.addSuccess(self)\\n"
)


@pytest.mark.parametrize(
    "command",
    [
        (
            "printf 'import unittest\\nclass ParseTest(unittest.TestCase):\\n def"
            " test_thousands(self): pass\\n' > tests/test_parse.py"
        ),
        "rm -r tests; mkdir tests; touch tests/__init__.py",
        "rm -r tests; ln -s /tmp tests",
        "git rm -q tests/test_parse.py",
        f"printf '{PASS_ALL}' > sitecustomize.py",
        f"printf '{PASS_ALL}' > conftest.py",
        f"mkdir unittest; printf '{SAY_OK}' > unittest/__main__.py; touch unittest/__init__.py",
        "printf 'import os; os._exit(0)\\n' >> calc/parse.py",
        "printf 'import sys; sys.exit(0)\\n' >> calc/__init__.py",
        (
            "printf 'print(\"ok\")\\n' >> calc/parse.py; sed -i 's/    return int/   "
            ' print("ok\\\\nok"); return int/\' calc/parse.py'
        ),
        (
            "printf 'import os, signal; os.kill(1, signal.SIGKILL); os.kill(os.getppid(),"
            " signal.SIGKILL)\\n' >> calc/__init__.py"
        ),
        (
            'printf \'import subprocess; subprocess.run(["rm", "-rf", ".git"])\\n\' >>'
            " calc/__init__.py"
        ),
        (
            'printf \'import os, subprocess; subprocess.run(["rm", "-rf", ".git"]);'
            ' os.symlink("/tmp", ".git")\\n\' >> calc/__init__.py'
        ),
        (
            "git update-ref refs/prorl/base HEAD; git commit -q --allow-empty -m x; git update-ref"
            " refs/prorl/base HEAD"
        ),
        "rm -rf .git",
        "rm -rf .git; ln -s /proc .git",
    ],
)
async def test_what_only_looks_solved_scores_0(host: UnixSandboxHost, command: str) -> None:
    score = await _bash(host, command)
    assert score.reward == 0, score.log


@pytest.mark.parametrize(
    "command",
    ["printf 'garbage' > tests/test_parse.py", "rm -r tests", "printf 'x = 1/0' > conftest.py"],
)
async def test_a_solution_counts_whatever_the_agent_did_to_the_tests(
    host: UnixSandboxHost, command: str
) -> None:
    score = await _bash(host, f"{FIX}; {command}")
    assert score.reward == 1, score.log


async def test_a_file_that_would_be_in_the_tests_way_is_the_policys_doing(
    host: UnixSandboxHost,
) -> None:
    moved = str(LRU.data["test_patch"]).replace("test_lru.py", "checks/test_lru.py")
    score = await _bash(host, "printf 'x' > checks", _task(LRU, test_patch=moved))
    assert score.reward == 0
    assert "does not apply" in score.log


async def test_nothing_remains_outside_the_workspace(host: UnixSandboxHost) -> None:
    """Some kinds share /tmp with the host."""
    async with _prepared(host, CALC, Stage.RUN) as sandbox:
        for call in ENV.reference(CALC).calls:
            await ENV.call(CALC, sandbox, call, 10.0)
        await ENV.artifact(CALC, "done", sandbox)
        assert (
            await sandbox.exec(
                ["bash", "-c", "find /tmp -maxdepth 1 -type f -newer calc/build.py -uid $(id -u)"],
                10.0,
            )
        ).output == ""


async def test_nothing_hidden_enters_run_and_no_history_shows_the_fix(
    host: UnixSandboxHost,
) -> None:
    async with _prepared(host, CALC, Stage.RUN) as sandbox:
        result = await sandbox.exec(
            ["bash", "-c", "grep -r thousands . ; git log --all --format=%s; git status --short"],
            10.0,
        )
    assert result.output == "base\n"
    assert "test_thousands" not in "".join(message.content for message in ENV.messages(CALC))


# ---- whose fault it is


async def test_tests_that_hang_score_0_unless_evals_time_was_short(host: UnixSandboxHost) -> None:
    task = _task(timeout_s=1.0)
    hang = await _change(
        host, task, ToolCall("bash", {"command": "printf 'while True: pass\\n' >> calc/parse.py"})
    )
    score = await _score(host, task, hang)
    assert score.reward == 0
    assert "did not end in time" in score.log
    with pytest.raises(GraderError, match="too little"):
        await _score(host, task, hang, eval_s=0.5)


async def test_a_test_patch_that_does_not_apply_is_the_tasks_fault(host: UnixSandboxHost) -> None:
    task = _task(test_patch=str(CALC.data["test_patch"]).replace("test_plain", "test_other"))
    with pytest.raises(RolloutError, match="test_patch does not apply") as caught:
        await _score(host, task, await _change(host, task, ToolCall("bash", {"command": FIX})))
    assert caught.value.code is FailureCode.BAD_TASK


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"setup": "echo no compiler; false; echo after"},
            (
                "setup ended with exit status 1: no compiler$|setup ended with exit status 1: no"
                " compiler;"
            ),
        ),
        ({"setup": "sleep 20", "setup_s": 0.3}, r"setup did not end in 0\.3 s"),
        (
            {"files": {}, "archive": "/nowhere/repo.tar"},
            "cannot read /nowhere/repo.tar on this node",
        ),
    ],
)
async def test_a_workspace_that_cannot_be_prepared_is_the_tasks_fault(
    host: UnixSandboxHost, data: dict[str, Json], says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        async with _prepared(host, _task(**data), Stage.RUN):
            pass


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"PASS_TO_PASS": "[1]"}, "PASS_TO_PASS is"),
        ({"PASS_TO_PASS": "not json"}, "PASS_TO_PASS is"),
        ({"test_patch": "no diff"}, "test_patch names no file"),
        ({"files": {}}, "no repository"),
        ({"files": {"a.py": 3}}, "files.'a.py'"),
        ({"files": "a.py"}, "data.files is 'a.py'"),
        ({"setup": ["make"]}, "data.setup is"),
        ({"sandbox": {"memory": 1}}, "data.sandbox has memory; expected .*memory_bytes"),
        ({"tools": ["wether"]}, "unknown tool 'wether'"),
        (
            {"test_cmd": "make test", "test_command": ""},
            "test_cmd is not read; expected data.test_",
        ),
        ({"repo_archive": "x.tar"}, "repo_archive is not read; expected data.archive; rename it"),
        ({"environment": {"A B": "c"}}, "environment has 'A B'"),
        ({"environment": {"A": 1}}, "environment has 'A': 1"),
        ({"sandbox": {"memory_bytes": "2G"}}, "sandbox.memory_bytes is '2G'; expected int"),
    ],
)
async def test_bad_tasks_are_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(_task(**data))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_tasks_with_valid_lists_are_accepted(host: UnixSandboxHost, task: Task) -> None:
    await _verify(host, task)


async def _verify(host: UnixSandboxHost, task: Task) -> None:
    async with _prepared(host, task, Stage.EVAL) as sandbox:
        await ENV.verify(task, sandbox, Deadline(60.0))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {
                "environment": {"PYTHONPATH": "/nowhere"},
                "test_command": "cd tests; python3 -m unittest -v test_parse",
            },
            r"2 of 2 PASS_TO_PASS tests do not pass on the untouched repository, e\.g\. 'test_plain",
        ),
        (
            {"PASS_TO_PASS": ["test_gone (tests.test_gone.GoneTest)"]},
            r"no test of tests/test_gone\.py ran: does test_command name it",
        ),
        ({"patch": ""}, ""),
        ({"FAIL_TO_PASS": ["test_plain (tests.test_parse.ParseTest)"]}, "pass on the untouched"),
        (
            {"FAIL_TO_PASS": ["test_gone (tests.test_parse.ParseTest)"]},
            "1 of 1 FAIL_TO_PASS tests do not pass with the reference patch",
        ),
        ({"patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}, "reference patch does not apply"),
        ({"test_command": "sleep 30", "timeout_s": 0.5}, "did not end in time"),
    ],
)
async def test_a_task_with_invalid_lists_is_refused(
    host: UnixSandboxHost, data: dict[str, Json], says: str
) -> None:
    if not says:
        await _verify(host, _task(**data))
        return
    with pytest.raises(RolloutError, match=says) as caught:
        await _verify(host, _task(**data))
    assert caught.value.code is FailureCode.BAD_TASK


async def test_without_a_command_the_files_of_both_lists_run() -> None:
    task = _task(
        test_command="",
        FAIL_TO_PASS=["tests/a.py::f"],
        PASS_TO_PASS=["tests/b.py::g", "tests/a.py::h"],
    )
    assert fields.command(task).endswith(" tests/a.py tests/b.py")


async def test_what_the_host_has_installed_passes_no_test(host: UnixSandboxHost) -> None:
    """A test that imports a package of the host's would pass here and nowhere else."""
    with pytest.raises(RolloutError, match="PASS_TO_PASS tests do not pass on the untouched"):
        await _verify(host, _task(test_command=f"python3 -c 'import orjson' && {TEST_COMMAND}"))


async def test_setup_tests_and_the_agents_bash_have_the_tasks_environment(
    host: UnixSandboxHost,
) -> None:
    task = _task(
        environment={"COLOUR": "deep blue"},
        setup="[ \"$COLOUR\" = 'deep blue' ]",
        test_command='[ "$COLOUR" = "deep blue" ] && python3 -m unittest -v tests.test_parse',
    )
    call = ToolCall("bash", {"command": f'[ "$COLOUR" = "deep blue" ] && {FIX}'})
    assert (await _score(host, task, await _change(host, task, call))).reward == 1


# ---- repositories that come as one file


def _tar(repository: Path, out: Path) -> Path:
    with tarfile.open(out / "repo.tar.gz", "w:gz") as tar:
        tar.add(repository, arcname=".")
    return out / "repo.tar.gz"


def _git(folder: Path, *words: str) -> str:
    argv = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


async def test_an_archive_is_unpacked_without_its_history(
    host: UnixSandboxHost, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    for path, text in CALC.data["files"].items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    _git(repository, "init", "-q")
    _git(repository, "add", "-A")
    _git(repository, "commit", "-qm", "before")
    task = _task(files={}, archive=str(_tar(repository, tmp_path)))
    assert ENV.preparation(task)
    async with _prepared(host, task, Stage.RUN) as sandbox:
        result = await sandbox.exec(
            [
                "bash",
                "-c",
                (
                    "git log --all --format=%s; ls -A; git cat-file --batch-all-objects"
                    " --batch-check | wc -l"
                ),
            ],
            10.0,
        )
        await sandbox.exec(["bash", "-c", FIX], 10.0)
        artifact = await ENV.artifact(task, "done", sandbox)
    assert result.output.split()[:6] == [
        "base",
        ".git",
        "README.md",
        "calc",
        "tests",
        result.output.split()[5],
    ]
    assert (await _score(host, task, artifact)).reward == 1


async def test_what_is_prepared_is_named_by_all_that_it_is_made_from(tmp_path: Path) -> None:
    assert ENV.preparation(LRU) == ""
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"one")
    tasks = [
        CALC,
        _task(setup="true"),
        _task(files={"a": "b"}),
        _task(archive=str(archive)),
        _task(environment={"a": "b"}),
    ]
    texts = {ENV.preparation(task) for task in tasks}
    archive.write_bytes(b"three")
    texts.add(ENV.preparation(tasks[3]))
    assert len(texts) == 6
    assert ENV.preparation(_task(patch="x", FAIL_TO_PASS=["y"])) == ENV.preparation(CALC)
