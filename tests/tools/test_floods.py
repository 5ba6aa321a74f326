"""Tools that print without end: the worker's memory and time, and what the policy is shown.

Five megabytes in the fast suite, a hundred in the slow one. What a tool kept of it is bounded where
it was printed (`prorl/tools/server/output.py`), so neither the tool server nor the worker grows by
more than a few megabytes, whatever the bytes are.
"""

from __future__ import annotations

import importlib.util
import re
import resource
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import prorl.sandbox
from prorl.envs.base import BaseEnv
from prorl.envs.tools import BASH
from prorl.sandbox.client import ConnectedSandbox
from prorl.testing import Replies, isolated, play
from prorl.tools.server.output import OUTPUT_BYTES
from prorl.types import RolloutLimits, SandboxSpec, Task, ToolCall
from tests.tools.test_interpreters import NEEDS

PATTERNS = {
    "lines": b"0123456789abcde\n",
    "one line": b"x",
    "binary": bytes(range(256)),
    "ANSI": b"\x1b[31mred\x1b[0m\x1b]0;title\x07\r\x08 ",
    "begun ends of a command": b"\x1e",
    "letters of three bytes": "\u6f22".encode(),
}
TOOLS = ("bash", "python", "ipython", "jupyter")
GROWTH_BYTES = 16 << 20
"""For a process by whose hands the output goes: buffers and Python's own; a sixth of the flood."""
CPU_S = 5.0
"""For the worker, which takes over 64 KiB; what takes the flood itself grows, too."""
PEAKS = "grep -s VmHWM /proc/[0-9]*/status"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[ConnectedSandbox]:
    spec = SandboxSpec(tools=TOOLS, memory_bytes=4 << 30)
    async with prorl.sandbox.open(kind="pyns", spec=spec) as sandbox:
        yield sandbox


def printing(tool: str, content: str, num_bytes: int) -> dict[str, str]:
    """The arguments of a call that prints so many bytes of a content."""
    code = f"""
import os
for size in [1 << 20] * {num_bytes >> 20} + [{num_bytes % (1 << 20)}]:
    rest = ({PATTERNS[content]!r} * (size // {len(PATTERNS[content])} + 1))[:size]
    while rest:
        rest = rest[os.write(1, rest):]
"""
    if tool == "bash":
        return {"command": f"cat > flood.py <<'END'\n{code}END\npython3 flood.py"}
    return {"code": code}


def expected_output(content: str, num_bytes: int) -> str:
    """Returns the part of the output that the policy sees."""
    pattern, half = PATTERNS[content], OUTPUT_BYTES // 2
    head = (pattern * (half // len(pattern) + 1))[:half]
    last = num_bytes % (1 << 20)
    assert last >= half
    tail = (pattern * (last // len(pattern) + 1))[last - half : last]
    omission = b"\n[... %d bytes left out ...]\n" % (num_bytes - 2 * half)
    return (head + omission + tail).decode("utf-8", "replace")


async def peaks(sandbox: ConnectedSandbox) -> dict[str, int]:
    """The most that each process of a sandbox has held, in bytes, by its number."""
    output = (await sandbox.exec(["bash", "-c", PEAKS], 10.0)).output
    rows = re.findall(r"/proc/(\d+)/status:VmHWM:\s+(\d+) kB", output)
    return {number: int(size) << 10 for number, size in rows}


def own_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("content", PATTERNS)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "num_bytes", [5_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)]
)
async def test_a_flood_is_cut_where_it_is_printed(
    sandbox: ConnectedSandbox, tool: str, content: str, num_bytes: int
) -> None:
    if tool in NEEDS and importlib.util.find_spec(NEEDS[tool]) is None:
        pytest.skip(f"{tool} needs the extra `jupyter` ({NEEDS[tool]} is not installed)")
    first = await sandbox.call(tool, printing(tool, content, 100_000), 60.0)
    assert first.exit_code == 0, first.output[-500:]
    before, own, began = await peaks(sandbox), own_peak_bytes(), time.process_time()
    done = await sandbox.call(tool, printing(tool, content, num_bytes), 300.0)
    took_s, own_growth = time.process_time() - began, own_peak_bytes() - own
    after = await peaks(sandbox)
    growth = {name: after[name] - size for name, size in before.items() if name in after}
    print(f"{tool}, {content}: {done.duration_s:.1f} s, {took_s:.3f} s of CPU here, grown by")
    print(f"    {own_growth >> 20} MiB here, {[size >> 20 for size in growth.values()]} there")
    assert done.exit_code == 0, done.output[-500:]
    assert done.truncated
    assert own_growth < GROWTH_BYTES
    assert took_s < CPU_S
    assert max(growth.values()) < GROWTH_BYTES
    is_right = done.output == expected_output(content, num_bytes)
    assert is_right, (done.output[:100], done.output[-100:])


class Prints(BaseEnv):
    """Offers bash; every answer is worth something."""

    name = "prints"
    offers = (BASH,)


@pytest.mark.parametrize(("max_tokens", "code"), [(500_000, ""), (16_384, "max_tokens")])
@pytest.mark.parametrize("content", ["binary", "ANSI"])
async def test_the_policy_gets_all_output_that_was_kept_where_its_context_has_room(
    content: str, max_tokens: int, code: str
) -> None:
    command = printing("bash", content, 5_000_000)
    replies = Replies(ToolCall("bash", command), "It is done.")
    limits = RolloutLimits(max_tokens=max_tokens)
    task = Task(task_id="prints/1", env="prints", prompt="Print.")
    played = await play(Prints(), task, replies, boxes=isolated("pyns"), limits=limits)
    (output,) = played.outputs
    assert output.startswith(expected_output(content, 5_000_000))
    assert output.endswith("[output truncated]")
    assert played.trajectory.failure.code == code, played.trajectory.failure.message
    if code:
        assert "the output of bash, " in played.trajectory.failure.message
    else:
        (sequence,) = played.trajectory.sequences
        assert len(replies.prompts) == 2
        prompt = replies.prompts[1]
        assert np.array_equal(sequence.token_ids_L[: len(prompt)], prompt)
        assert len(prompt) > OUTPUT_BYTES
