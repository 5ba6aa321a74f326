"""python, ipython and jupyter: state, results, errors, interrupt, restart."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import prorl.sandbox
from prorl.sandbox.client import ConnectedSandbox
from prorl.types import SandboxSpec, ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS = ("python", "ipython", "jupyter")
NEEDS = {"ipython": "IPython", "jupyter": "jupyter_client"}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5"
    "ErkJggg=="
)


class Interpreter:
    def __init__(self, tool: str, sandbox: ConnectedSandbox) -> None:
        self.tool, self.sandbox = tool, sandbox

    async def __call__(self, code: str, timeout_s: float = 30.0) -> ToolResult:
        return await self.sandbox.call(self.tool, {"code": code}, timeout_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[ConnectedSandbox]:
    spec = SandboxSpec(tools=("bash", *TOOLS), memory_bytes=4 << 30)
    async with prorl.sandbox.open(kind="pyns", spec=spec) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(params=TOOLS, loop_scope="module")
async def run(request: pytest.FixtureRequest, sandbox: ConnectedSandbox) -> Interpreter:
    tool = str(request.param)
    if tool in NEEDS and importlib.util.find_spec(NEEDS[tool]) is None:
        pytest.skip(f"{tool} needs the extra `jupyter` ({NEEDS[tool]} is not installed)")
    return Interpreter(tool, sandbox)


async def test_the_last_expression_is_printed(run: Interpreter) -> None:
    done = await run("x = 20\nx + 1")
    assert (done.exit_code, done.output.removeprefix("Out[1]: ")) == (0, "21\n")
    assert (await run("x = 3")).output == ""
    assert (await run("x * 2")).output.endswith("6\n")
    assert (await run("None")).output == ""


async def test_printed_output_of_both_streams_and_of_programs(run: Interpreter) -> None:
    done = await run(
        "import sys, subprocess\nprint('a')\nprint('b', file=sys.stderr)\nsubprocess.run(['echo',"
        " 'c'])\nprint('d')"
    )
    assert done.output.split() == ["a", "b", "c", "d"]


async def test_output_of_programs_is_printed_once(run: Interpreter) -> None:
    cells = [f"import os; _ = os.system('echo hi{number}')" for number in range(20)]
    outputs = [(await run(code)).output for code in [*cells, "import time; time.sleep(0.3)"]]
    assert "".join(outputs) == "".join(f"hi{number}\n" for number in range(20))


async def test_what_comes_after_the_end_of_a_cell_belongs_to_the_next(run: Interpreter) -> None:
    assert (
        await run("import subprocess; p = subprocess.Popen(['sh', '-c', 'sleep 0.3; echo late'])")
    ).output == ""
    assert (await run("import time; _ = p.wait(); time.sleep(0.2)")).output == "late\n"


async def test_an_exception_is_output_with_exit_code_1(run: Interpreter) -> None:
    done = await run("def f():\n    return 1 / 0\nf()")
    assert done.exit_code == 1
    assert "ZeroDivisionError: division by zero" in done.output
    assert "return 1 / 0" in done.output
    assert "prorl" not in done.output
    assert (await run("this is no Python")).exit_code == 1


async def test_a_cell_that_does_not_end_is_interrupted_and_state_stays(run: Interpreter) -> None:
    await run("kept = 7")
    for code in ("while True: pass", "import time; time.sleep(60)"):
        done = await run(code, 0.3)
        assert (done.timed_out, done.exit_code) == (True, 124)
        assert "KeyboardInterrupt" in done.output
    assert (await run("kept")).output.endswith("7\n")


async def test_a_dead_interpreter_is_replaced(run: Interpreter) -> None:
    done = await run("import os; os._exit(3)")
    assert done.exit_code != 0
    assert "started again" in done.output or "starts a new one" in done.output
    assert (await run("1 + 1")).output.endswith("2\n")


async def test_output_is_capped(run: Interpreter) -> None:
    done = await run("for _ in range(1000): print('x' * 1000)")
    assert done.truncated
    assert 60_000 < len(done.output) < 70_000
    assert "bytes left out" in done.output


async def test_a_cell_that_ignores_the_interrupt_is_killed(run: Interpreter) -> None:
    if run.tool == "jupyter":
        pytest.skip(
            "the relay outlives a kernel that ignores SIGINT; `python` and `ipython` hold the rule"
        )
    done = await run(
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)", 0.3
    )
    assert done.timed_out
    assert "its state is lost" in done.output
    assert (await run("2 + 2")).output.endswith("4\n")


async def test_images_are_kept_as_data(run: Interpreter) -> None:
    if run.tool == "python":
        pytest.skip("plain Python shows no images")
    done = await run(
        "from IPython.display import Image, display; import"
        f" base64\ndisplay(Image(data=base64.b64decode('{PIXEL}')))"
    )
    assert "image/png" in done.output
    path = done.output.rpartition(": ")[2].strip("]\n")
    assert (await run.sandbox.get(path)).startswith(b"\x89PNG")


async def test_output_and_displays_keep_their_order(run: Interpreter) -> None:
    if run.tool == "python":
        pytest.skip("plain Python has no `display`")
    code = "from IPython.display import display\nprint(1); display({2: 3}); print(4); [5]"
    output = (await run(code)).output
    lines = [line.rpartition("]: ")[2] for line in output.splitlines()]
    assert lines == ["1", "{2: 3}", "4", "[5]"]


@pytest.mark.parametrize(
    "code",
    [
        r"os.write(3, b'\n')",
        r"os.write(3, b'garbage\n')",
        r"os.write(3, b'0\n' * 1000)",
        r"os.write(3, '٣ ٣\n'.encode())",
        r"os.write(3, b'1' * 5000 + b'\n')",
        "child = os.fork()",
        "if os.fork() == 0:\n  os.write(3, b'0 7')",
        r"import threading; threading.Timer(0.1, lambda: os.write(3, b'0 9\n')).start()",
        "import json; json.loads = None",
        "raise SystemExit(10**30)",
        "raise SystemExit(-(10**30))",
    ],
)
async def test_unrequested_answers_do_not_answer_later_calls(run: Interpreter, code: str) -> None:
    """The agent's code has the descriptor that its results go by; a process that it forks, too."""
    if run.tool == "jupyter":
        pytest.skip("its cells run in a kernel, which has no such descriptor")
    await run("import os; n = 0")
    await run(code, 5.0)
    for number in range(1, 7):
        assert (await run("n += 1; print(n)", 5.0)).output == f"{number}\n"
