"""The code env: real programs graded by a real process, and every known way to fake a pass."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from prorl.envs.code import SOLUTION_FILE, CodeEnv
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.tasks import load_tasks
from prorl.testing import LocalSandbox
from prorl.types import Json, Score, Stage, Task, ToolResult

DATA = Path(__file__).parents[2] / "../shared/data/humaneval/HumanEval.jsonl.gz"
ENV = CodeEnv()
PROMPT = (
    'import math\n\n\ndef helper(x):\n    return x + 1\n\n\ndef double(x):\n    """Twice x."""\n'
)
TEST = """
SECRET = "tests stay here"
def check(candidate):
    assert candidate(2) == 4
    assert candidate([1]) == [1, 1]
    assert helper(1) == 2
"""


def _task(**data: Json) -> Task:
    fields = {
        "prompt": PROMPT,
        "entry_point": "double",
        "test": TEST,
        "canonical_solution": "    return x * 2\n",
    } | data
    return Task(task_id="t/0", env="code", prompt=PROMPT, data=fields)


def test_both_stages_run_in_the_tasks_image() -> None:
    specs = [ENV.sandbox(_task(image="deb12"), stage) for stage in (Stage.RUN, Stage.EVAL)]
    assert [spec.image for spec in specs if spec] == ["deb12", "deb12"]
    ENV.check(_task(image="deb12"))
    with pytest.raises(TaskError, match=r"data\.image is 7"):
        ENV.check(_task(image=7))


async def _score(folder: Path, program: str, **data: Json) -> Score:
    return await ENV.score(_task(**data), program.encode(), LocalSandbox(folder), Deadline(60.0))


@pytest.mark.parametrize(
    "program",
    [
        "    return x * 2\n",
        "def double(x):\n    return x * 2\n",
        "from math import *\n\ndef double(x: int):\n    return helper(x) * 0 + x * 2\n",
    ],
)
async def test_bodies_and_whole_programs_pass(tmp_path: Path, program: str) -> None:
    with_helper = "helper(x)" not in program
    score = await _score(
        tmp_path,
        program,
        test=TEST if with_helper else "def check(candidate):\n    assert candidate(2) == 4\n",
    )
    assert score.reward == 1, score.log


async def test_integers_of_any_size_cross(tmp_path: Path) -> None:
    """Python refuses decimal text of more than 4300 digits."""
    calls = "for n in (10**5000, -(10**5000)): assert candidate(n) == 2 * n"
    test = f"def check(candidate):\n    {calls}\n"
    score = await _score(tmp_path, "def double(x): return x * 2", test=test)
    assert score.reward == 1, score.log


ALWAYS_EQUAL = """
class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def double(x): return Anything(0)
"""
KILL = """
import os, signal
def double(x): os.kill(os.getppid(), signal.SIGKILL)
"""
FRAMES = """
import gc, sys, json, builtins
frame = sys._getframe()
while frame:
    frame.f_globals["check"] = lambda candidate: None
    frame.f_globals["run_check"] = lambda *a: 0
    frame.f_globals["FAIL"] = 0
    frame = frame.f_back
builtins.AssertionError = ValueError
def double(x): return 0
"""
PRINT = """
import os, sys
for line in open("/proc/self/cmdline").read().split(): print(line)
print("start"); print("pass"); sys.stdout.flush(); os.write(1, b"pass\\n")
def double(x): os._exit(0)
"""


@pytest.mark.parametrize(
    "program",
    [
        "def double(x): return 0",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def double(x): raise SystemExit(0)",
        "def triple(x): return x",
        "def double(x): return (",
        "def double(x): return lambda: 4",
        "def double(x): return double(x)",
        ALWAYS_EQUAL,
        KILL,
        FRAMES,
        PRINT,
        "import os\nif os.fork(): os._exit(0)\ndef double(x): return x * 3",
        "def double(x):\n    import ctypes; ctypes.string_at(0)",
    ],
)
async def test_what_is_wrong_or_cheats_scores_0(tmp_path: Path, program: str) -> None:
    score = await _score(tmp_path, program)
    assert score.reward == 0, score.log


async def test_a_program_that_hangs_scores_0_but_lack_of_time_does_not(tmp_path: Path) -> None:
    hang = "def double(x):\n    while True: pass\n"
    assert (await _score(tmp_path, hang, timeout_s=0.5)).reward == 0
    with pytest.raises(GraderError, match="too little"):
        await ENV.score(_task(), hang.encode(), LocalSandbox(tmp_path), Deadline(0.5))


class _ForgedSandbox(LocalSandbox):
    """Answers `exec` with a given output in which NONCE stands for the test runner's own."""

    def __init__(self, folder: Path, output: str, exit_code: int) -> None:
        super().__init__(folder)
        self._output, self._exit_code = output, exit_code

    async def exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"") -> ToolResult:
        nonce = orjson.loads(stdin)["nonce"]
        return ToolResult(output=self._output.replace("NONCE", nonce), exit_code=self._exit_code)


@pytest.mark.parametrize(
    ("output", "exit_code", "reward"),
    [
        ("NONCE start\n\nNONCE pass\n", 0, 1),
        ("NONCE start\n\nNONCE pass\n", 1, 0),
        ("NONCE start\n\nNONCE fail\n", 0, 0),
        ("NONCE start\n\nother pass\n", 0, 0),
        ("NONCE start\nNONCE pass\nand more\n", 0, 0),
        ("NONCE start\n", 0, 0),
        ("NONCE start\n", 137, 0),
    ],
)
async def test_a_pass_needs_the_exit_status_and_the_nonce_last(
    tmp_path: Path, output: str, exit_code: int, reward: float
) -> None:
    sandbox = _ForgedSandbox(tmp_path, output, exit_code)
    score = await ENV.score(_task(), b"pass", sandbox, Deadline(60.0))
    assert score.reward == reward


@pytest.mark.parametrize(
    ("output", "exit_code"),
    [("", 0), ("pass", 0), ("python3: No such file", 127), ("NONCE start\nNONCE error", 2)],
)
async def test_a_test_runner_that_did_not_run_is_the_graders_failure(
    tmp_path: Path, output: str, exit_code: int
) -> None:
    with pytest.raises(GraderError):
        await ENV.score(
            _task(), b"pass", _ForgedSandbox(tmp_path, output, exit_code), Deadline(60.0)
        )


@pytest.mark.parametrize(
    "test",
    ["def check(candidate):\n    candidate(print)\n", "def check(candidate): pass\nboom()\n"],
)
async def test_tests_that_cannot_run_are_the_graders_failure(tmp_path: Path, test: str) -> None:
    with pytest.raises(GraderError, match="could not run"):
        await _score(tmp_path, "    return x\n", test=test)


async def test_values_cross_as_plain_data(tmp_path: Path) -> None:
    test = """
    def check(candidate):
        plain = [None, True, 7, -1.5, 1e300, float("inf"), "é", b"x",
                 [1, (2,)], {"a": {1, 2}}, {(1,): frozenset([3])}, 2**80, 1j]
        for value in plain:
            got = candidate(value)
            assert got == value and type(got) is type(value), (got, value)
        try:
            candidate(x="raise")
        except ZeroDivisionError:
            return
        raise AssertionError("expected an error")
    """
    program = "def double(x):\n    return 1 / 0 if x == 'raise' else x\n"
    score = await _score(tmp_path, program, test=textwrap.dedent(test))
    assert score.reward == 1, score.log


async def test_the_artifact_is_the_last_block_or_the_file(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    assert await ENV.artifact(_task(), "no program", sandbox) == b""
    await sandbox.put(SOLUTION_FILE, b"from the file")
    assert await ENV.artifact(_task(), "see the file", sandbox) == b"from the file"
    final = "```python\nfirst\n```\nbetter:\n```python\nsecond\n```\n"
    assert await ENV.artifact(_task(), final, sandbox) == b"second\n"
    assert (await ENV.score(_task(), b" \n", None, Deadline(1.0))).reward == 0


async def test_nothing_of_the_tests_enters_run(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    task = _task()
    await ENV.prepare(task, sandbox)
    for call in ENV.reference(task).calls:
        await ENV.call(task, sandbox, call, 10.0)
    visible_text = "".join(message.content for message in ENV.messages(task)) + repr(sandbox.calls)
    visible_text += "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert "SECRET" not in visible_text
    assert "assert" not in visible_text


@pytest.mark.parametrize(
    "data",
    [
        {"test": ""},
        {"entry_point": 3},
        {"entry_point": "a b"},
        {"test": "def check(:"},
        {"test": "x = 1"},
        {"prompt": None},
    ],
)
def test_bad_tasks_are_refused(data: dict[str, Json]) -> None:
    with pytest.raises(TaskError, match="t/0"):
        ENV.check(_task(**data))


async def test_oracle_and_noop_on_humaneval(tmp_path: Path) -> None:
    if not DATA.exists():
        pytest.skip("the HumanEval file is not beside this checkout")
    tasks = load_tasks(DATA)
    for task in tasks:
        ENV.check(task)
        assert ENV.sandbox(task, Stage.EVAL) is not None
    for task in tasks[::8]:
        program = str(ENV.reference(task).calls[0].arguments["file_text"])
        score = await ENV.score(task, program.encode(), LocalSandbox(tmp_path), Deadline(60.0))
        assert score.reward == 1, f"{task.task_id}: {score.log}"
