"""What hostile code does in a sandbox: contained, neighbours unharmed, nothing left, the right one blamed. In every kind.

`local` isolates little; what it does not contain is listed here as such, so that the list cannot rot.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.errors import SandboxError
from prorl.sandbox.cgroups import Cgroups
from prorl.sandbox.client import ConnectedSandbox
from prorl.types import FailureCode, SandboxRef, SandboxSpec
from tests.sandbox.conftest import Sandboxd, kind, sandboxd, shared  # noqa: F401 - fixtures

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEC = SandboxSpec(memory_bytes=1 << 30, processes=64, file_bytes=64 << 20, tmp_bytes=64 << 20, workspace_bytes=128 << 20)
NO_WALLS = "local is a plain process: it shares network, /tmp and readable files with the host"


class Box:
    """One sandbox of the test and its connection."""

    def __init__(self, name: str, daemon: Sandboxd, ref: SandboxRef, sandbox: ConnectedSandbox) -> None:
        self.kind, self.daemon, self.ref, self.sandbox = name, daemon, ref, sandbox

    async def sh(self, command: str, timeout_s: float = 20.0) -> tuple[int, str]:
        """Run a shell command without a terminal."""
        done = await self.sandbox.exec(["bash", "-c", command], timeout_s)
        return done.exit_code, done.output

    async def py(self, code: str, timeout_s: float = 20.0) -> tuple[int, str]:
        """Run a Python program."""
        done = await self.sandbox.exec(["python3", "-c", code], timeout_s)
        return done.exit_code, done.output


@pytest_asyncio.fixture(loop_scope="module")
async def box(kind: str, sandboxd: Sandboxd) -> AsyncIterator[Box]:  # noqa: F811
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        yield Box(kind, sandboxd, ref, sandbox)


def need_walls(box: Box) -> None:
    """Skip what `local` does not promise."""
    if box.kind == "local":
        pytest.skip(NO_WALLS)


# ---- exhaustion


@pytest.mark.slow
async def test_fork_bomb_stays_inside_and_the_shell_comes_back(box: Box) -> None:
    bomb = asyncio.create_task(box.sandbox.call("bash", {"command": ":(){ :|:& };: ; sleep 3"}, 1.0))
    other = await box.daemon.host.start("run/2/1", "run", SPEC)
    async with box.daemon.host.connect(other) as neighbour:
        assert (await neighbour.call("bash", {"command": "echo fine"}, 10.0)).output == "fine\n"
        assert (await neighbour.exec(["bash", "-c", "for i in $(seq 20); do /bin/true & done; wait; echo $?"], 10.0)).output == "0\n"
    await bomb
    assert "alive" in (await box.sandbox.call("bash", {"command": "echo alive"}, 20.0)).output


async def test_number_of_processes_is_bounded(box: Box) -> None:
    _, output = await box.py(
        "import os, time\nn = 0\ntry:\n  while n < 300:\n    if os.fork() == 0: time.sleep(20); os._exit(0)\n    n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    assert 10 < int(output) < 64


async def test_memory_of_one_process(box: Box) -> None:
    code, output = await box.py("x = bytearray(3 << 30)")
    assert code == 1
    assert "MemoryError" in output
    assert await box.sh("echo alive") == (0, "alive\n")


@pytest.mark.slow
async def test_memory_of_all_processes_together(box: Box) -> None:
    if "memory" not in Cgroups.usable():
        pytest.skip("no memory control group can be made here; `prorl doctor` says so")
    eater = "python3 -c 'import time; x = bytearray(b\"x\") * (400 << 20); time.sleep(5); print(len(x))'"
    _, output = await box.sh(f"for i in 1 2 3 4; do {eater} & done; wait", 30.0)
    assert output.count("419430400") <= 2, "1 GiB holds two of four"
    assert await box.sh("echo alive") == (0, "alive\n")


async def test_size_of_one_file(box: Box) -> None:
    await box.sh("head -c 200M /dev/zero > big; truncate -s 1T sparse")
    _, output = await box.sh("stat -c %s big sparse; rm -f big sparse")
    assert output.split() == [str(SPEC.file_bytes), "0"]


@pytest.mark.parametrize(("folder", "limit_bytes"), [("/tmp", SPEC.tmp_bytes), ("/dev/shm", 64 << 20), (".", SPEC.workspace_bytes)])
async def test_sized_folders(box: Box, folder: str, limit_bytes: int) -> None:
    need_walls(box)
    if box.kind == "apptainer" and folder != "/tmp":
        pytest.skip("apptainer: the workspace lies on the host's disk, and /dev/shm is bounded by the memory control group only")
    _, output = await box.sh(f"cd {folder}; for i in 1 2 3 4; do head -c 50M /dev/zero > f$i 2>/dev/null; done; cat f* | wc -c; rm f*")
    assert 0 < int(output) <= limit_bytes


@pytest.mark.slow
async def test_number_of_files(box: Box) -> None:
    need_walls(box)
    if box.kind in ("bwrap", "apptainer"):
        pytest.skip(f"{box.kind} has no option for it; the memory control group bounds it")
    code, output = await box.py("import os\nfor i in range(400_000): os.close(os.open(f'f{i}', os.O_CREAT))", 60.0)
    assert code == 1
    assert "No space left" in output


async def test_open_files(box: Box) -> None:
    _, output = await box.py("import os\nn = 0\ntry:\n  while True: os.dup(0); n += 1\nexcept OSError: print(n)")
    assert int(output) < 1100


async def test_endless_output_is_cut_and_the_program_killed(box: Box) -> None:
    done = await box.sandbox.exec(["bash", "-c", "trap '' TERM HUP INT; exec yes"], 1.0)
    assert done.timed_out
    assert done.truncated
    assert len(done.output) < 70_000
    assert (await box.sh("pgrep -cx yes"))[1] == "0\n"


async def test_no_core_dumps(box: Box) -> None:
    assert (await box.sh("sh -c 'kill -SEGV $$'; ls"))[1].count("core") == 0


# ---- reach


async def test_nothing_runs_as_root_and_nothing_can_become_it(box: Box) -> None:
    _, output = await box.sh("grep -E '^(Uid|CapEff|CapPrm|NoNewPrivs|Seccomp):' /proc/self/status")
    fields = dict(line.split(":", 1) for line in output.splitlines())
    assert "0" not in fields["Uid"].split()
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")


async def test_private_files_of_the_host(box: Box) -> None:
    secret = Path.home() / ".prorl-test-secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    try:
        for path in ("/etc/shadow", str(secret), "/proc/1/root/etc/shadow", "/proc/1/environ", "/dev/vda", "/dev/mem", "/dev/kmem"):
            code, output = await box.sh(f"head -c 100 {path}")
            assert code != 0, f"{path}: {output!r}"
    finally:
        secret.unlink()


async def test_files_of_another_sandbox(box: Box) -> None:
    other = await box.daemon.host.start("run/2/1", "run", SPEC)
    async with box.daemon.host.connect(other) as neighbour:
        where = (await neighbour.exec(["pwd"], 5.0)).output.strip()
        await neighbour.put("answer", b"42")
        assert (await box.sh(f"cat {where}/answer"))[0] != 0
        assert (await box.sh("cat /proc/[0-9]*/root/workspace/answer /proc/[0-9]*/cwd/answer"))[1].count("42") == 0


async def test_no_secret_of_the_host_is_in_any_environment(box: Box) -> None:
    os.environ["PRORL_TEST_API_KEY"] = "sk-secret"
    try:
        ref = await box.daemon.host.start("run/3/1", "run", SPEC)
        async with box.daemon.host.connect(ref) as sandbox:
            done = await sandbox.exec(["bash", "-c", "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"], 10.0)
    finally:
        del os.environ["PRORL_TEST_API_KEY"]
    assert "PATH=" in done.output
    assert "sk-secret" not in done.output
    assert "SSH_" not in done.output


async def test_no_descriptor_of_ours_is_open_inside(box: Box) -> None:
    _, output = await box.py("import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))")
    assert output == "[0, 1, 2, 3]\n"  # 3 is the listing itself


async def test_network(box: Box) -> None:
    need_walls(box)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await box.sh(f"exec 3<>/dev/tcp/127.0.0.1/{port}"))[0] != 0
    for address in ("169.254.169.254", "8.8.8.8"):
        code, output = await box.py(f"import socket; socket.create_connection(('{address}', 80), 2)")
        assert code == 1, output
    code, _ = await box.py("import socket; socket.getaddrinfo('example.org', 80)")
    assert code == 1


async def test_abstract_sockets_of_the_host(box: Box) -> None:
    need_walls(box)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0prorl-test-abstract")
        server.listen(1)
        code, _ = await box.py("import socket; socket.socket(socket.AF_UNIX).connect('\\0prorl-test-abstract')")
    assert code == 1


async def test_tool_sockets_are_out_of_reach(box: Box) -> None:
    other = await box.daemon.host.start("run/2/1", "run", SPEC)
    for path in (other.socket_path, box.ref.socket_path, str(box.daemon.root.parent / "sd")):
        code, output = await box.py(f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})")
        assert code == 1, path
        assert "Permission denied" in output or "No such file" in output


async def test_processes_of_the_host(box: Box) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        await box.sh(f"kill -9 {victim.pid}; kill -9 {os.getpid()}; kill -STOP {box.daemon.process.pid}")
        assert victim.poll() is None
        assert (await box.daemon.host.status())["live"] == 1
    finally:
        victim.kill()
        victim.wait()


async def test_kill_everything_hits_no_neighbour(box: Box) -> None:
    other = await box.daemon.host.start("run/2/1", "run", SPEC)
    async with box.daemon.host.connect(other) as neighbour:
        await neighbour.call("bash", {"command": "x=1"}, 5.0)
        kill = box.sandbox.call("bash", {"command": "kill -9 -1; true"}, 10.0)
        if box.kind == "local":
            with pytest.raises(SandboxError) as caught:  # the agent's uid is the tool server's uid there
                await kill
            assert caught.value.code is FailureCode.SANDBOX_BROKEN, "the policy did it"
        else:
            await kill
            assert (await box.sandbox.call("bash", {"command": "echo alive"}, 10.0)).output == "alive\n"
        assert (await neighbour.call("bash", {"command": "echo $x"}, 5.0)).output == "1\n"


PRIVILEGED = (
    "mount -t tmpfs none /mnt",
    "unshare -Ur true",
    "unshare -n true",
    "chroot / true",
    "dmesg",
    "echo 1 > /proc/sys/vm/swappiness",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo -1000 > /proc/self/oom_score_adj",
    "echo b > /proc/sysrq-trigger",
    "cp /bin/bash s && chmod 4755 s && ./s -p -c '[ $EUID = 0 ]'",
    "nsenter -t 1 -a true",
    "touch /usr/x",
    "touch /etc/x",
    "mknod b b 253 0 && head -c 1 b",
)


async def test_privileged_acts_fail(box: Box) -> None:
    for attack in PRIVILEGED:
        code, output = await box.sh(attack)
        assert code != 0, f"{attack}: {output}"


SYSTEM_CALLS = {
    "ptrace": "l.ptrace(16, 1, 0, 0)",
    "keyctl": "l.syscall(250, 0, 0, 0, 0)",
    "bpf": "l.syscall(321, 0, 0, 0)",
    "userfaultfd": "l.syscall(323, 0)",
    "io_uring": "l.syscall(425, 8, 0)",
    "perf": "l.syscall(298, 0, 0, 0, 0, 0)",
    "setns": "l.setns(0, 0)",
    "clone with a user namespace": "l.syscall(56, 0x10000011, 0, 0, 0, 0)",
    "open_tree": "l.syscall(428, -100, b'/', 1)",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers here are those of x86_64")
async def test_system_calls_that_no_tool_needs(box: Box) -> None:
    lines = [f"print({name!r}, {call}, ctypes.get_errno())" for name, call in SYSTEM_CALLS.items()]
    _, output = await box.py("import ctypes; l = ctypes.CDLL(None, use_errno=True)\n" + "\n".join(lines))
    assert output.splitlines() == [f"{name} -1 1" for name in SYSTEM_CALLS]


async def test_typing_into_a_terminal_is_denied(box: Box) -> None:
    _, output = await box.py("import fcntl, pty\nm, s = pty.openpty()\nfcntl.ioctl(s, 0x5412, b'x')")
    assert "Operation not permitted" in output


# ---- what is left


async def _count(pattern: str) -> int:
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    found = 0
    for name in names:
        try:
            found += pattern.encode() in Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
    return found


async def test_daemons_end_with_the_sandbox(box: Box) -> None:
    mark = f"60.{os.getpid()}{len(box.kind)}"
    await box.sh(f"setsid nohup sleep {mark} >/dev/null 2>&1 & setsid bash -c '(sleep {mark} &)' & sleep 0.3")
    assert await _count(mark) >= 2
    await box.daemon.host.stop(box.ref)
    assert await _count(mark) == 0


async def test_a_fork_storm_does_not_outrun_stop(box: Box) -> None:
    mark = f"0.5{os.getpid()}{len(box.kind)}"
    storm = f"while :; do (sleep {mark} & sleep {mark} & sleep {mark}) & done"
    running = asyncio.create_task(box.sandbox.call("bash", {"command": storm}, 30.0))
    await asyncio.sleep(0.5)
    await box.daemon.host.stop(box.ref)
    with pytest.raises(SandboxError) as caught:
        await running
    assert caught.value.code is FailureCode.SANDBOX_LOST, "we stopped it"
    assert await _count(mark) == 0


async def test_a_tree_of_any_depth_and_name_is_removed(box: Box) -> None:
    await box.py(
        "import os\nopen('new\\nline', 'w'); open(b'\\xff\\xfe', 'w'); os.symlink('/', 'root'); os.mkfifo('pipe')\n"
        "os.mkdir('locked'); open('locked/x', 'w'); os.chmod('locked', 0)\n"
        "for i in range(1500): os.mkdir('d'); os.chdir('d')"
    )
    await box.daemon.host.stop(box.ref)
    assert list((box.daemon.root / "work").iterdir()) == []
    assert list((box.daemon.root / "live").iterdir()) == []
