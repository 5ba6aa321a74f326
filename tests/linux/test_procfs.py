"""/proc against real processes: alive, zombie, gone, and below whatever thread started them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from prorl.linux import procfs


def test_a_zombie_and_an_exited_process_have_no_start_time() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process_stat = procfs.stat(child.pid)
    assert process_stat is not None
    assert (process_stat.state, process_stat.parent) == ("Z", os.getpid())
    assert procfs.start_ticks(child.pid) is None
    child.wait()
    assert procfs.stat(child.pid) is None
    assert procfs.start_ticks(child.pid) is None
    assert procfs.cpu_s(child.pid) == procfs.pss_bytes(child.pid) == 0
    assert procfs.children(child.pid) == []


def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 (x', 0, 0, 0); print(flush=True);"
        " sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        process_stat = procfs.stat(child.pid)
        assert process_stat is not None
        assert (process_stat.state in "RSD", process_stat.parent) == (True, os.getpid())
        assert process_stat.rss_bytes > 1 << 20
        assert procfs.start_ticks(child.pid) == process_stat.start_ticks
        assert child.stdin
        child.stdin.close()


def test_descendants_include_children_of_every_thread_but_not_the_process_itself() -> None:
    started: list[subprocess.Popen[bytes]] = []
    stay = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=-1))
        stay.wait()

    thread = threading.Thread(target=start)
    thread.start()
    while not started:
        pass
    (shell,) = started
    try:
        assert shell.stdout
        shell.stdout.readline()
        assert shell.pid in procfs.children(os.getpid())
        (sleep,) = procfs.children(shell.pid)
        descendants = procfs.descendants(os.getpid())
        assert {shell.pid, sleep} <= set(descendants)
        assert os.getpid() not in descendants
        assert procfs.descendants(shell.pid) == [sleep]
        os.kill(sleep, 9)
    finally:
        shell.communicate()
        stay.set()
        thread.join()
