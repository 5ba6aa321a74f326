"""Tests of what hostile code reaches for in a sandbox: nothing of the host, of a neighbour or of
us.

In every kind.

`local` isolates little; what it does not contain is listed here as such, so that the list cannot
rot.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox.launch.spec import package_folders
from prorl.types import FailureCode
from tests.security.box import SPEC, Box, need_own_uid, need_walls

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_nothing_runs_as_root_and_nothing_can_become_it(box: Box) -> None:
    _, output = await box.sh("grep -E '^(Uid|CapEff|CapPrm|NoNewPrivs|Seccomp):' /proc/self/status")
    fields = dict(line.split(":", 1) for line in output.splitlines())
    assert "0" not in fields["Uid"].split()
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")


async def test_private_files_of_the_host(box: Box) -> None:
    need_own_uid(box)
    secret = Path.home() / ".prorl-test-secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    try:
        for path in (
            "/etc/shadow",
            str(secret),
            "/proc/1/root/etc/shadow",
            "/proc/1/environ",
            "/dev/vda",
            "/dev/mem",
            "/dev/kmem",
        ):
            code, output = await box.sh(f"head -c 100 {path}")
            assert code != 0, f"{path}: {output!r}"
    finally:
        secret.unlink()


async def test_files_of_another_sandbox(box: Box) -> None:
    need_own_uid(box)
    async with box.neighbour() as neighbour:
        where = (await neighbour.exec(["pwd"], 60.0)).output.strip()
        await neighbour.put("answer", b"42")
        assert (await box.sh(f"cat {where}/answer"))[0] != 0
        assert (await box.sh("cat /proc/[0-9]*/root/workspace/answer /proc/[0-9]*/cwd/answer"))[
            1
        ].count("42") == 0


async def test_no_secret_of_the_host_is_in_any_environment(box: Box) -> None:
    os.environ["PRORL_TEST_API_KEY"] = "sk-secret"
    try:
        ref = await box.daemon.host.start("run/3/1", "run", SPEC)
        async with box.daemon.host.connect(ref) as sandbox:
            done = await sandbox.exec(
                ["bash", "-c", "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"], 10.0
            )
    finally:
        del os.environ["PRORL_TEST_API_KEY"]
    assert "PATH=" in done.output
    assert "sk-secret" not in done.output
    assert "SSH_" not in done.output


async def test_no_descriptor_of_ours_is_open_inside(box: Box) -> None:
    _, output = await box.py(
        "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    )
    assert output == "[0, 1, 2, 3]\n"  # 3 is the listing itself


async def test_an_agent_reads_no_package_that_the_host_has_installed(box: Box) -> None:
    """A copy of what a task is about may lie there. What the tool server runs with stays."""
    if box.kind != "pyns":
        pytest.skip("the other kinds show the host's /usr whole where they have no image")
    assert await box.sh("cat /proc/cmdline") == (0, "")
    show = "find /usr/lib/python3* /usr/local/lib/python3* -path '*-packages/*' -name '*.py'"
    ours = {os.path.realpath(path) for path in package_folders()}
    if any(path.startswith("/usr/") for path in ours):
        pytest.skip("the tool server's own interpreter is the host's")
    if not list(Path("/usr/lib").glob("python3*/dist-packages/*")):
        pytest.skip("the host has installed no package that could be hidden")
    assert (await box.sh(f"{show} 2>/dev/null"))[1] == ""


SELF = (
    "import os\nprint(sorted(os.environ))\nprint([word.partition('=')[0] for word in"
    " open('/proc/self/environ').read().split('\\0') if word])\nprint([os.path.exists(f'/proc/self/"
    "fd/{fd}') and os.readlink(f'/proc/self/fd/{fd}').partition(':')[0] for fd in"
    " range(1024)][:8])\n"
    "print([fd for fd in range(4, 1024) if os.path.exists(f'/proc/self/fd/{fd}')])"
)
PRIVATE = "environ maps fd mem stack syscall auxv cwd root exe io smaps map_files"


async def test_a_forked_interpreter_has_nothing_of_who_forked_it(box: Box) -> None:
    """The zygote forks the tool server, which forks this: neither's environment, descriptors or
    identity is left in it.
    """
    done = await box.sandbox.call("python", {"code": SELF}, 20.0)
    environ, first_environ, descriptors, others = map(eval, done.output.splitlines())
    ours = {"GIT_PAGER", "HOME", "LANG", "LOGNAME", "PAGER", "PATH", "SHELL", "TERM", "USER"}
    assert set(environ) == {*ours, "PYTHONDONTWRITEBYTECODE"}
    foreign = {"PWD", "SHLVL", "OLDPWD", "_", "LC_CTYPE", "HOSTNAME"}
    foreign |= {"PYTHONPATH"} & set(os.environ)  # by which the zygote found prorl
    runtime = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "PS1")
    outside = {name for name in first_environ if name.startswith(runtime)}
    assert set(first_environ) <= {*environ, *foreign, *outside}
    assert descriptors[:4] == ["/dev/null", "pipe", "pipe", "socket"]
    assert others == []


async def test_nothing_of_the_tool_server_can_be_read(box: Box) -> None:
    need_own_uid(box)
    for place in PRIVATE.split():
        code, output = await box.sh(f"ls /proc/$PPID/{place}/ || head -c 10 /proc/$PPID/{place}")
        assert code != 0, (place, output)


async def test_network(box: Box) -> None:
    need_walls(box)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await box.sh(f"exec 3<>/dev/tcp/127.0.0.1/{port}"))[0] != 0
    for address in ("169.254.169.254", "8.8.8.8"):
        code, output = await box.py(
            f"import socket; socket.create_connection(('{address}', 80), 2)"
        )
        assert code == 1, output
    code, _ = await box.py("import socket; socket.getaddrinfo('example.org', 80)")
    assert code == 1


async def test_abstract_sockets_of_the_host(box: Box) -> None:
    need_walls(box)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0prorl-test-abstract")
        server.listen(1)
        code, _ = await box.py(
            "import socket; socket.socket(socket.AF_UNIX).connect('\\0prorl-test-abstract')"
        )
    assert code == 1


async def test_no_other_family_of_sockets(box: Box) -> None:
    """AF_VSOCK reaches the host of a virtual machine from any network namespace."""
    code = (
        "import socket\nfor family in range(1, 50):\n  try: socket.socket(family,"
        " socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW).close(); print(family)\n  except"
        " OSError: pass"
    )
    _, output = await box.py(code)
    assert {"1"} <= set(output.split()) <= {"1", "2", "10", "16"}


async def test_tool_sockets_are_out_of_reach(box: Box) -> None:
    need_own_uid(box)
    other = await box.daemon.host.start("run/2/1", "run", SPEC)
    for path in (other.socket_path, box.ref.socket_path, str(box.daemon.root.parent / "sd")):
        code, output = await box.py(
            f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        )
        assert code == 1, path
        assert "Permission denied" in output or "No such file" in output


async def test_processes_of_the_host(box: Box) -> None:
    need_own_uid(box)
    victim = subprocess.Popen(["sleep", "60"])
    try:
        await box.sh(
            f"kill -9 {victim.pid}; kill -9 {os.getpid()}; kill -STOP {box.daemon.process.pid}"
        )
        assert victim.poll() is None
        assert (await box.daemon.host.status())["live"] == 1
    finally:
        victim.kill()
        victim.wait()


async def test_kill_everything_hits_no_neighbour(box: Box) -> None:
    need_own_uid(box)
    async with box.neighbour() as neighbour:
        await neighbour.call("bash", {"command": "x=1"}, 60.0)
        kill = box.sandbox.call("bash", {"command": "kill -9 -1; true"}, 10.0)
        if box.kind == "local":
            # the agent's uid is the tool server's uid there
            with pytest.raises(SandboxError) as caught:
                await kill
            assert caught.value.code is FailureCode.SANDBOX_BROKEN, "the policy did it"
        else:
            await kill
            assert (
                await box.sandbox.call("bash", {"command": "echo alive"}, 10.0)
            ).output == "alive\n"
        assert (await neighbour.call("bash", {"command": "echo $x"}, 60.0)).output == "1\n"


async def test_what_can_be_written_is_the_sandboxs_own(box: Box) -> None:
    """Folders and files that the agent may write to, wherever they are; `/proc` and devices that
    hold nothing apart.
    """
    need_walls(box)
    places = (
        "/ /etc /usr /usr/local/bin /opt /opt/prorl /opt/prorl/bin /var /run /home /root /mnt /srv"
        " /boot /lib /bin /sys /proc/sys"
    )
    _, output = await box.sh(
        f"for place in {places}; do [ -w $place ] && touch $place/prorl-test 2>/dev/null && echo"
        " $place; done"
    )
    assert output == ""
    _, output = await box.sh(
        "find /dev -type b; find /dev -type c | sort; find /sys -writable -type f 2>/dev/null |"
        " head -3"
    )
    names = "null zero full random urandom tty console ptmx pts/ptmx"
    devices = {f"/dev/{name}" for name in names.split()}
    assert (
        set(output.split()) - {line for line in output.split() if line.startswith("/dev/pts/")}
        <= devices
    )


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
    "ln /etc/shadow hard && cat hard",
    "cat /proc/kcore",
    "cat /proc/kallsyms | grep -v ' 0000000000000000\\|^0000000000000000' | grep .",
    "renice -n -5 -p $$",
    "chrt -f 50 true",
    "ulimit -u unlimited",
    "ulimit -v unlimited",
    "date -s 2001-01-01",
    "swapon /workspace",
    "ip link add x type dummy",
    "ip link set lo down",
    "iptables -L",
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
    "open_tree_attr": "l.syscall(467, -100, b'/', 1, 0, 0)",
    "io_setup, whose pool is the machine's": "l.syscall(206, 1, ctypes.byref(ctypes.c_ulong()))",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers here are those of x86_64")
async def test_system_calls_that_no_tool_needs(box: Box) -> None:
    lines = [f"print({name!r}, {call}, ctypes.get_errno())" for name, call in SYSTEM_CALLS.items()]
    _, output = await box.py(
        "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n" + "\n".join(lines)
    )
    assert output.splitlines() == [f"{name} -1 1" for name in SYSTEM_CALLS]


@pytest.mark.parametrize("request_", [0x5412, 0x5423], ids=["typing", "line discipline"])
async def test_terminals_are_not_the_agents_to_take_over(box: Box, request_: int) -> None:
    _, output = await box.py(
        f"import fcntl, pty\nm, s = pty.openpty()\nfcntl.ioctl(s, {request_}, bytes(4))"
    )
    assert "Operation not permitted" in output


async def test_rare_protocols_are_refused(box: Box) -> None:
    """Attack surface that no tool needs: UDP-Lite, MPTCP; TCP passes."""
    for kind, protocol, expected in (
        (2, 136, "not supported"),
        (1, 262, "not supported"),
        (1, 6, ""),
    ):
        _, output = await box.py(f"import socket; socket.socket(2, {kind}, {protocol})")
        assert expected in output if expected else output == "", output
