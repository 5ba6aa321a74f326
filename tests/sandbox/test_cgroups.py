"""Control groups of either version: which are chosen, and that their limits hold where they can be
made.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.linux import procfs
from prorl.sandbox.node import cgroups
from prorl.sandbox.node.cgroups import LEAF, Cgroups, delegated_base
from tests.waiting import wait_until

HOG = "import time; x = bytearray(b'x') * (200 << 20); time.sleep(30)"
FORKS = (
    "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(30)\nexcept OSError:"
    " time.sleep(30)"
)
SPIN = "while True: pass"


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    made = Cgroups(f"test-{secrets.token_hex(4)}")
    yield made
    made.close()


def need(groups: Cgroups, controller: str) -> None:
    """Skip where the kernel or our rights do not give it."""
    if controller not in groups.enforced:
        pytest.skip(f"no group with {controller} can be made here")


def run_in(folders: tuple[str, ...], code: str) -> subprocess.Popen[bytes]:
    join = (
        "import sys\nfor folder in sys.argv[1:]: open(folder + '/cgroup.procs', 'w').write('0')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", join + code, *folders], stderr=subprocess.DEVNULL
    )


def ended(processes: list[subprocess.Popen[bytes]]) -> int:
    return sum(process.poll() is not None for process in processes)


async def test_memory_of_all_processes_together(groups: Cgroups) -> None:
    need(groups, "memory")
    folders = groups.make("a", 300 << 20, 50)
    assert not Cgroups.out_of_memory(folders)
    hogs = [run_in(folders, HOG) for _ in range(2)]
    wait_until(lambda: ended(hogs) == 1)
    assert Cgroups.out_of_memory(folders)
    await cgroups.remove(folders)
    assert [hog.wait(5) for hog in hogs] == [-9, -9], "what is left in a group ends with it"
    assert not any(os.path.exists(folder) for folder in folders)


async def test_number_of_processes(groups: Cgroups) -> None:
    need(groups, "pids")
    folders = groups.make("a", 300 << 20, 20)
    bomb = run_in(folders, FORKS)
    procs = next(
        Path(folder) / "pids.current" for folder in folders if Path(folder, "pids.current").exists()
    )
    wait_until(lambda: int(procs.read_text()) == 20 + cgroups.EXTRA_PROCESSES)
    await cgroups.remove(folders)
    bomb.wait(5)


async def test_cpu_time_is_limited_where_requested(groups: Cgroups) -> None:
    need(groups, "cpu")
    folders = groups.make("a", 300 << 20, 20, cpus=0.2)
    spin = run_in(folders, SPIN)
    time.sleep(0.3)
    begin, before = time.monotonic(), procfs.cpu_s(spin.pid)
    time.sleep(1.0)
    assert (procfs.cpu_s(spin.pid) - before) / (time.monotonic() - begin) < 0.35
    await cgroups.remove(folders)
    spin.wait(5)


async def test_groups_of_a_dead_sandboxd_are_removed_by_their_name() -> None:
    name = f"test-{secrets.token_hex(4)}"
    stale = Cgroups(name)
    if not stale.enforced:
        pytest.skip("no group can be made here")
    folders = stale.make("a", 300 << 20, 20)
    sleeper = run_in(folders, "import time; time.sleep(30)")
    procs = Path(folders[0], "cgroup.procs")
    wait_until(lambda: str(sleeper.pid) in procs.read_text().split())
    await cgroups.remove_parents(name)
    assert sleeper.wait(5) == -9
    assert not any(Path(folder).parent.exists() for folder in folders)


def mounted(folder: Path, root: str = "/") -> str:
    return f"36 25 0:31 {root} {folder} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def make_group(folder: Path, controllers: str = "memory pids", kind: str = "domain") -> Path:
    """The files of a group of version 2; `kind` is empty for the machine's top group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cgroup.controllers", "cgroup.subtree_control", "cgroup.procs"):
        (folder / name).write_text(controllers if name == "cgroup.controllers" else "")
    if kind:
        (folder / "cgroup.type").write_text(kind)
    return folder


@pytest.mark.parametrize(
    ("root", "own", "expected"),
    [
        ("/", "/user/job", "user/job"),
        ("/", f"/user/job/{LEAF}", "user/job"),
        ("/user", "/user/job", "job"),
        ("/", "/../other", None),
        ("/user", "/user2/job", None),
    ],
)
def test_our_own_group_is_located_where_it_is_mounted(
    tmp_path: Path, root: str, own: str, expected: str | None
) -> None:
    make_group(tmp_path)  # has a type, as the top of a container's view has
    for name in ("user/job", "job", "user2/job", "2/job"):
        make_group(tmp_path / name)
    proc = f"1:name=systemd:/user/job\n0::{own}\n"
    assert delegated_base(mounted(tmp_path, root), proc) == (
        tmp_path / expected if expected else None
    )


def test_no_mount_of_version_2_is_no_error(tmp_path: Path) -> None:
    line = f"30 23 0:26 / {tmp_path} rw - cgroup cgroup rw,memory\n"
    assert delegated_base(line, "4:memory:/x\n") is None


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may use the top group")
def test_root_takes_the_top_group_of_the_machine(tmp_path: Path) -> None:
    make_group(tmp_path, kind="")
    make_group(tmp_path / "session")
    assert delegated_base(mounted(tmp_path), "0::/session\n") == tmp_path


@pytest.mark.parametrize(
    ("file", "text", "most", "out"),
    [
        ("memory.events", "max 7\noom 2\noom_kill 1\noom_group_kill 0\n", "", True),
        ("memory.events", "max 7\noom 0\noom_kill 0\n", "", False),
        # the machine ran out, not the group
        ("memory.events", "max 0\noom 0\noom_kill 1\n", "", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "4096\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "4095\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", "4096\n", False),
        ("pids.max", "oom_kill 1", "", False),
    ],
)
def test_the_kernels_word_for_out_of_memory(
    tmp_path: Path, file: str, text: str, most: str, out: bool
) -> None:
    (tmp_path / file).write_text(text)
    if most:
        (tmp_path / "memory.max_usage_in_bytes").write_text(most)
        (tmp_path / "memory.limit_in_bytes").write_text("4096\n")
    assert Cgroups.out_of_memory((str(tmp_path),)) is out
