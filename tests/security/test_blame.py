"""Tests of blame: each row of `prorl.sandbox.blame`, in every kind, tried by an agent that would
rather be excused, and by an outside that would rather not be.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable

import pytest

from prorl import timing
from prorl.errors import SandboxError
from prorl.linux import procfs
from prorl.sandbox import wire
from prorl.sandbox.blame import CODES, Cause
from prorl.sandbox.client import connected
from prorl.types import FAILURE_CLASS, FailureClass, FailureCode, Json, SandboxSpec
from tests.security.box import Box, need_own_uid

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOG = "x = bytearray(b'x') * (64 << 20)"
"""64 MiB, touched."""
FILL = "cat /dev/zero > /dev/shm/fill; cat /dev/zero > /tmp/fill"
"""Memory that belongs to no process: when it is too much, the biggest process goes first."""


async def launcher_of(box: Box) -> int:
    sandboxes = (await box.daemon.host.status())["sandboxes"]
    pid: int = next(entry["pid"] for entry in sandboxes if entry["id"] == box.ref.sandbox_id)
    return pid


async def server_of(box: Box) -> int:
    """Pid of its tool server: who answers as the parent of what it starts."""
    launcher = await launcher_of(box)
    if box.kind == "local":
        return procfs.children(launcher)[0]
    return procfs.to_init(launcher)[-1]


async def verdict(box: Box, command: str = "sleep 20") -> FailureCode:
    with pytest.raises(SandboxError) as caught:
        await box.sandbox.call("bash", {"command": command}, 30.0)
    return caught.value.code


async def attempt(call: Awaitable[object]) -> SandboxError | None:
    """Returns the error of a call; None when it comes through."""
    try:
        await call
    except SandboxError as error:
        return error
    return None


async def survives(box: Box) -> bool:
    return (await box.sandbox.call("bash", {"command": "echo alive"}, 20.0)).output.endswith(
        "alive\n"
    )


async def test_every_cause_has_a_verdict_and_none_is_another_class() -> None:
    assert set(CODES) == set(Cause)
    classes = {FAILURE_CLASS[code] for code in CODES.values()}
    assert classes == {FailureClass.POLICY, FailureClass.INFRA}


# ---- an agent that wants to be excused


@pytest.mark.parametrize("limit", ["cpu=1:1", "nofile=3:3", "as=4096:4096", "nproc=1:1"])
async def test_limits_of_the_tool_server_are_not_the_agents_to_set(box: Box, limit: str) -> None:
    need_own_uid(box)
    code, output = await box.sh(f"prlimit --pid $PPID --{limit}")
    assert code != 0
    assert "Operation not permitted" in output
    assert await survives(box)


async def test_its_own_limits_are_the_agents_to_set(box: Box) -> None:
    code, output = await box.sh("prlimit --nofile=100 bash -c 'ulimit -n'; prlimit --pid $PPID >&2")
    assert (code, output.splitlines()[0]) == (0, "100")


async def test_a_busy_agent_does_not_use_up_the_servers_time(box: Box) -> None:
    """This is the case that revealed the row: one second of CPU time for pid 1, then work for
    it.
    """
    await box.sh("prlimit --pid 1 --cpu=1:1; prlimit --pid $PPID --cpu=1:1")
    work = "for i in $(seq 300); do head -c 100000 /dev/zero; done"
    for _ in range(4):
        await box.sandbox.call("bash", {"command": work}, 30.0)
    assert await survives(box)


@pytest.mark.slow
async def test_memory_of_nobody_ends_the_sandbox_at_its_own_cost(box: Box) -> None:
    """Files in memory belong to no process, so what the kernel kills for them is whatever is
    biggest: the tool server, or who started it.
    """
    if "memory" not in (await box.daemon.host.status())["cgroups"]:
        pytest.skip("no control group for memory here; the watchdog counts processes only")
    spec = SandboxSpec(memory_bytes=96 << 20)
    ref = await box.daemon.host.start("run/9/1", "run", spec)
    async with box.daemon.host.connect(ref) as sandbox:
        error = await attempt(sandbox.exec(["bash", "-c", FILL], 20.0))
        error = error or await attempt(sandbox.exec(["bash", "-c", FILL], 20.0))
    assert error is None or error.code is FailureCode.SANDBOX_BROKEN, error


@pytest.mark.parametrize("number", ["KILL", "STOP", "TERM", "SEGV", "XCPU", "ABRT"])
async def test_no_signal_of_the_agent_excuses_it(box: Box, number: str) -> None:
    need_own_uid(box)
    quick = connected(box.ref, box.daemon.host.fate, grace_s=0.5)
    async with quick as sandbox:
        kill = {"command": f"kill -{number} $PPID 1; sleep 0.1"}
        error = await attempt(sandbox.call("bash", kill, 5.0)) or await attempt(
            sandbox.call("bash", {"command": "true"}, 0.5)
        )
    if box.kind != "local":  # there it has the tool server's uid
        assert error is None
    assert error is None or error.code is FailureCode.SANDBOX_BROKEN, error


async def test_a_lease_on_a_file_that_is_read_blocks_at_the_agents_cost(box: Box) -> None:
    """A file lease makes whoever opens the file wait until it is broken, 45 s by default."""
    holder = (
        "import fcntl, os, signal, time\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\nfd ="
        " os.open('f', os.O_RDWR | os.O_CREAT)\nfcntl.fcntl(fd, fcntl.F_SETLEASE,"
        " fcntl.F_WRLCK)\nprint('held', flush=True)\ntime.sleep(60)"
    )
    await box.sandbox.put("hold.py", holder.encode())
    await box.sh("setsid python3 hold.py > held 2>&1 & until grep -q held held; do :; done")
    quick = connected(box.ref, box.daemon.host.fate, grace_s=0.5)
    async with quick as sandbox:
        error = await attempt(sandbox.call("files", {"command": "view", "path": "f"}, 0.5))
    assert error is None or error.code is FailureCode.SANDBOX_BROKEN, error


# ---- an outside that would rather not be blamed


async def test_the_longest_time_limit_is_no_crash(box: Box) -> None:
    done = await box.sandbox.call("bash", {"command": "echo a"}, 3e6)
    assert (done.output, done.exit_code) == ("a\n", 0)


async def test_a_crash_of_the_tool_server_is_ours_and_writes_nothing_to_a_client(box: Box) -> None:
    """A number that no call of ours holds stands for any bug."""
    header = {"op": "get", "path": "x", "offset": 10**30, "max_bytes": 10}
    await box.sandbox.put("x", b"x")
    reader, writer = await wire.open_stream(box.ref.socket_path)
    writer.write(wire.encode({"id": 1, **header}))
    assert await reader.read() == b""
    # a client that has the number of the descriptor on which a start is reported
    assert await box.sandbox._reader.read() == b""
    writer.close()
    with pytest.raises(SandboxError) as caught:
        await box.sandbox._ask(header, b"", 10.0)
    assert caught.value.code is FailureCode.TOOL_PROTOCOL, caught.value.message


async def test_a_tool_server_killed_from_outside(box: Box) -> None:
    running = asyncio.create_task(verdict(box))
    server = await server_of(box)
    await asyncio.sleep(0.2)
    os.kill(server, signal.SIGKILL)
    local = box.kind == "local"  # there nobody can tell
    assert await running is (FailureCode.SANDBOX_BROKEN if local else FailureCode.SANDBOX_LOST)


async def test_a_launcher_killed_from_outside_after_the_agent_ran_out_of_memory(box: Box) -> None:
    """The agent's earlier deed is no reason to blame it for what we did."""
    need_own_uid(box)
    if procfs.is_init(await launcher_of(box)):
        pytest.skip("nobody can tell who killed a pid 1 that no launcher guards")
    if "memory" in (await box.daemon.host.status())["cgroups"]:
        spec = SandboxSpec(memory_bytes=128 << 20)
        ref = await box.daemon.host.start("run/9/1", "run", spec)
        async with box.daemon.host.connect(ref) as sandbox:
            await sandbox.exec(["python3", "-c", HOG.replace("64", "256")], 20.0)
            await _kill_launcher(Box(box.kind, box.daemon, ref, sandbox))
    else:
        await _kill_launcher(box)


async def _kill_launcher(box: Box) -> None:
    running = asyncio.create_task(verdict(box))
    pid = await launcher_of(box)
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert await running is FailureCode.SANDBOX_LOST


async def test_a_tool_server_stopped_from_outside(box: Box) -> None:
    server = await server_of(box)
    async with connected(box.ref, box.daemon.host.fate, grace_s=0.3) as sandbox:
        os.kill(server, signal.SIGSTOP)
        with pytest.raises(SandboxError) as caught:
            await sandbox.call("bash", {"command": "true"}, 0.2)
    local = box.kind == "local"
    expected = FailureCode.SANDBOX_BROKEN if local else FailureCode.SANDBOX_LOST
    assert caught.value.code is expected, caught.value.message


async def test_a_client_that_was_stopped_itself_blames_nobody(box: Box) -> None:
    """The machine seems paused: nobody runs at the deadline, and the answer comes soon after."""
    server = await server_of(box)

    async def stopped() -> str:
        async with connected(box.ref, box.daemon.host.fate, grace_s=1.0) as sandbox:
            command = {"command": "sleep 0.3; echo late"}
            call = asyncio.create_task(sandbox.call("bash", command, 0.6))
            await asyncio.sleep(0.05)
            os.kill(server, signal.SIGSTOP)
            # the loop stands still, too; the tool server goes on a moment after it
            os.system(f"sleep 3; (sleep 0.2; kill -CONT {server}) &")
            return (await call).output

    assert await asyncio.to_thread(timing.run, stopped()) == "late\n"


def nested(depth: int) -> list[object]:
    """A list in a list in a list."""
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        nested(300),
        nested(5000),
        ["\ud800", *nested(300)],
        ["\ud800", *nested(900)],
        ["\ud800", *nested(5000)],
        "x" * (5 << 20),
        10**400,
        [float("nan"), -(1 << 70)],
    ],
    ids=["deep", "deeper", "odd", "odd and deep", "odd and deeper", "large", "huge", "numbers"],
)
async def test_arguments_that_cannot_be_sent_are_a_result(box: Box, value: Json) -> None:
    """Arguments that a policy writes are never our failure: it is told, or has broken its own
    sandbox.
    """
    error = await attempt(box.sandbox.call("files", {"command": "view", "path": value}, 10.0))
    assert error is None or error.code is FailureCode.SANDBOX_BROKEN, error
    if error is None:
        assert await survives(box)
