"""Programs with cases: what is right, what is not, what they may cost, and what they cannot reach;
in every kind of sandbox.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from prorl.envs.code import CodeEnv
from prorl.envs.grader import same_output, same_text, same_value
from prorl.errors import GraderError, SandboxError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.sandbox import open as open_sandbox
from prorl.sandbox.node.probe import probe_kind
from prorl.testing import make_task, play, scripted
from prorl.types import Json, Message, Score, Stage, Task

ENV = CodeEnv()
CASES = [{"input": f"{i}\n", "output": f"{2 * i}\n"} for i in range(1, 5)]
READS = make_task("code", "Double.", cases=CASES, canonical_solution="print(2 * int(input()))")
CALLS = make_task(
    "code",
    "Scale.",
    cases=[{"input": [[1, 2], 3], "output": [3, 6]}, {"input": [[], 3], "output": []}],
    function="scale",
    starter_code="class Solution:\n    def scale(self, xs, by):",
)
SCALE = "class Solution:\n    def scale(self, xs, by):\n        return [x * by for x in xs]\n"
SEARCHES = make_task(
    "code",
    "Where is it?",
    cases=[{"input": [[1, 3, 5], 5], "output": 2}, {"input": [[], 1], "output": -1}],
    function="search",  # a name of `re` too
    starter_code="class Solution:\n    def search(self, nums: List[int], target: int) -> int:",
)
SEARCH = f"""{SEARCHES.data["starter_code"]}
        found: Optional[int] = bisect_left(nums, target)
        return found if found < len(nums) and nums[found] == target else -1
"""
DEEP = """
@lru_cache(None)
def count(n):
    return 0 if n == 0 else 1 + count(n - 1)
# two of the 50,000 a level; Python 3.12 and 3.13 bound calls through C by themselves
depth = 24000 if sys.version_info < (3, 12) else 3000
assert count(depth) == depth
first = deque([stdin.readline(), Counter(), math.inf, __file__, sys.argv]).popleft()
"""
BIG = make_task("code", "Square.", cases=[{"input": [3**50], "output": 3**100}], function="square")
KINDS = [
    pytest.param("", id="default"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("apptainer", "local")),
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Opened:
    kind: str
    stack: AsyncExitStack
    sandbox: Sandbox | None = None

    async def working(self) -> Sandbox | None:
        try:
            if self.sandbox is not None:
                await self.sandbox.exec(["true"], 60)
        except SandboxError:
            return None
        return self.sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def opened(request: pytest.FixtureRequest, sandbox_kind: str) -> AsyncIterator[Opened]:
    kind = request.param or sandbox_kind
    probe = await probe_kind(kind)
    if not probe.works:
        pytest.skip(f"{kind} does not work here: {probe.reason}")
    async with AsyncExitStack() as stack:
        yield Opened(kind, stack)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(opened: Opened) -> Sandbox:
    """One for all programs here: what one leaves behind another may find. A new one only behind a
    program that broke it, as in kind `local`, where its parent is the tool server.
    """
    sandbox = await opened.working()
    if sandbox is None:
        spec = ENV.sandbox(READS, Stage.EVAL)
        sandbox = await opened.stack.enter_async_context(open_sandbox(opened.kind, spec))
    opened.sandbox = sandbox
    return sandbox


async def _score(sandbox: Sandbox, program: str, task: Task = READS, eval_s: float = 60) -> Score:
    return await ENV.score(task, program.encode(), sandbox, Deadline(eval_s))


PARTIAL = {"partial": True}


def _with(task: Task = READS, **data: Json) -> Task:
    return make_task(task.env, task.prompt, **{**task.data, **data})


@pytest.mark.parametrize(
    ("task", "program"),
    [
        (READS, "print(2 * int(input()))"),
        (READS, "import sys\nsys.stdout.write(str(2 * int(sys.stdin.read())) + '  \\n\\n')"),
        (READS, "if __name__ == '__main__':\n    print(int(input()) * 2)"),
        (READS, "import threading\nthreading.Thread(target=lambda: print(2*int(input()))).start()"),
        (CALLS, SCALE),
        (CALLS, "def scale(xs, by):\n    print('working')\n    return tuple(x * by for x in xs)"),
        (SEARCHES, SEARCH),
        (READS, DEEP + "print(2 * int(first))"),
        (BIG, "def square(n):\n    return n * n"),
    ],
)
async def test_right_programs(sandbox: Sandbox, task: Task, program: str) -> None:
    score = await _score(sandbox, program, task)
    assert score.reward == 1, score.log


FIND = """
import os, sys
for pid in [os.getppid(), *map(int, filter(str.isdigit, os.listdir("/proc")))]:
    for name in ("mem", "fd/0", "fd/1", "environ"):
        try:
            text = open(f"/proc/{pid}/{name}", "rb").read(1 << 20) if pid != os.getpid() else b""
        except OSError:
            continue
        if b"cases" in text:
            print(2 * int(input()))
            sys.exit()
"""


@pytest.mark.parametrize(
    ("task", "program", "says"),
    [
        (READS, "print(2)", "case 1: gave '2\\n', expected '4\\n'"),
        (READS, "", "no program"),
        (READS, "print(2 * int(input())", "case 0: ended with exit status 1"),
        (READS, "print(2 * int(input()))\nraise SystemExit(3)", "exit status 3"),
        (READS, "import os\nos._exit(0)", "gave ''"),
        (READS, "while True: pass", "case 0: took more than 0.3 s"),
        (READS, "print('x' * (17 << 20))", "larger than"),
        (READS, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", ""),
        pytest.param(
            READS,
            "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nprint(2)",
            "",
            marks=pytest.mark.slow,  # it waits for the whole time that the grader has
        ),
        (READS, FIND, "gave ''"),
        (READS, "print(' 4 4 '); open('solution.py', 'w').write('print(2 * int(input()))')", ""),
        (
            CALLS,
            "class All:\n    def __eq__(self, o): return True\ndef scale(xs, by): return All()",
            "",
        ),
        (CALLS, "import json\njson.dump = print\ndef scale(xs, by): return []", ""),
        (CALLS, "def scale(xs, by): return [str(x * by) for x in xs]", "gave"),
        (CALLS, "def other(xs, by): return xs", "no function scale"),
        (SEARCHES, "def other(nums, target): return 2", "no function search"),
        (BIG, "def square(n):\n    return float(n * n)", "gave"),
        (BIG, "def square(n):\n    return n * n + 1", "gave"),
        (CALLS, "import sys\nsys.exit(0)", "no value that is JSON"),
    ],
)
async def test_wrong_programs(sandbox: Sandbox, task: Task, program: str, says: str) -> None:
    task = _with(task, case_s=0.3 if "while" in program else 5.0, timeout_s=8.0)
    score = await _score(sandbox, program, task)
    assert score.reward == 0, score.log
    assert says in score.log


@pytest.mark.parametrize(
    "program",
    [
        "print('no time was left')",
        "import os, signal\nos.kill(-1, signal.SIGSTOP)\nprint(2)",
        "import os\nos.symlink('/etc/passwd', '.x'); os.rename('.x', '.output')",
        "import os\nos.remove('.output'); os.mkfifo('.output')",
        "print('[' * 100000)",
    ],
)
async def test_no_program_chooses_an_infra_failure(sandbox: Sandbox, program: str) -> None:
    """Though EVAL has less time than the task: what a program does is its own."""
    task = _with(CALLS if "[" in program else READS, case_s=0.5, timeout_s=1e4)
    if "[" in program:
        program = (
            f"def scale(xs, by):\n    import os; os.write(3, b'['*100000); os._exit(0)\n{program}"
        )
    score = await _score(sandbox, program, task)
    assert score.reward == 0, score.log


async def test_what_is_expected_never_enters_the_sandbox(sandbox: Sandbox) -> None:
    secret = "zweiundvierzig"
    task = _with(cases=[{"input": "", "output": secret}, {"input": "", "output": secret}])
    looks = (
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/[cem]*') + glob.glob('/proc/*/fd/*') + os.listdir():\n"
        "    try:\n"
        "        if b'zweiundvier' + b'zig' in open(path, 'rb').read(1 << 20): print(path)\n"
        "    except OSError: pass\n"
    )
    score = await _score(sandbox, looks, task)
    assert score.log.startswith("case 0: gave ''"), score.log


async def test_part_of_the_cases_is_part_of_the_reward_only_where_the_task_says_so(
    sandbox: Sandbox,
) -> None:
    half = "x = int(input())\nprint(2 * x if x < 3 else 0)"
    assert (await _score(sandbox, half)).reward == 0
    assert (await _score(sandbox, half, _with(settings=PARTIAL))).reward == 0.5
    hangs = "x = int(input())\nwhile x == 1: pass\nprint(2 * x)"
    assert (await _score(sandbox, hangs, _with(settings=PARTIAL, case_s=2.0))).reward == 0.75


async def test_too_little_time_of_evals_is_not_the_programs_fault(sandbox: Sandbox) -> None:
    hang = "while True: pass"
    with pytest.raises(GraderError, match="too little"):
        await _score(sandbox, hang, _with(settings=PARTIAL), eval_s=0.3)
    slow = await _score(sandbox, hang, _with(settings=PARTIAL, timeout_s=0.3))
    assert "no time was left" in slow.log


async def test_what_a_policy_reads_and_what_an_oracle_does() -> None:
    system, user = ENV.messages(CALLS)
    assert user == Message(
        role="user", content=f"Scale.\n\n```python\n{CALLS.data['starter_code']}\n```"
    )
    assert "standard input" in system.content
    assert (await play(ENV, READS, scripted("oracle", ENV))).reward == 1
    assert (await play(ENV, READS, scripted("noop", ENV))).reward == 0


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("1 2 3", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("1e-7", "0.0", True),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("0.34", "0.33", False),
        ("nan", "0.5", False),
        ("\uff14.\uff15", "4.5", False),
        ("1_0.5", "10.5", False),
        ("yes", "YES", False),
        ("", "1", False),
    ],
)
async def test_texts(output: str, expected: str, right: bool) -> None:
    assert same_text(output, expected) is right


@pytest.mark.parametrize(
    ("result", "expected", "right"),
    [
        (1, 1.0, True),
        (2.0, 2, True),
        (True, 1, True),
        ([2.0, (1)], [2, True], True),
        ([0.1 + 0.2], [0.3], True),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
    ],
)
async def test_values(result: Json, expected: Json, right: bool) -> None:
    assert same_value(result, expected) is right


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"cases": []}, "data.cases is"),
        ({"cases": [{"input": "1"}]}, r"data.cases\[0\]"),
        ({"cases": [{"input": 1, "output": "2"}]}, "a text as input and as output"),
        ({"cases": [{"input": "1", "output": 2}], "function": "f"}, "a list of arguments as input"),
        ({"cases": CASES, "function": "a b"}, "data.function is"),
    ],
)
async def test_bad_cases_are_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(make_task("code", "x", **data))


async def test_a_value_nested_too_deep_to_be_read_is_wrong_and_no_graders_fault() -> None:
    for output in ("[" * 200_000, "[" * 900 + "]" * 900):
        assert same_output('{"value": ' + output + "}", [1], True)


@pytest.mark.parametrize(
    "text",
    [
        "```python\n{}```",
        "```python3\n{}```",
        "```Python\n{}```",
        "``` py\n{}```",
        "```python\r\n{}```\r\n",
        '```python title="a"\n{}```',
        "~~~python\n{}~~~",
        "```\n{}```",
        "```python\nprint(1)\n```\nNo:\n```python\n{}```",
        "```bash\npip install it\n```\nNow:\n```python\n{}```",
        "```cpp\nint x;\n```\n```python\n{}```",
        "```python\n{}```\nIt prints:\n```\n2\n```\n",
        "```python\n{}",
    ],
)
async def test_the_program_is_the_last_block_of_python(text: str) -> None:
    program = "print(2 * int(input()))\n"
    artifact = await ENV.artifact(READS, text.replace("{}", program), None)
    assert artifact.decode().replace("\r", "") == program
