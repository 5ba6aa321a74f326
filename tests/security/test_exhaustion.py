"""Tests of what hostile code uses up in a sandbox: bounded, neighbours unharmed, the right one
blamed.

In every kind.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from prorl.sandbox import kinds
from tests.faults.leftovers import marked
from tests.security.box import SPEC, Box, need_own_uid, need_walls

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
async def test_fork_bomb_stays_inside_and_the_shell_comes_back(box: Box) -> None:
    bomb = asyncio.create_task(
        box.sandbox.call("bash", {"command": ":(){ :|:& };: ; sleep 3"}, 1.0)
    )
    async with box.neighbour() as neighbour:
        assert (await neighbour.call("bash", {"command": "echo fine"}, 10.0)).output == "fine\n"
        assert (
            await neighbour.exec(
                ["bash", "-c", "for i in $(seq 20); do /bin/true & done; wait; echo $?"], 10.0
            )
        ).output == "0\n"
    await bomb
    assert "alive" in (await box.sandbox.call("bash", {"command": "echo alive"}, 20.0)).output


async def test_number_of_processes_is_bounded(box: Box) -> None:
    need_own_uid(box)
    _, output = await box.py(
        "import os, time\nn = 0\ntry:\n  while n < 300:\n    if os.fork() == 0: time.sleep(20);"
        " os._exit(0)\n    n += 1\nexcept OSError: pass\nprint(n)"
    )
    assert 10 < int(output) < 64


async def test_memory_of_a_single_process(box: Box) -> None:
    code, output = await box.py("x = bytearray(3 << 30)")
    assert code == 1
    assert "MemoryError" in output
    assert await box.sh("echo alive") == (0, "alive\n")


async def test_all_of_it_is_killed_first_when_the_machine_runs_out_of_memory(box: Box) -> None:
    where = "/proc/self" if box.kind == "local" else "/proc/[0-9]*"
    _, output = await box.sh(f"cat {where}/oom_score_adj; sleep 0.05; cat /proc/self/oom_score_adj")
    assert set(output.split()) == {"1000"}


async def test_size_of_a_single_file(box: Box) -> None:
    await box.sh("head -c 200M /dev/zero > big; truncate -s 1T sparse")
    _, output = await box.sh("stat -c %s big sparse; rm -f big sparse")
    assert output.split() == [str(SPEC.file_bytes), "0"]


@pytest.mark.parametrize(
    ("folder", "limit_bytes"),
    [("/tmp", SPEC.tmp_bytes), ("/dev/shm", 64 << 20), (".", SPEC.workspace_bytes)],
)
async def test_sized_folders(box: Box, folder: str, limit_bytes: int) -> None:
    need_walls(box)
    _, output = await box.sh(
        f"cd {folder}; for i in 1 2 3 4; do head -c 50M /dev/zero > filler$i 2>/dev/null; done;"
        " cat filler* | wc -c; rm filler*"
    )
    assert 0 < int(output) <= limit_bytes


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "/tmp", "/dev/shm"])
async def test_number_of_files(box: Box, folder: str) -> None:
    need_walls(box)
    code = (
        f"import os\nos.chdir('{folder}')\nfor i in range(400_000): os.close(os.open(f'f{{i}}',"
        " os.O_CREAT))"
    )
    exit_code, output = await box.py(code, 60.0)
    assert exit_code == 1
    assert "No space left" in output


async def test_open_files(box: Box) -> None:
    _, output = await box.py(
        "import os\nn = 0\ntry:\n  while True: os.dup(0); n += 1\nexcept OSError: print(n)"
    )
    assert int(output) < 1100


async def test_endless_output_is_cut_and_the_program_killed(box: Box) -> None:
    mark = f"endless{os.getpid()}"
    done = await box.sandbox.exec(["bash", "-c", f"trap '' TERM HUP INT; exec yes {mark}"], 1.0)
    assert done.timed_out
    assert done.truncated
    assert len(done.output) < 70_000
    assert not marked(mark)


async def test_no_core_dumps(box: Box) -> None:
    assert (await box.sh("sh -c 'kill -SEGV $$'; ls"))[1].count("core") == 0


async def test_descriptors_of_all_processes_together(box: Box) -> None:
    """Tens of thousands of open files: neither the tool server nor a neighbour lacks one."""
    hoard = (
        "import os, sys, time\nfor _ in range(40):\n  if os.fork() == 0:\n    try:\n      while"
        " True: os.dup(0)\n    except OSError: pass\n    time.sleep(60)\nprint('done', flush=True);"
        " time.sleep(1)"
    )
    assert (await box.py(hoard))[1] == "done\n"
    assert await box.sh("echo alive") == (0, "alive\n")
    async with box.neighbour() as neighbour:
        assert (await neighbour.exec(["cat", "/etc/hostname", "/etc/passwd"], 10.0)).output


async def test_spinning_processes_leave_a_neighbour_its_share(box: Box) -> None:
    await box.sh("for i in $(seq 30); do (while :; do :; done) & done")
    async with box.neighbour() as neighbour:
        done = await neighbour.call("bash", {"command": "echo fine"}, 20.0)
        assert (done.output, done.timed_out) == ("fine\n", False)


HOARD_PTYS = """
import os, time
read, write = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        count = 0
        try:
            while count < 400:
                os.openpty()
                count += 1
        except OSError:
            pass
        os.write(write, b"%d\\n" % count)
        time.sleep(60)
lines = os.fdopen(read)
print(sum(int(lines.readline()) for _ in range(3)))
"""


async def test_number_of_terminals(box: Box) -> None:
    """Every sandbox that may start here holds as many as it can, and none takes a neighbour's."""
    if not kinds.load(box.kind).caps_ptys:
        pytest.skip(f"{box.kind}: the watchdog ends a sandbox that hoards them, see test_watchdog")
    pool, reserve = (
        int(Path(f"/proc/sys/kernel/pty/{name}").read_text()) for name in ("max", "reserve")
    )
    max_lives = (await box.daemon.host.status())["max_lives"]
    assert 8 < int((await box.py(HOARD_PTYS))[1]) <= (pool - reserve) / max_lives
    done = await box.sandbox.call("bash", {"command": "tty"}, 10.0)
    assert done.output.startswith("/dev/pts/"), "its shell has one"


async def test_limits_of_its_namespaces_are_not_its_own_to_set(box: Box) -> None:
    need_walls(box)
    code = (
        "import os\nfor where, _, names in os.walk('/proc/sys'):\n  for name in names:\n    path ="
        " f'{where}/{name}'\n    try:\n      text = open(path).read()\n      with"
        " open(path, 'w') as file: file.write(text)\n      print(path)\n    except OSError: pass"
    )
    assert (await box.py(code))[1] == ""


async def test_shared_memory_without_an_owner_goes_with_the_sandbox(box: Box) -> None:
    """System V segments belong to a namespace, which ends; those of `local` to the machine."""
    need_walls(box)
    before = Path("/proc/sysvipc/shm").read_text()
    code = (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nl.shmat.restype = ctypes.c_void_p\ni"
        " = l.shmget(0, 32 << 20, 0o1600)\np = l.shmat(i, None, 0)\nctypes.memset(p, 1, 32 <<"
        " 20)\nprint(i >= 0)"
    )
    assert (await box.py(code))[1] == "True\n"
    assert Path("/proc/sysvipc/shm").read_text() == before


async def test_a_command_that_fills_its_own_shell_with_commands(box: Box) -> None:
    """The pipe that commands come through is the agent's to write to; it hurts nobody else and does
    not stay.
    """
    await box.sandbox.call(
        "bash",
        {
            "command": (
                "for n in 1 2 3; do printf 'echo injected\\0' > /proc/$$/fd/3; done 2>/dev/null"
            )
        },
        10.0,
    )
    for _ in range(5):
        done = await box.sandbox.call("bash", {"command": "echo mine"}, 10.0)
        assert not done.timed_out
    assert await box.sh("echo alive") == (0, "alive\n")
