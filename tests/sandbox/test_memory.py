"""A tool call outlives the worker that made it, and runs once."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from prorl.errors import SandboxError
from prorl.journal import CallId
from prorl.tools.server.memory import LIMIT_BYTES, Memory
from prorl.types import FailureCode, SandboxSpec
from tests.sandbox.conftest import Sandboxd

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec()
COUNT = {"command": "n=$((n+1)); echo x >> c; sleep 0.3; echo n=$n $(wc -l < c)"}
WORKER = """
import asyncio, sys
from prorl.journal import CallId
from prorl.sandbox.host import UnixSandboxHost
from prorl.types import SandboxRef

async def main(daemon, node, box, path, command):
    host, ref = UnixSandboxHost(daemon), SandboxRef(node, box, path)
    async with host.connect(ref) as sandbox:
        sandbox.mark(CallId(0, 0, 0))
        print("asks", flush=True)
        await sandbox.call("bash", {"command": command}, 20.0)
        print("heard", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("was_received", [False, True], ids=["under way", "answered"])
async def test_a_call_of_a_killed_worker_is_answered_to_its_successor(
    sandboxd: Sandboxd, was_received: bool
) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    argv = (str(sandboxd.root / "unused"), *ref, COUNT["command"])
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, *argv, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"asks\n"
    async with sandboxd.host.connect(ref) as sandbox:
        if was_received:
            assert await worker.stdout.readline() == b"heard\n"
        else:
            await asyncio.sleep(0.15)  # whichever step it is at: the answer is the same
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        sandbox.mark(CallId(1, 0, 0))
        assert (await sandbox.call("bash", COUNT, 20.0)).output == "n=1 1\n"
        sandbox.mark(CallId(1, 0, 1))
        assert (await sandbox.call("bash", COUNT, 20.0)).output == "n=2 2\n"


async def test_a_cancelled_call_ends_and_is_unknown_later(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        sandbox.mark(CallId(0, 0, 0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.call("bash", {"command": "sleep 30; echo x >> c"}, 60.0)
        sandbox.mark(CallId(1, 0, 0))
        with pytest.raises(SandboxError) as unknown:
            await sandbox.call("bash", {"command": "sleep 30; echo x >> c"}, 60.0)
        assert unknown.value.code is FailureCode.CALL_UNKNOWN
        with pytest.raises(FileNotFoundError):
            await sandbox.get("c")


async def test_an_earlier_incarnation_is_refused(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as old, sandboxd.host.connect(ref) as new:
        old.mark(CallId(0, 0, 0))
        await old.call("bash", COUNT, 20.0)
        new.mark(CallId(1, 0, 1))
        await new.call("bash", COUNT, 20.0)
        old.mark(CallId(0, 0, 2))
        with pytest.raises(SandboxError, match="a later worker") as fenced:
            await old.call("bash", COUNT, 20.0)
        assert fenced.value.code is FailureCode.SANDBOX_LOST
        assert await new.get("c") == b"x\nx\n"


async def test_a_sandbox_that_knows_a_first_call_lies(sandboxd: Sandboxd) -> None:
    """The claim is the agent's, and its failure is not ours."""
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as connection, sandboxd.host.connect(ref) as two:
        connection.mark(CallId(0, 5, 0))
        await connection.call("bash", COUNT, 20.0)
        two.mark(CallId(0, 0, 0))
        with pytest.raises(SandboxError) as broken:
            await two.call("bash", COUNT, 20.0)
        assert broken.value.code is not FailureCode.CALL_UNKNOWN


async def test_memory_is_bounded_and_says_what_it_has_forgotten() -> None:
    memory, big = Memory(), b"x" * (LIMIT_BYTES // 2)
    for step in range(3):
        ask = {"op": "exec", "argv": [str(step)], "call": [0, 0, 0, step]}
        assert memory.recall(ask, b"") is None
        memory.keep(ask, b"", ({"ok": True}, big))
    answers = [
        memory.recall({"op": "exec", "argv": [str(step)], "call": [1, 0, 0, step]}, b"")
        for step in range(3)
    ]
    assert [bool(answer and answer[0].get("unknown")) for answer in answers] == [True, False, False]
    other = memory.recall({"op": "exec", "argv": ["rm"], "call": [1, 0, 0, 2]}, b"")
    assert (other or ({},))[0].get("unknown"), "it is asked something else than before"
