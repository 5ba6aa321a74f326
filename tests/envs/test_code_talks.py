"""Programs that talk with an interactor: what is right, what is not, and what they cannot reach."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prorl.envs.code import CodeEnv
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.sandbox import open as open_sandbox
from prorl.sandbox.node.probe import probe_one
from prorl.testing import make_task, play, scripted
from prorl.types import Json, Score, Stage, Task

ENV = CodeEnv()
INTERACTOR = """
def interact(case, talk):
    secret, asked = case["secret"], 0
    talk.say(1000000)
    while True:
        words = talk.hear().split()
        if len(words) != 2 or words[0] not in "?!" or not words[1].isdigit():
            talk.wrong(f"said {words}")
        if words[0] == "!":
            if int(words[1]) != secret:
                talk.wrong("guessed wrong")
            return
        asked += 1
        if asked > 20:
            talk.wrong("asked too often")
        talk.say("<" if secret < int(words[1]) else ">=")
"""
SEARCH = """
low, high = 0, int(input())
while high - low > 1:
    middle = (low + high) // 2
    print("?", middle, flush=True)
    if input() == "<": high = middle
    else: low = middle
print("!", low, flush=True)
"""
TASK = make_task(
    "code",
    "Find the number.",
    interactor=INTERACTOR,
    cases=[{"input": {"secret": secret}} for secret in (0, 777_216, 999_999)],
    canonical_solution=SEARCH,
    case_s=8.0,
)
OTHERS = """
import os
here = os.getpid()
pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != here]
"""
LOOK = (
    "import re\n{before}found = b''\nfor path in {paths}:\n"
    "    try: found += {read}\n"
    "    except OSError: pass\n"
    "hits = re.findall(rb'secret.{{0,12}}?(\\d{{1,6}})', found)\n"
    "input()\nprint('!', int(hits[0]) if hits else 5, flush=True)\n"
)


def _look(paths: str, read: str = "open(path, 'rb').read(1 << 22)") -> str:
    return LOOK.format(before=OTHERS, paths=paths, read=read)


KINDS = [
    pytest.param("", id="default"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("apptainer", "bwrap", "local")),
]
CHEATS = {
    "guesses": "input()\nprint('! 5', flush=True)",
    "says nothing": "",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the middle": "input()\nprint('? 5', flush=True)\ninput()",
    "asks too often": "n = int(input())\nfor i in range(n):\n    print('?', i, flush=True)\n"
    "    if input() == '<':\n        print('!', i - 1, flush=True)\n        break",
    "says two answers": "input()\nfor i in range(1000000): print('!', i, flush=True)",
    "answers in one line": "input()\nprint('!', *range(100), flush=True)",
    "prints a verdict": "print('start\\nerror\\n3 3', flush=True)\nprint('! 5', flush=True)",
    "says a float": "input()\nprint('! 5e0', flush=True)",
    "says another script's digits": "input()\nprint('! \\u0665', flush=True)",
    "says no end of line": "import sys\n"
    "sys.stdout.write('! 0' * 1000000)\nsys.stdout.flush()\ninput()",
    "floods": "while True: print('?' * 65536, flush=True)",
    "never listens": "import time\ntime.sleep(60)",
    "loops": "while True: pass",
    "closes its input": "import os\nos.close(0)\n"
    "print('? 5', flush=True)\nprint('! 5', flush=True)",
    "closes its output": "import os\nos.close(1)\ninput()",
    "is right and fails": SEARCH + "\nraise SystemExit(3)",
    "is right and stays": SEARCH + "\nwhile True: pass",
    "kills the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stops the judge's clock": "import os, signal\nos.kill(os.getppid(), signal.SIGALRM)\ninput()\n"
    "print('! 5', flush=True)",
    "ends the judge's talk": "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\ninput()\n"
    "print('! 5', flush=True)",
    "leaves a child": "import os\nif os.fork(): os._exit(0)\ninput()\nprint('! 5', flush=True)",
    "reads the judge's memory": _look("[f'/proc/{os.getppid()}/mem']"),
    "reads all memories": _look("[f'/proc/{pid}/mem' for pid in pids]"),
    "reads the judge's input": _look("[f'/proc/{pid}/fd/0' for pid in pids]"),
    "reads all descriptors": _look(
        "[f'/proc/{pid}/fd/{fd}' for pid in pids for fd in (0, 3, 4, 5, 6)]",
        "os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 20)",
    ),
    "reads command lines": _look("[f'/proc/{pid}/cmdline' for pid in pids]"),
    "reads environments": _look("[f'/proc/{pid}/environ' for pid in pids]"),
    "reads files": _look("[os.path.join(p, f) for p, _, fs in os.walk('.') for f in fs]"),
    "writes into the judge's output": OTHERS
    + "for pid in pids:\n    for fd in (1, 2):\n        try: open(f'/proc/{pid}/fd/{fd}', 'w')"
    ".write('\\nx 3 3\\n')\n        except OSError: pass\ninput()\nprint('! 5', flush=True)",
    "traces the judge": "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\n"
    "input()\nprint('! 5', flush=True)",
    "changes itself for later cases": "open('solution.py', 'w').write('print(1)')\ninput()\n"
    "print('! 5', flush=True)",
}
HONEST = {
    "the search": SEARCH,
    "with other ends of line": SEARCH.replace("print(", "print(end='\\r\\n', *(").replace(
        ", flush=True)", ",), flush=True)"
    ),
    "with threads": "import threading\ndef main():\n    "
    + SEARCH.strip().replace("\n", "\n    ")
    + "\nthreading.Thread(target=main).start()",
    "as a script": "def main():\n    "
    + SEARCH.strip().replace("\n", "\n    ")
    + "\nif __name__ == '__main__':\n    main()",
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def sandbox(request: pytest.FixtureRequest, sandbox_kind: str) -> AsyncIterator[Sandbox]:
    kind = request.param or sandbox_kind
    found = await probe_one(kind)
    if not found.works:
        pytest.skip(f"{kind} does not work here: {found.reason}")
    async with open_sandbox(kind, ENV.sandbox(TASK, Stage.EVAL)) as sandbox:
        yield sandbox


async def _score(sandbox: Sandbox, program: str, **data: Json) -> Score:
    task: Task = make_task("code", TASK.prompt, **{**TASK.data, **data})
    return await ENV.score(task, program.encode(), sandbox, Deadline(120))


@pytest.mark.parametrize("name", HONEST)
async def test_right_programs(sandbox: Sandbox, name: str) -> None:
    score = await _score(sandbox, HONEST[name])
    assert score.reward == 1, score.log


@pytest.mark.parametrize("name", CHEATS)
async def test_wrong_programs(sandbox: Sandbox, name: str) -> None:
    case_s = 0.5 if name in ("loops", "never listens") else 8.0
    score = await _score(sandbox, CHEATS[name], case_s=case_s)
    assert score.reward == 0, score.log


async def test_part_of_the_cases(sandbox: Sandbox) -> None:
    low = SEARCH.replace("low, high = 0, int(input())", "low, high = 0, int(input()) // 2")
    assert (await _score(sandbox, low, partial=True)).reward == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("said", "reward"), [("-3", 1), ("--3", 0), ("3-", 0), ("+3", 0), ("\u00b3", 0), ("3" * 50, 0)]
)
async def test_numbers_that_are_heard(sandbox: Sandbox, said: str, reward: float) -> None:
    hears = "def interact(case, talk):\n    if talk.hear_int(-9, 9) != case: talk.wrong('no')\n"
    score = await _score(sandbox, f"print({said!r})", interactor=hears, cases=[{"input": -3}])
    assert score.reward == reward, score.log


@pytest.mark.parametrize(
    "interactor",
    [
        "def interact(case, talk): return case['nothing']",
        "def interact(case, talk):\n    while True: pass",
        "import nothing_of_this_name\ndef interact(case, talk): pass",
    ],
)
async def test_an_interactor_that_fails_is_no_policys_fault(
    sandbox: Sandbox, interactor: str
) -> None:
    with pytest.raises(GraderError, match="interactor failed"):
        await _score(sandbox, SEARCH, interactor=interactor, case_s=0.5)


async def test_oracle_and_noop() -> None:
    assert (await play(ENV, TASK, scripted("oracle", ENV))).reward == 1
    assert (await play(ENV, TASK, scripted("noop", ENV))).reward == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"interactor": "def interact(:"}, "data.interactor"),
        ({"interactor": "x = 1"}, "defines nothing"),
        ({"function": "f"}, "no data.function"),
        ({"cases": [{"secret": 1}]}, r"data.cases\[0\]"),
    ],
)
async def test_bad_interactors_are_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(make_task("code", "x", **{**TASK.data, **data}))
