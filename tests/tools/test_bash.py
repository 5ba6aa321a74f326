"""bash through the whole stack: each situation's output, exit code and state, in every kind of
sandbox that works here.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import prorl.sandbox
from prorl.sandbox.shell import Shell
from tests.sandbox.conftest import why_not
from tests.tools.terminal_situations import SITUATIONS, Input, Keep, Step

KINDS = (
    "pyns",
    pytest.param("local", marks=pytest.mark.slow),
    pytest.param("apptainer", marks=[pytest.mark.slow, pytest.mark.apptainer]),
)
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", params=KINDS, loop_scope="module")
async def shell(request: pytest.FixtureRequest) -> AsyncIterator[Shell]:
    """One shell for all situations: each must leave it usable."""
    if why_not(request.param):
        pytest.skip(why_not(request.param))
    async with prorl.sandbox.open_shell(kind=request.param) as shell:
        yield shell


def skip_without_programs(*commands: str) -> None:
    """A bare host has neither procps nor an editor."""
    for program in ("pgrep", "ps", "vi"):
        used = any(re.search(rf"\b{program} ", command) for command in commands)
        if used and shutil.which(program) is None:
            pytest.skip(f"the host has no {program}")


async def take(shell: Shell, step: Step) -> None:
    if isinstance(step.command, Input):
        sent = await shell.send_input(step.command, step.timeout_s)
    else:
        on_timeout = "keep" if isinstance(step.command, Keep) else "interrupt"
        sent = await shell.send(step.command, step.timeout_s, on_timeout=on_timeout)
    where = f"{step.command[:80]!r} gave {sent.output[:200]!r}"
    if isinstance(step.output, str):
        assert sent.output == step.output, where
    else:
        assert step.output.search(sent.output), where
    assert (sent.exit_code, sent.timed_out) == (step.exit_code, step.exit_code == 124), where


@in_module_loop
@pytest.mark.parametrize("name", SITUATIONS)
async def test_situation(shell: Shell, name: str) -> None:
    if name == "all processes killed" and "/workspace" not in (await shell.send("pwd")).output:
        pytest.skip(
            "in `local` this kills the tool server: tests/security/test_abuse.py holds that"
        )
    skip_without_programs(*(step.command for step in SITUATIONS[name]))
    await shell.send("cd; wait 2>/dev/null", 10.0)
    for step in SITUATIONS[name]:
        await take(shell, step)


@in_module_loop
async def test_a_cancelled_call_leaves_a_shell_that_goes_on(shell: Shell) -> None:
    sleepers = "pgrep -u $UID -xc sleep"
    skip_without_programs(sleepers)
    await shell.send("x=kept; cd /tmp")
    sleeping = asyncio.create_task(shell.send("sleep 60", 60.0))
    await asyncio.sleep(0.2)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert (await shell.send(f"echo $x; pwd; {sleepers}")).output == "kept\n/tmp\n0\n"


@in_module_loop
async def test_calls_in_flight_wait_their_turn(shell: Shell) -> None:
    sent = await asyncio.gather(*(shell.send(f"echo {number}") for number in range(50)))
    assert [result.output for result in sent] == [f"{number}\n" for number in range(50)]
