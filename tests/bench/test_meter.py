"""The meter sees what a tree of processes uses, also when nobody waits for a part of it."""

from __future__ import annotations

import subprocess
import sys

from prorl.bench.meter import CpuMeter, cpu_meter, pss_mb

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PARENT = f"""
import subprocess, sys
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {BURN!r}])
child.wait()
print("done", flush=True)
sys.stdin.readline()
"""


def _used_s(meter: CpuMeter) -> float:
    with subprocess.Popen(
        [sys.executable, "-I", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        meter.watch(process.pid)
        before_s = meter.cpu_s()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        used_s = meter.cpu_s() - before_s
        assert pss_mb(process.pid) > 1.0
    return used_s


def test_cpu_of_a_child_is_counted_with_a_group_of_its_own_and_without() -> None:
    with cpu_meter() as meter:
        assert 0.25 < _used_s(meter) < 30.0
    assert 0.25 < _used_s(CpuMeter(None)) < 30.0


def test_the_process_group_has_exited_afterwards() -> None:
    with cpu_meter() as meter:
        source, group = meter.source, meter._group
    assert (group is None) == (source != "cpuacct")
    assert group is None or not group.exists()
